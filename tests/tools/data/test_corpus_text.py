"""Corpora: of a user's own files, and the one that every installation has; which document goes into which stream."""

from __future__ import annotations

import json
import os
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.errors import UserError
from trainer.tools import corpora
from trainer.tools.corpora import Document, build_pytext, build_text, cap_evenly, group_by_directory

LIMIT = 100_000


def rows_of(out, path):
    return [json.loads(line) for line in (out / path).read_text(encoding="utf-8").split("\n") if line]


def tree(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.fixture
def files(tmp_path, monkeypatch):
    root = tmp_path / "in"
    monkeypatch.setattr(corpora, "MIN_STREAM_BYTES", 300)
    for directory, size in (("a", 500), ("b", 700), ("b/deep", 20)):
        (root / directory).mkdir(parents=True)
        for k in range(3):
            text = f"{directory} {k} é\n" * (size // 10)
            (root / directory / f"{k}.txt").write_text(text, encoding="utf-8")
    return root


def test_the_limit_of_a_text_that_is_no_file_counts_its_bytes_too():
    documents, skipped = corpora.check_all([("a", "€" * LIMIT)], what="x", max_bytes=LIMIT)
    assert (documents, skipped) == ([], {"x/a": f"too large: {3 * LIMIT} bytes, at most {LIMIT} are read"})


def test_a_directory_is_a_stream_and_a_file_a_document_and_what_is_no_text_is_listed(files, tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "MAX_FILE_BYTES", LIMIT)
    unused = {
        "bad": (b"good so far \xff\xfe", "not UTF-8: byte 0xff at offset 12"),
        "binary": (b"x\x00y", "binary: a NUL byte at offset 1"),
        "blank": (b" \n\n", "empty"),
        "huge": (b"x" * (LIMIT + 1), f"too large: {LIMIT + 1} bytes, at most {LIMIT} are read"),
        "twin": ((files / "a" / "0.txt").read_bytes(), "a copy: of a/0.txt"),
    }
    for name, (content, _) in unused.items():
        (files / "a" / f"{name}.txt").write_bytes(content)
    for name in (b"_odd\xff\n.txt", b".hidden.txt"):
        with open(os.fsencode(files) + b"/b/deep/" + name, "wb") as file:
            file.write(b"a name of %d" % len(name))
    out = tmp_path / "out"
    manifest = build_text(out, {"notes": [f"{files}/**/*.txt"]})
    assert manifest["skipped"] == {f"notes/a/{name}.txt": reason for name, (_, reason) in unused.items()}
    assert json.loads((out / "manifest.json").read_text()) == manifest
    assert [*manifest["streams"]] == ["notes/a.jsonl", "notes/b.jsonl"]
    rows = rows_of(out, "notes/b.jsonl")
    deep = [f"b/deep/{k}.txt" for k in range(3)] + ["b/deep/_odd\\xff\\n.txt"]
    assert [row["source"] for row in rows] == [f"b/{k}.txt" for k in range(3)] + deep
    assert rows[0]["text"] == (files / "b" / "0.txt").read_text(encoding="utf-8")
    assert "é".encode() in (out / "notes/b.jsonl").read_bytes()
    assert (manifest["modalities"]["notes"]["streams"], manifest["modalities"]["notes"]["documents"]) == (2, 10)
    assert str(tmp_path) not in (out / "manifest.json").read_text()


@pytest.mark.parametrize(
    ("name", "glob", "message"),
    [
        ("../x", "**/*.txt", "is not a plain name"),
        ("x", "a", r"/a/\*\*/\*'"),
        ("x", "*.zip", "matches no file"),
        ("x", "x*", "none of 2 files outside .*/out is usable: x/x.jsonl: no plain text: .jsonl, x/x.parquet: no"),
    ],
)
def test_what_no_corpus_can_be_built_of_is_refused(name, glob, message, files, tmp_path):
    for suffix in ("parquet", "jsonl"):
        (files / f"x.{suffix}").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match=message):
        build_text(tmp_path / "out", {name: [f"{files}/{glob}"]})
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=r"none of 0 files outside .*/in is usable: all lie in it; .* outside it"):
        build_text(files, {"x": [f"{files}/a/*.txt"]}, force=True)


def test_another_corpus_is_replaced_only_by_force_and_what_is_none_of_it_is_not_lost(files, tmp_path, monkeypatch):
    out = tmp_path / "out"
    first = build_text(out, {"notes": [f"{files}/**/*.txt"]})
    inode, before = os.stat(out).st_ino, tree(out)
    assert build_text(out, {"notes": [f"{files}/**/*.txt"]}) == first
    assert os.stat(out).st_ino == inode  # the same inputs again leave it alone
    damaged = next((out / "notes").iterdir())
    damaged.write_text("")
    with pytest.raises(UserError, match="holds a damaged corpus"):
        build_text(out, {"notes": [f"{files}/**/*.txt"]})
    (tmp_path / "link").symlink_to(out)
    build_text(tmp_path / "link", {"notes": [f"{files}/**/*.txt"]}, force=True)
    assert (tree(out), (tmp_path / "link").readlink()) == (before, out)
    (tmp_path / "link").unlink()
    with pytest.raises(UserError, match="holds another corpus"):
        build_text(out, {"other": [f"{files}/a/*.txt"]})
    (out / "run").mkdir()
    for name in ("run/model.pt", "notes/mine.jsonl"):
        (out / name).write_text("weeks of work")
        with pytest.raises(UserError, match=f"holds {name}, no part of the corpus"):
            build_text(out, {"other": [f"{files}/a/*.txt"]}, force=True)
        (out / name).unlink()
    assert tree(out) == before
    (out / "run").rmdir()
    build_text(out, {"other": [f"{files}/a/*.txt"]}, force=True)
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", "other"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
    monkeypatch.chdir(files)
    for pattern in (f"{tmp_path}/**/*", "../**/*"):  # the corpus is no part of itself, however it is named
        assert build_text(Path("../out"), {"all": [pattern]}, force=True)["modalities"]["all"]["documents"] == 9


