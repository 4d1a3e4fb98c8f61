"""Sources by URL: local copies that are whole, shared, within a limit, and named like the objects."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tests.support.forks import fork_server
from tests.support.runs import make_corpus
from trainer.data.layout import discover_nested
from trainer.data.stored import Cache, discover_stored, stored_direct, stored_nested
from trainer.errors import UserError
from trainer.storage import Storage


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


def test_a_nested_root_gives_the_streams_of_the_local_corpus_and_a_second_start_downloads_nothing(
    corpus, tmp_path, monkeypatch
):
    got = counting(monkeypatch)
    cache = Cache(tmp_path / "cache", 0)
    (corpus / "a" / "_SUCCESS").write_text("")
    (corpus / "a" / "notes.docx").write_text("not data")
    streams, copy = stored_nested(f"file://{corpus}", None, format="auto", cache=cache)
    local = discover_nested(corpus)
    assert [(s.relative_path, s.modality, s.stream_id) for s in streams] == [
        (s.relative_path, s.modality, s.stream_id) for s in local
    ]
    assert [Path(s.path).read_bytes() for s in streams] == [Path(s.path).read_bytes() for s in local]
    assert sorted(got) == sorted(s.relative_path for s in local)
    again, _ = stored_nested(f"file://{corpus}", None, format="auto", cache=cache)
    assert again == streams
    assert len(got) == len(local)
    assert copy.is_new


def test_a_changed_object_is_another_copy_and_the_old_one_stays_as_it_was(corpus, tmp_path, monkeypatch):
    cache = Cache(tmp_path / "cache", 0)
    before, _first = stored_nested(f"file://{corpus}", None, format="auto", cache=cache)
    old = Path(before[0].path).read_bytes()
    (corpus / "a" / "stream0.jsonl").write_text('{"text": "changed"}\n')
    got = counting(monkeypatch)
    after, _second = stored_nested(f"file://{corpus}", None, format="auto", cache=cache)
    assert got == ["a/stream0.jsonl"]
    assert Path(after[0].path).read_text() == '{"text": "changed"}\n'
    assert Path(before[0].path).read_bytes() == old
    assert after[0].relative_path == before[0].relative_path


def test_a_cut_file_of_a_copy_is_downloaded_again(corpus, tmp_path, monkeypatch):
    cache = Cache(tmp_path / "cache", 0)
    streams, copy = stored_nested(f"file://{corpus}", None, format="auto", cache=cache)
    whole = Path(streams[1].path).read_bytes()
    Path(streams[1].path).write_bytes(whole[:10])
    copy.lock.close()
    got = counting(monkeypatch)
    stored_nested(f"file://{corpus}", None, format="auto", cache=cache)
    assert got == [streams[1].relative_path]
    assert Path(streams[1].path).read_bytes() == whole


def test_a_source_that_does_not_fit_is_refused_with_both_numbers(tmp_path):
    root = tmp_path / "big" / "a"
    root.mkdir(parents=True)
    (root / "x.txt").write_text("x" * 3000)
    with pytest.raises(UserError, match=r"takes 3e-06 GB as a local copy; data.cache_gb = 2e-06"):
        stored_nested(f"file://{root.parent}", None, format="auto", cache=Cache(tmp_path / "cache", 2000))
    assert not list((tmp_path / "cache").glob("*/"))


def test_the_least_recently_used_copy_makes_room_but_none_that_is_in_use(tmp_path):
    cache = Cache(tmp_path / "cache", 2500)
    roots = {}
    for name in "xyz":
        (tmp_path / name / "a").mkdir(parents=True)
        (tmp_path / name / "a" / "f.txt").write_text(name * 1000)
        roots[name] = f"file://{tmp_path / name}"

    def open_(name):
        return stored_nested(roots[name], None, format="auto", cache=cache)[1]

    x, y = open_("x"), open_("y")
    with pytest.raises(UserError, match=r"data.cache_gb = 2.5e-06, of which 2e-06 GB are in use"):
        open_("z")
    x.lock.close()
    z = open_("z")
    assert not x.directory.exists()
    assert y.directory.exists()
    assert z.directory.exists()


def test_globs_and_files_by_url_have_their_urls_as_names(corpus, tmp_path):
    root = f"file://{corpus}"
    paths = [f"{root}/a/*.jsonl", f"{root}/b/stream1.jsonl", str(corpus / "b" / "stream0.jsonl")]
    streams, copies = stored_direct(paths, format="auto", cache=Cache(tmp_path / "cache", 0))
    names = [f"{root}/a/stream0.jsonl", f"{root}/a/stream1.jsonl", f"{root}/b/stream1.jsonl"]
    assert [s.relative_path for s in streams] == sorted([*names, str(corpus / "b" / "stream0.jsonl")])
    assert {s.relative_path: s.modality for s in streams if "://" in s.relative_path} == dict(
        zip(names, "aab", strict=True)
    )
    assert len(copies) == 2
    found = discover_stored([f"{root}/a"], format="auto", cache=Cache(tmp_path / "cache", 0))
    assert found.paths == (f"{root}/a/*",)


def test_the_index_beside_a_token_file_comes_with_it(tmp_path):
    (tmp_path / "tokens").mkdir()
    for name in ("x.bin", "x.idx", "y.bin"):
        (tmp_path / "tokens" / name).write_bytes(b"1234")
    for path in ("*.bin", "x.bin"):
        streams, copies = stored_direct(
            [f"file://{tmp_path}/tokens/{path}"], format="auto", cache=Cache(tmp_path / "cache", 0)
        )
        assert (copies[0].directory / "x.idx").exists()
        assert all(stream.path.endswith(".bin") for stream in streams)


def test_what_is_not_there_is_refused(corpus, tmp_path):
    cache = Cache(tmp_path / "cache", 0)
    with pytest.raises(UserError, match="nothing in it"):
        stored_nested(f"file://{corpus}/nothing", None, format="auto", cache=cache)
    with pytest.raises(UserError, match="cannot be used as a store"):
        stored_nested("nosuch://x", None, format="auto", cache=cache)
    with pytest.raises(UserError, match="cannot be read"):
        stored_direct([f"file://{corpus}/no.jsonl"], format="auto", cache=cache)


def test_a_modality_that_is_missing_is_named_with_the_url(corpus, tmp_path):
    with pytest.raises(UserError, match=f"file://{corpus}.*has no modality 'c'"):
        stored_nested(f"file://{corpus}", ["a", "c"], format="auto", cache=Cache(tmp_path / "cache", 0))


def test_a_key_that_leads_out_of_the_copy_is_refused(tmp_path):
    url = f"memory://{uuid.uuid4().hex}"
    storage = Storage(url, key="k")
    storage.write("a/x.txt", b"x")
    files = {"a/../../x.txt": storage.files()["a/x.txt"]}
    with pytest.raises(UserError, match="which cannot be a file"):
        Cache(tmp_path / "cache", 0).copy(storage, files)


def _open(url, cache, results):
    streams, copy = stored_nested(url, None, format="auto", cache=Cache(cache, 0))
    results.put((copy.is_new, [Path(s.path).stat().st_size for s in streams]))


def test_processes_that_start_together_download_once(corpus, tmp_path):
    context = fork_server()
    results = context.Queue()
    arguments = (f"file://{corpus}", tmp_path / "cache", results)
    processes = [context.Process(target=_open, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    found = [results.get(timeout=240) for _ in processes]
    for process in processes:
        process.join()
    assert sum(is_new for is_new, _ in found) == 1
    assert len({tuple(sizes) for _, sizes in found}) == 1
