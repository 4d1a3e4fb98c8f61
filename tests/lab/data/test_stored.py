"""Sources by URL: local copies that are whole, shared, within a limit, and named like the objects."""

from __future__ import annotations

import errno
import os
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fsspec.implementations.local import LocalFileSystem

from tests.support.runs import make_corpus
from trainer.data.layout import discover_nested
from trainer.errors import UserError
from trainer.lab.storage import Cache, Storage, discover_stored, stored_direct, stored_nested
from trainer.lab.storage import copy as copy_files


@pytest.fixture
def corpus(tmp_path):
    return make_corpus(tmp_path / "corpus", streams=2, documents=3)


def counting(monkeypatch):
    got: list[str] = []
    real = Storage.get

    def get(self, name, local):
        got.append(name)
        real(self, name, local)

    monkeypatch.setattr(Storage, "get", get)
    return got


def test_a_nested_root_gives_the_streams_of_the_local_corpus_and_is_downloaded_again_once_it_changes(
    corpus, tmp_path, monkeypatch
):
    got = counting(monkeypatch)
    cache = Cache(tmp_path / "cache")
    (corpus / "a" / "_SUCCESS").write_text("")
    (corpus / "a" / "notes.docx").write_text("not data")
    streams, copy = stored_nested(f"file://{corpus}", None, format="auto", cache=cache)
    local = discover_nested(corpus)
    whole = [Path(s.path).read_bytes() for s in local]
    assert [replace(s, path="", root="") for s in streams] == [replace(s, path="", root="") for s in local]
    assert [Path(s.path).read_bytes() for s in streams] == whole
    assert sorted(got) == sorted(s.relative_path for s in local)
    assert copy.is_new
    again, _ = stored_nested(f"file://{corpus}", None, format="auto", cache=cache)
    assert again == streams
    assert len(got) == len(local)
    Path(local[0].path).write_text('{"text": "changed"}\n')
    after, _ = stored_nested(f"file://{corpus}", None, format="auto", cache=cache)
    assert sorted(got[len(local) :]) == sorted(s.relative_path for s in local)
    assert Path(after[0].path).read_text() == '{"text": "changed"}\n'
    assert Path(streams[0].path).read_bytes() == whole[0]  # a run that reads the old copy goes on with it
    assert after[0].relative_path == streams[0].relative_path


def test_a_download_that_ends_early_is_no_copy(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(Storage, "get", lambda self, name, local: local.write_bytes(b"{"))
    with pytest.raises(UserError, match=r"has not the .* bytes of the listing"):
        stored_nested(f"file://{corpus}", None, format="auto", cache=Cache(tmp_path / "cache"))


def test_a_source_that_does_not_fit_is_refused_with_both_numbers(tmp_path, monkeypatch):
    root = tmp_path / "big" / "a"
    root.mkdir(parents=True)
    (root / "x.txt").write_text("x" * 3000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=2000))
    with pytest.raises(UserError, match=r"takes 3e-06 GB more as a local copy; 2e-06 GB are free in .*cache"):
        stored_nested(f"file://{root.parent}", None, format="auto", cache=Cache(tmp_path / "cache"))
    assert not list((tmp_path / "cache").glob("*/"))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_is_named_and_what_is_missing_or_cut_is_copied_later(corpus, tmp_path, monkeypatch, code):
    cache, real, url = Cache(tmp_path / "cache"), LocalFileSystem.get_file, f"file://{corpus}"

    def get_file(self, path, local, **options):
        real(self, path, local, **options)
        if path.endswith("b/stream1.jsonl"):
            os.truncate(local, 10)
            raise OSError(code, os.strerror(code), path)  # shutil names the file that it reads

    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, "get_file", get_file)
        with pytest.raises(UserError, match=f"{os.strerror(code)}; .* copies that no run reads in {cache.directory}$"):
            discover_stored([url], format="auto", cache=cache)
    assert not [*cache.directory.glob("*/.parts"), *cache.directory.glob("*/entry.json")]
    got, whole = counting(monkeypatch), [Path(s.path).read_bytes() for s in discover_nested(corpus)]
    for number in (1, 2):
        streams = discover_stored([url], format="auto", cache=cache).streams
        assert [Path(s.path).read_bytes() for s in streams] == whole
        assert got == ["b/stream1.jsonl"] * number
        os.truncate(streams[3].path, 10)  # a copy that is cut later is like one that was never made