@pytest.mark.parametrize("content", [None, "not json", '{"streams": 1}', '{"modalities": {}}'])
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


def test_an_interrupted_build_leaves_nothing_half_done(files, tmp_path, monkeypatch):
    def interrupt(path, documents):
        raise KeyboardInterrupt

    out = tmp_path / "out"
    build_text(out, {"other": [f"{files}/a/*.txt"]})
    before = tree(tmp_path)
    monkeypatch.setattr(corpora, "_write_stream", interrupt)
    for target in (out, tmp_path / "fresh"):
        with pytest.raises(KeyboardInterrupt):
            build_text(target, {"notes": [f"{files}/**/*.txt"]}, force=True)
    assert tree(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


CAPS = {"python": 6_000_000, "cpp": 8_000_000, "prose": 3_000_000}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    out = tmp_path_factory.mktemp("pytext") / "corpus"
    return out, build_pytext(out, max_bytes=CAPS)


def test_documents_are_whole_files_that_appear_once_below_the_caps(built):
    out, manifest = built
    found = sorted(path.relative_to(out).as_posix() for path in out.rglob("*.jsonl"))
    assert found == sorted(manifest["streams"])
    assert list(manifest["modalities"]) == ["python", "cpp", "prose"]
    assert {"python/stdlib.jsonl", "python/stdlib.asyncio.jsonl", "prose/python.topics.jsonl"} <= set(found)
    for name, totals in manifest["modalities"].items():
        assert 0.5 * CAPS[name] < totals["text_bytes"] <= CAPS[name]
        assert totals["streams"] >= 4
        rows = [json.loads(line) for path in (out / name).glob("*.jsonl") for line in path.open(encoding="utf-8")]
        assert len({row["text"] for row in rows}) == len(rows) == totals["documents"]
        assert {tuple(row) for row in rows} == {("text", "source")}
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    row = json.loads((out / "python/stdlib.asyncio.jsonl").open(encoding="utf-8").readline())
    assert row["text"] == (stdlib / row["source"].removeprefix("stdlib/")).read_bytes().decode()


def test_the_same_installation_gives_the_same_bytes_and_no_path_of_the_machine_gets_in(built, tmp_path):
    out, manifest = built
    again = build_pytext(tmp_path / "again", max_bytes=CAPS)
    assert again == manifest
    assert (tmp_path / "again" / "manifest.json").read_bytes() == (out / "manifest.json").read_bytes()
    forbidden = [sysconfig.get_paths()[name] for name in ("stdlib", "purelib")] + [str(out)]
    for path in out.rglob("*.json*"):
        content = path.read_text(encoding="utf-8")
        assert not any(word in content for word in forbidden), path


def document(source, num_bytes):
    return Document(source, "", num_bytes, source)


def test_a_small_directory_joins_its_parent():
    documents = [document("a/x", 60), document("a/b/x", 40), document("a/b/c/x", 30), document("a/d/x", 50)]
    long = f"a/{'b' * 199}/x"  # no name of a file, with what is added to it
    documents.append(document(long, 50))
    streams = group_by_directory(documents, min_bytes=50)
    assert {name: [d.source for d in members] for name, members in streams.items()} == {
        "a": [long, "a/x"],
        "a.b": ["a/b/c/x", "a/b/x"],
        "a.d": ["a/d/x"],
    }


PATHS = st.lists(st.sampled_from(["a", "b", "c"]), min_size=0, max_size=3)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(found=st.lists(st.tuples(PATHS, st.integers(1, 40)), max_size=40), cap=st.integers(0, 400))
def test_nothing_is_lost_or_doubled_and_the_cap_holds(found, cap):
    documents = [document("/".join([*parts, f"f{k}"]), size) for k, (parts, size) in enumerate(found)]
    streams = group_by_directory(documents, min_bytes=50)
    placed = [d.source for members in streams.values() for d in members]
    assert sorted(placed) == sorted(d.source for d in documents)
    total = sum(d.num_bytes for d in documents)
    assert all(sum(d.num_bytes for d in members) >= 50 for name, members in streams.items() if name != "misc")
    capped = cap_evenly(streams, cap)
    assert sum(d.num_bytes for members in capped.values() for d in members) <= cap
    assert cap_evenly(streams, total * (len(streams) + 1)) == streams
