"""Discovery of streams, and the hashes that hang on their names."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trainer.data.documents import ReadOptions
from trainer.data.formats import load_documents
from trainer.data.groups import CutOptions, build_groups, documents_of, held_out
from trainer.data.layout import discover_direct, discover_nested
from trainer.data.tokenizer import BytesTokenizer
from trainer.errors import UserError
from trainer.tools.survey import discover


@pytest.fixture
def root(tmp_path):
    for name in ("b/z.txt", "b/deep/a.jsonl", "a/x.md", "a/_hidden.txt", "a/.dot.txt", "a/manifest.json"):
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")
    (tmp_path / "root" / "loose.txt").write_text("not below a modality")
    return tmp_path / "root"


def test_nested_streams_are_sorted_and_labelled_by_their_first_directory(root, tmp_path):
    streams = discover_nested(root)
    found = [(s.stream_id, s.relative_path, s.modality) for s in streams]
    assert found == [(0, "a/x.md", "a"), (1, "b/deep/a.jsonl", "b"), (2, "b/z.txt", "b")]
    assert [s.relative_path for s in discover_nested(root, ["b"])] == ["b/deep/a.jsonl", "b/z.txt"]
    (root / "a" / "x.csv").touch()
    assert "a/x.csv" in [s.relative_path for s in discover_nested(root, format="text")]
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "y.txt").touch()
    (root / "a" / "part").symlink_to(tmp_path / "scratch")
    for link in ("again", "deep/top"):  # links to what they lie in are not followed; two are endless for glob
        (root / "b" / link).symlink_to(root / "b")
    (root / "a" / "up").symlink_to(root)
    (root / "a" / ".v2").mkdir()
    (root / "a" / ".v2" / "w.txt").touch()
    (root / "a" / "current").symlink_to(".v2")
    (root / "c").symlink_to(tmp_path / "scratch")
    names = [stream.relative_path for stream in discover_nested(root)]
    assert names == ["a/current/w.txt", "a/part/y.txt", "a/x.md", "b/deep/a.jsonl", "b/z.txt", "c/y.txt"]
    assert [Path(stream.path).name for stream in discover_direct([root / "b" / "**"])] == ["a.jsonl", "z.txt"]
    for name, refusal in (("gone.csv", None), ("gone.txt", "gone.txt: cannot be reached")):
        (root / "a" / name).symlink_to(tmp_path / "not mounted")
        with pytest.raises(UserError, match=refusal) if refusal else nullcontext():
            discover_nested(root)
    with pytest.raises(UserError, match="cannot be reached"):
        discover_direct([root / "a" / "*"])


def test_direct_streams_take_their_parent_directory_as_modality(root):
    (root / "a" / "x.csv").touch()
    os.renames(root / "a" / "manifest.json", root.joinpath("b", *"d" * 24, "y.csv"))  # deep: not tried in all ways
    streams = discover_direct([f"{root}/b/{'**/' * 12}*.[tj]*", str(root / "a" / "x.csv"), str(root / "b" / "z.txt")])
    assert [(Path(s.path).name, s.modality) for s in streams] == [("x.csv", "a"), ("a.jsonl", "deep"), ("z.txt", "b")]


def test_a_file_has_one_name_however_its_path_is_spelled(root, monkeypatch):
    monkeypatch.chdir(root)
    wanted = ["b/deep/a.jsonl", "b/z.txt"]
    (root.parent / "link").symlink_to(root)
    for start in ("b", "./b", "a/../b", root / "b", root.parent / "link" / "b", f"../{root.name}/b"):
        found = discover_direct([f"{start}/**", str(root / "b" / "z.txt")])
        assert [(stream.relative_path, Path(stream.path).is_file()) for stream in found] == [
            (each, True) for each in wanted
        ]
    monkeypatch.setattr("trainer.data.layout.find_files", lambda text: [text])
    for question in ("isfile", "exists"):
        monkeypatch.setattr(f"os.path.{question}", lambda path: path == "/x.txt")
    assert [stream.modality for stream in discover_direct(["/x.txt"])] == ["root"]
    monkeypatch.undo()
    monkeypatch.chdir(root / "a")  # outside, by any spelling
    for given in ("../b/z.txt", root / "b/z.txt", f"/{root}/b/z.txt"):
        assert discover_direct([given])[0].relative_path == str(root / "b/z.txt")


def test_what_is_not_there_is_refused(root):
    os.makedirs(f"{root}/c/\n/../\\n")  # both
    (root / "c" / "x.csv").write_text("a,b")
    for asked, modalities, problem in (
        (root / "absent", None, "no such directory"),
        (root, ["d"], "has no modality 'd'"),
        (root / "c", None, "root/c: has two directories of one printable name; rename one"),
        (root, ["c"], r"root/c: has no stream files \(it does not read 1 file: c/x.csv\)"),
        ([str(root / "*.npy")], None, "has no stream files"),
        ([str(root / "c")], None, "is a directory"),
        ([str(root / "b" / "zz.txt")], None, "no such file or directory; check the path"),
        ([], None, "is empty"),
    ):
        with pytest.raises(UserError, match=problem):
            discover_direct(asked) if isinstance(asked, list) else discover_nested(asked, modalities)


def test_labels_are_printable_and_name_the_modality_in_a_config(tmp_path):
    for name in (b"m\xff", b"m\x1b[31m", b"m\nn", "mödality".encode()):
        folder = os.fsencode(tmp_path) + b"/" + name
        os.makedirs(folder)
        open(folder + b"/s\xfe.txt", "wb").close()
    labels = ["m\\nn", "m\\x1b[31m", "m\\xff", "mödality"]
    assert sorted(stream.modality for stream in discover_nested(tmp_path)) == labels
    assert len({stream.relative_path for stream in discover_nested(tmp_path, labels)}) == 4
    assert sorted(stream.modality for stream in discover_direct([f"{tmp_path}/**"])) == labels


@pytest.mark.parametrize("layout", ["nested", "direct"])
def test_files_that_are_not_read_do_not_vanish_silently(root, caplog, layout):
    no_data = ("_part.jsonl.gz", "_part0.txt", ".x.csv", "LICENSE", "tokenizer.json", "manifest.json", "y.idx")
    for name in ("w.rs", "v.R"):
        (root / "b" / name).write_text("text")
    for name in ("x.csv", "y.txt.zst", "z.TXT", "noname", *no_data):
        (root / "b" / name).write_bytes(b"x")
    for name in (".git/objects/abc", "__pycache__/x.o", ".ipynb_checkpoints/f.txt", "deep/_old/f.txt"):
        (root / "a" / name).parent.mkdir(parents=True)
        (root / "a" / name).write_bytes(b"x")
    streams = discover_nested(root) if layout == "nested" else discover_direct([str(root / "b" / "*")])
    read = {Path(stream.path).name for stream in streams}
    assert {"z.txt", "z.TXT", "w.rs", "v.R"} <= read
    texts = [load_documents(str(root / "b" / name), ReadOptions(BytesTokenizer())) for name in ("z.TXT", "w.rs", "v.R")]
    assert [text.num_documents for text in texts] == [1, 1, 1]
    everywhere = [*streams, *discover_direct([str(root / "**" / "*.txt")])]
    assert not [stream.path for stream in everywhere if "f.txt" in stream.path]
    assert discover_direct([str(root / "a" / "deep" / "_old" / "*.txt")])  # named
    caplog.clear()
    discover_nested(root) if layout == "nested" else discover_direct([str(root / "b" / "*")])
    (said,) = (record.getMessage() for record in caplog.records)
    b, where = ("b", root) if layout == "nested" else (root / "b", "paths")
    number, files = 5, f"{b}/_part.jsonl.gz, {b}/_part0.txt, {b}/noname and 2 more"
    if layout == "nested":
        number, files = 7, "a/_hidden.txt, b/_part.jsonl.gz, b/_part0.txt and 4 more"
    assert said.startswith(f"{where}: does not read {number} files: {files}; if they are text")
    caplog.clear()
    discover_direct([str(root / "b" / name) for name in ("z.txt", "z.TXT", "_part0.txt")])
    assert caplog.text == ""


def test_a_root_without_modalities_names_what_lies_in_it(tmp_path):
    (tmp_path / "x.csv").write_text("a,b")
    with pytest.raises(UserError, match=r"has no stream files \(it does not read 1 file: x.csv\); put"):
        discover([str(tmp_path)])
    (tmp_path / "y.txt").write_text("text")
    with pytest.raises(UserError, match=r'or set paths = \[".*/\*"\] instead of root'):
        discover_nested(tmp_path)
    assert discover([str(tmp_path)])[1].keys() == {"paths"}


def test_group_ids_are_63_bit_distinct_and_pinned():
    table = build_groups(np.full(300, 300), np.arange(300), "a/x.md", CutOptions("source", 1, max_group_cells=1))
    ids = table.ids_of(np.arange(90_000))
    assert len(set(ids.tolist())) == 90_000
    assert (ids >= 0).all()
    # Checkpoints hold these ids: the numbers must never change.
    pinned = [1718007921776690379, 6493836516194940290]
    assert ids[[0, 300 + 64]].tolist() == pinned
    assert replace(table, namespace="other").ids_of(np.array([0])).tolist() != pinned[:1]


def test_the_held_out_share_is_right_stable_and_monotone():
    held = held_out("a/x.md", 100_000, 0.02)
    assert abs(held.mean() - 0.02) < 5 * (0.02 * 0.98 / 100_000) ** 0.5
    assert (held_out("a/x.md", 100, 0.02) == held[:100]).all()
    assert (held_out("a/x.md", 100_000, 0.1) >= held).all()
    assert (held != held_out("a/y.md", 100_000, 0.02)).any()
    train, holdout = (documents_of(split, "a/x.md", 1000, 0.1) for split in ("train", "holdout"))
    assert (train ^ holdout).all()
    assert not documents_of("holdout", "a/x.md", 1000, 0.0).any()


def test_long_documents_become_runs():
    lengths, cut = np.array([25, 0, 3, 4, 5, 1, 8]), CutOptions("s", seq_len=4, max_group_cells=3)
    groups = build_groups(lengths, np.arange(7), "p", cut)
    assert groups.documents.tolist() == [0, 0, 0, 2, 3, 4, 5, 6]
    assert groups.first_cells.tolist() == [0, 3, 6, 0, 0, 0, 0, 0]
    assert groups.num_cells.tolist() == [3, 3, 1, 1, 1, 2, 1, 2]
    kept = build_groups(lengths, np.array([3, 6]), "p", cut)
    assert kept.ids_of(np.arange(2)).tolist() == groups.ids_of(np.array([4, 7])).tolist()