def test_globs_and_files_by_url_have_their_urls_as_names(corpus, tmp_path):
    root = f"file://{corpus}"
    paths = [f"{root}/a/*.jsonl", f"{root}/b/stream1.jsonl", str(corpus / "b" / "stream0.jsonl")]
    streams, copies = stored_direct(paths, format="auto", cache=Cache(tmp_path / "cache"))
    names = [f"{root}/a/stream0.jsonl", f"{root}/a/stream1.jsonl", f"{root}/b/stream1.jsonl"]
    assert [s.relative_path for s in streams] == sorted([*names, str(corpus / "b" / "stream0.jsonl")])
    assert [s.modality for s in streams if "://" in s.relative_path] == ["a", "a", "b"]
    assert len(copies) == 2
    found = discover_stored([f"{root}/a"], format="auto", cache=Cache(tmp_path / "cache"))
    assert found.paths == (f"{root}/a/*",)


def test_the_index_beside_a_token_file_comes_with_it(tmp_path):
    (tmp_path / "tokens").mkdir()
    for name in ("x.bin", "x.idx", "y.bin"):
        (tmp_path / "tokens" / name).write_bytes(b"1234")
    for path in ("*.bin", "x.bin"):
        streams, copies = stored_direct(
            [f"file://{tmp_path}/tokens/{path}"], format="auto", cache=Cache(tmp_path / "cache")
        )
        assert (copies[0].directory / "x.idx").exists()
        assert all(stream.path.endswith(".bin") for stream in streams)


def test_what_is_not_there_is_refused(corpus, tmp_path):
    cache = Cache(tmp_path / "cache")
    for url, modalities, message in (
        (f"file://{corpus}/nothing", None, "nothing in it"),
        ("nosuch://x", None, "cannot be used as a store"),
        (f"file://{corpus}", ["a", "c"], f"file://{corpus}.*has no modality 'c'"),
    ):
        with pytest.raises(UserError, match=message):
            stored_nested(url, modalities, format="auto", cache=cache)
    with pytest.raises(UserError, match="cannot be read"):
        stored_direct([f"file://{corpus}/no.jsonl"], format="auto", cache=cache)


def test_a_key_that_leads_out_of_the_copy_is_refused(tmp_path):
    url = f"memory://{uuid.uuid4().hex}"
    storage = Storage(url, key="k")
    storage.write("a/x.txt", b"x")
    files = {"a/../../x.txt": storage.files()["a/x.txt"]}
    with pytest.raises(UserError, match="which cannot be a file"):
        copy_files(Cache(tmp_path / "cache"), storage, files)


def test_those_that_start_together_download_once(corpus, tmp_path, monkeypatch):
    """In threads: a lock of an open file is between them as it is between processes."""
    got, together = counting(monkeypatch), threading.Barrier(3)

    def start(_):
        together.wait()
        return stored_nested(f"file://{corpus}", None, format="auto", cache=Cache(tmp_path / "cache"))

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(start, range(3)))
    assert sum(copy.is_new for _, copy in found) == 1
    assert len(got) == len(set(got)) == len(discover_nested(corpus))
    assert len({tuple(Path(s.path).read_bytes() for s in streams) for streams, _ in found}) == 1


def test_a_user_without_a_home_is_refused_copies_alone(monkeypatch):
    def unknown(uid):
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(UserError, match=r"data\.cache_dir: ~/\.cache/trainer/data is in nobody's home"):
        Cache(None)
