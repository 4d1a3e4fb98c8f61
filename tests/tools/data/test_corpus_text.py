"""Corpora: of a user's own files, and the one that every installation has; which document goes into which stream."""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.layout import discover_nested
from trainer.errors import UserError
from trainer.tools.corpus.builders import build_pytext, build_text
from trainer.tools.corpus.documents import Document, cap_evenly, group_by_directory
from trainer.tools.corpus.writer import read_manifest

LIMIT = 100_000


def rows_of(out, path):
    return [json.loads(line) for line in (out / path).read_text(encoding="utf-8").split("\n") if line]


def tree(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.fixture
def files(tmp_path):
    root = tmp_path / "in"
    for directory, size in (("a", 500), ("b", 700), ("b/deep", 20)):
        (root / directory).mkdir(parents=True)
        for k in range(3):
            text = f"{directory} {k} é\n" * (size // 10)
            (root / directory / f"{k}.txt").write_text(text, encoding="utf-8")
    return root


def test_a_directory_is_a_stream_and_a_file_a_document_and_the_manifest_counts_and_digests_them(files, tmp_path):
    out = tmp_path / "out"
    manifest = build_text(out, {"notes": [f"{files}/**/*.txt"]}, min_stream_bytes=300)
    assert read_manifest(out) == manifest
    assert [entry.path for entry in manifest.modalities["notes"]] == ["notes/a.jsonl", "notes/b.jsonl"]
    rows = rows_of(out, "notes/b.jsonl")
    assert [row["source"] for row in rows] == [f"b/{k}.txt" for k in range(3)] + [f"b/deep/{k}.txt" for k in range(3)]
    assert rows[0]["text"] == (files / "b" / "0.txt").read_text(encoding="utf-8")
    assert "é".encode() in (out / "notes/b.jsonl").read_bytes()
    for entry in manifest.modalities["notes"]:
        content, rows = (out / entry.path).read_bytes(), rows_of(out, entry.path)
        assert (entry.file_bytes, entry.sha256) == (len(content), hashlib.sha256(content).hexdigest())
        assert (entry.documents, entry.text_bytes) == (len(rows), sum(len(row["text"].encode()) for row in rows))
    totals = json.loads((out / "manifest.json").read_text())["totals"]
    assert totals == manifest.totals()
    assert (totals["streams"], totals["documents"]) == (2, 9)
    assert str(tmp_path) not in (out / "manifest.json").read_text()


def test_files_that_are_not_text_are_listed_and_the_rest_is_used(files, tmp_path):
    unused = {
        "bad": (b"good so far \xff\xfe", "not UTF-8: byte 0xff at offset 12"),
        "binary": (b"x\x00y", "binary: a NUL byte at offset 1"),
        "blank": (b" \n\n", "empty"),
        "huge": (b"x" * (LIMIT + 1), f"{LIMIT + 1} bytes, more than the limit of {LIMIT}"),
        "twin": ((files / "a" / "0.txt").read_bytes(), "the same text as a/0.txt"),
    }
    for name, (content, _) in unused.items():
        (files / "a" / f"{name}.txt").write_bytes(content)
    manifest = build_text(
        tmp_path / "out", {"notes": [f"{files}/**/*.txt"]}, max_file_bytes=LIMIT, min_stream_bytes=300
    )
    reasons = {item.source: item.reason for item in manifest.skipped}
    assert reasons == {f"notes/a/{name}.txt": reason for name, (_, reason) in unused.items()}
    assert manifest.totals()["documents"] == 9


def test_names_that_are_not_utf_8_or_not_printable_are_escaped(tmp_path):
    folder = os.fsencode(tmp_path) + b"/in/caf\xe9"
    os.makedirs(folder)
    for name in (b"one\xff.txt", b"two\n.txt", b"three\x1b[31m.txt"):
        with open(folder + b"/" + name, "wb") as file:
            file.write(name[:3] * 9)
    (tmp_path / "in" / "plain").mkdir()
    (tmp_path / "in" / "plain" / "ünö.txt").write_text("a text")
    manifest = build_text(tmp_path / "out", {"m": [f"{tmp_path}/in/**/*.txt"]}, min_stream_bytes=1)
    assert [entry.path for entry in manifest.modalities["m"]] == ["m/caf\\xe9.jsonl", "m/plain.jsonl"]
    assert [row["source"] for row in rows_of(tmp_path / "out", "m/caf\\xe9.jsonl")] == [
        "caf\\xe9/one\\xff.txt",
        "caf\\xe9/three\\x1b[31m.txt",
        "caf\\xe9/two\\n.txt",
    ]
    assert rows_of(tmp_path / "out", "m/plain.jsonl")[0]["source"] == "plain/ünö.txt"


def test_streams_get_names_that_runs_read_and_none_is_lost(tmp_path):
    for directory in ("_posts", "posts", "__pycache", "a.b", "a/b", "_", "d" * 250 + "/" + "e" * 250):
        (tmp_path / "in" / directory).mkdir(parents=True)
        (tmp_path / "in" / directory / "x.txt").write_text(directory)
    manifest = build_text(tmp_path / "out", {"m": [f"{tmp_path}/in/**/*.txt"]}, min_stream_bytes=1)
    streams = discover_nested(tmp_path / "out")
    assert {stream.relative_path for stream in streams} == {entry.path for entry in manifest.modalities["m"]}
    assert manifest.totals()["documents"] == sum(len(rows_of(tmp_path / "out", s.relative_path)) for s in streams) == 7
    assert "m/posts.jsonl" in {stream.relative_path for stream in streams}


@pytest.mark.parametrize("name", ["../x", "", ".hidden"])
def test_a_modality_that_is_no_plain_name_is_refused(name, files, tmp_path):
    with pytest.raises(UserError, match="is not a plain name"):
        build_text(tmp_path / "out", {name: [f"{files}/**/*.txt"]})
    assert not (tmp_path / "out").exists()


def test_each_line_of_a_jsonl_file_is_a_document(tmp_path):
    lines = [f'{{"text": "number {n} é", "other": {n}}}' for n in range(11)]
    (tmp_path / "x.jsonl").write_text("\n\n".join([*lines, lines[0], '{"text": " "}']), encoding="utf-8")
    (tmp_path / "y.txt").write_text("plain")
    manifest = build_text(tmp_path / "out", {"m": [f"{tmp_path}/*"]}, max_file_bytes=60)
    rows = rows_of(tmp_path / "out", "m/misc.jsonl")
    assert [row["text"] for row in rows] == [*(f"number {n} é" for n in range(11)), "plain"]
    assert rows[10]["source"] == "x.jsonl:21"
    assert {item.source: item.reason for item in manifest.skipped} == {
        "m/x.jsonl:23": "the same text as x.jsonl:01",
        "m/x.jsonl:25": "empty",
    }


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl.gz", ".CSV"])
def test_a_file_that_is_named_as_no_text_never_becomes_a_document(suffix, tmp_path):
    (tmp_path / f"x{suffix}").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match=r"nothing in 1 file can be used: m/x.*(no plain text|compressed): "):
        build_text(tmp_path / "out", {"m": [f"{tmp_path}/x*"]})
    (tmp_path / "y.txt").write_text("plain")
    manifest = build_text(tmp_path / "out", {"m": [f"{tmp_path}/*.*"]})
    assert manifest.totals()["documents"] == 1
    assert [item.source for item in manifest.skipped] == [f"m/x{suffix}"]


def test_another_corpus_is_replaced_only_by_force_and_what_is_none_of_it_is_not_lost(files, tmp_path):
    out = tmp_path / "out"
    first = build_text(out, {"notes": [f"{files}/**/*.txt"]})
    inode, before = os.stat(out).st_ino, tree(out)
    assert build_text(out, {"notes": [f"{files}/**/*.txt"]}) == first
    assert os.stat(out).st_ino == inode  # the same inputs again leave it alone
    with pytest.raises(UserError, match="holds another corpus"):
        build_text(out, {"other": [f"{files}/a/*.txt"]})
    (out / "run").mkdir()
    (out / "run" / "model.pt").write_text("weeks of work")
    with pytest.raises(UserError, match=r"holds run/model\.pt, which is no part of the corpus"):
        build_text(out, {"other": [f"{files}/a/*.txt"]}, force=True)
    (out / "run" / "model.pt").unlink()
    assert tree(out) == before
    (out / "run").rmdir()
    build_text(out, {"other": [f"{files}/a/*.txt"]}, force=True)
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", "other"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.parametrize("content", [None, "not json", '{"format_version": 99}', '{"format_version": 1}'])
def test_a_directory_that_is_no_corpus_is_never_replaced(content, files, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("dear")
    if content is not None:
        (out / "manifest.json").write_text(content)
    before = tree(out)
    with pytest.raises(UserError, match="is not empty and holds no corpus"):
        build_text(out, {"notes": [f"{files}/**/*.txt"]}, force=True)
    assert tree(out) == before


def test_an_interrupted_build_leaves_nothing_half_done(files, tmp_path):
    def interrupt(done, total, what):
        if what.startswith("writing notes/b"):
            raise KeyboardInterrupt

    out = tmp_path / "out"
    build_text(out, {"other": [f"{files}/a/*.txt"]})
    before = tree(tmp_path)
    for target in (out, tmp_path / "fresh"):
        with pytest.raises(KeyboardInterrupt):
            build_text(target, {"notes": [f"{files}/**/*.txt"]}, min_stream_bytes=300, force=True, progress=interrupt)
    assert tree(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_a_file_that_changes_during_the_build_is_an_error(files, tmp_path):
    def meddle(done, total, what):
        if what.startswith("writing"):
            (files / "a" / "1.txt").write_text("other")

    with pytest.raises(UserError, match=r"a/1\.txt: changed while the corpus was built"):
        build_text(tmp_path / "out", {"notes": [f"{files}/**/*.txt"]}, progress=meddle)
    assert not (tmp_path / "out").exists()


def test_a_directory_in_place_of_a_glob_is_refused_with_the_glob(files, tmp_path):
    with pytest.raises(UserError, match=r"/a/\*\*/\*'"):
        build_text(tmp_path / "out", {"notes": [f"{files}/a"]})


CAPS = {"python": 6_000_000, "cpp": 8_000_000, "prose": 3_000_000}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    out = tmp_path_factory.mktemp("pytext") / "corpus"
    return out, build_pytext(out, max_bytes=CAPS)


def test_documents_are_whole_files_that_appear_once_below_the_caps(built):
    out, manifest = built
    found = sorted(path.relative_to(out).as_posix() for path in out.rglob("*.jsonl"))
    assert found == sorted(entry.path for entries in manifest.modalities.values() for entry in entries)
    assert list(manifest.modalities) == ["python", "cpp", "prose"]
    assert {"python/stdlib.jsonl", "python/stdlib.asyncio.jsonl", "prose/python.topics.jsonl"} <= set(found)
    for name, entries in manifest.modalities.items():
        assert 0.5 * CAPS[name] < manifest.totals(name)["text_bytes"] <= CAPS[name]
        assert len(entries) >= 4
        assert min(entry.text_bytes for entry in entries) > 32_000
        rows = [json.loads(line) for path in (out / name).glob("*.jsonl") for line in path.open(encoding="utf-8")]
        assert len({row["text"] for row in rows}) == len(rows) == manifest.totals(name)["documents"]
        assert {tuple(row) for row in rows} == {("text", "source")}
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    row = json.loads((out / "python/stdlib.asyncio.jsonl").open(encoding="utf-8").readline())
    assert row["text"] == (stdlib / row["source"].removeprefix("stdlib/")).read_bytes().decode()


def test_the_same_installation_gives_the_same_bytes_and_no_path_of_the_machine_gets_in(built, tmp_path):
    out, manifest = built
    seen = []
    again = build_pytext(tmp_path / "again", max_bytes=CAPS, progress=lambda *args: seen.append(args))
    assert again == manifest
    assert (tmp_path / "again" / "manifest.json").read_bytes() == (out / "manifest.json").read_bytes()
    assert all(0 <= done <= total for done, total, _ in seen)
    forbidden = [sysconfig.get_paths()[name] for name in ("stdlib", "purelib")] + [str(out)]
    for path in out.rglob("*.json*"):
        content = path.read_text(encoding="utf-8")
        assert not any(word in content for word in forbidden), path


def document(source, num_bytes):
    return Document(source, "", num_bytes, source)


def test_a_small_directory_joins_its_parent():
    documents = [document("a/x", 60), document("a/b/x", 40), document("a/b/c/x", 30), document("a/d/x", 50)]
    streams = group_by_directory(documents, min_bytes=50)
    assert {name: [d.source for d in members] for name, members in streams.items()} == {
        "a": ["a/x"],
        "a.b": ["a/b/c/x", "a/b/x"],
        "a.d": ["a/d/x"],
    }


def test_what_a_small_stream_leaves_goes_to_the_others():
    streams = {"s": [document("s/0", 10)], "b": [document(f"b/{k}", 10) for k in range(20)]}
    capped = cap_evenly(streams, 100, min_bytes=0)
    assert len(capped["s"]) == 1
    assert len(capped["b"]) == 9


PATHS = st.lists(st.sampled_from(["a", "b", "c"]), min_size=0, max_size=3)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(found=st.lists(st.tuples(PATHS, st.integers(1, 40)), max_size=40), cap=st.integers(0, 400))
def test_nothing_is_lost_or_doubled_and_the_cap_holds(found, cap):
    documents = [document("/".join([*parts, f"f{k}"]), size) for k, (parts, size) in enumerate(found)]
    streams = group_by_directory(documents, min_bytes=50)
    placed = [d.source for members in streams.values() for d in members]
    assert sorted(placed) == sorted(d.source for d in documents)
    total = sum(d.num_bytes for d in documents)
    if total >= 50:
        assert all(sum(d.num_bytes for d in members) >= 50 for members in streams.values())
    capped = cap_evenly(streams, cap, min_bytes=50)
    assert sum(d.num_bytes for members in capped.values() for d in members) <= cap
    assert cap_evenly(streams, total * (len(streams) + 1), min_bytes=50) == streams
