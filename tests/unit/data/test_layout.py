"""Discovery of streams, and the hashes that hang on their names."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trainer.data.groups import CutOptions, build_groups, documents_of, held_out
from trainer.data.layout import UnreadParts, discover, discover_direct, discover_nested, unread_parts
from trainer.errors import UserError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("b/z.txt", "b/deep/a.jsonl", "a/x.md", "a/_hidden.txt", "a/.dot.txt", "a/x.cpp", "a/manifest.json"):
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")
    (tmp_path / "root" / "loose.txt").write_text("not below a modality")
    return tmp_path / "root"


def test_nested_streams_are_sorted_and_labelled_by_their_first_directory(root: Path) -> None:
    streams = discover_nested(root)
    assert [(s.stream_id, s.relative_path, s.modality) for s in streams] == [
        (0, "a/x.md", "a"),
        (1, "b/deep/a.jsonl", "b"),
        (2, "b/z.txt", "b"),
    ]
    assert all(Path(s.path).is_file() for s in streams)
    assert [s.relative_path for s in discover_nested(root, ["b"])] == ["b/deep/a.jsonl", "b/z.txt"]
    assert "a/x.cpp" in [s.relative_path for s in discover_nested(root, format="text")]


def test_direct_streams_take_their_parent_directory_as_modality(root: Path) -> None:
    streams = discover_direct([str(root / "b" / "**"), str(root / "a" / "x.cpp"), str(root / "b" / "z.txt")])
    assert [(Path(s.path).name, s.modality) for s in streams] == [("x.cpp", "a"), ("a.jsonl", "deep"), ("z.txt", "b")]


def test_what_is_not_there_is_refused(root: Path) -> None:
    with pytest.raises(UserError, match="no such directory"):
        discover_nested(root / "absent")
    with pytest.raises(UserError, match="no modality 'c'; it has: a, b"):
        discover_nested(root, ["c"])
    with pytest.raises(UserError, match="names no stream file"):
        discover_direct([str(root / "*.npy")])
    with pytest.raises(UserError, match="is empty"):
        discover_direct([])
    (root / "c").mkdir()
    with pytest.raises(UserError, match="has no stream files"):
        discover_nested(root, ["c"])


def test_data_whose_name_begins_with_an_underscore_does_not_vanish_silently(root: Path, caplog) -> None:
    (root / "a" / "x.cpp").unlink()
    for number in range(5):
        (root / "b" / f"_part{number}.txt").write_text("text")
    (root / "_c").mkdir()
    discover_nested(root)
    assert [record.getMessage() for record in caplog.records] == [
        f"{root}: skips 7 whose names begin with _: _c, a/_hidden.txt, b/_part0.txt and 4 more; if they are data, rename "
        "them (known extensions: .txt .md .py .jsonl .npy .bin .parquet), unpack or convert them, or set format"
    ]
    caplog.clear()
    discover_direct([str(root / "**" / "*.md")])
    assert not caplog.records
    discover_direct([str(root / "b" / "*"), str(root / "b" / "_part0.txt")])
    assert "skips 4 whose names begin with _" in caplog.text
    with pytest.raises(UserError, match=r"names no stream file \(it skips 5 whose names begin with _"):
        discover_direct([str(root / "b" / "_*")])
    with pytest.raises(UserError, match="has no modality '_c'"):
        discover_nested(root, ["_c"])
    (root / "d").mkdir()
    (root / "d" / "_only.txt").write_text("text")
    with pytest.raises(UserError, match=r"has no stream files \(it skips 1 whose names begin with _: d/_only"):
        discover_nested(root, ["d"])


def test_labels_are_printable_and_name_the_modality_in_a_config(tmp_path: Path) -> None:
    for name in (b"m\xff", b"m\x1b[31m", b"m\nn", "mödality".encode()):
        folder = os.fsencode(tmp_path) + b"/" + name
        os.makedirs(folder)
        with open(folder + b"/s\xfe.txt", "wb") as file:
            file.write(b"text")
    labels = ["m\\nn", "m\\x1b[31m", "m\\xff", "mödality"]
    streams = discover_nested(tmp_path)
    assert sorted(stream.modality for stream in streams) == labels
    assert all(os.path.isfile(stream.path) for stream in streams)
    assert len({stream.relative_path for stream in discover_nested(tmp_path, labels)}) == 4
    assert sorted(stream.modality for stream in discover_direct([f"{tmp_path}/**"])) == labels


PINNED = [1718007921776690379, 6493836516194940290]


def test_group_ids_are_63_bit_distinct_and_pinned() -> None:
    table = build_groups(np.full(300, 300), np.arange(300), "a/x.md", CutOptions("source", 1, max_group_cells=1))
    ids = table.ids_of(np.arange(90_000))
    assert len(set(ids.tolist())) == 90_000
    assert (ids >= 0).all()
    # Checkpoints hold these ids: the numbers must never change.
    assert ids[[0, 300 + 64]].tolist() == PINNED
    assert replace(table, namespace="other").ids_of(np.array([0])).tolist() != PINNED[:1]


def test_the_held_out_share_is_right_stable_and_monotone() -> None:
    held = held_out("a/x.md", 100_000, 0.02)
    assert abs(held.mean() - 0.02) < 5 * (0.02 * 0.98 / 100_000) ** 0.5
    assert (held_out("a/x.md", 100, 0.02) == held[:100]).all()
    assert (held_out("a/x.md", 100_000, 0.1) >= held).all()
    assert (held != held_out("a/y.md", 100_000, 0.02)).any()
    train, holdout = (documents_of(split, "a/x.md", 1000, 0.1) for split in ("train", "holdout"))
    assert (train ^ holdout).all()
    assert documents_of("all", "a/x.md", 1000, 0.1).all()
    assert not documents_of("holdout", "a/x.md", 1000, 0.0).any()
    with pytest.raises(UserError, match="less than 1"):
        CutOptions("s", 4, holdout_fraction=1.0)
    with pytest.raises(UserError, match="one of train, holdout, all"):
        CutOptions("s", 4, split="test")  # type: ignore[arg-type]


def test_long_documents_become_runs_and_short_ones_share_rows() -> None:
    lengths = np.array([25, 0, 3, 4, 5, 1, 8])
    cut = CutOptions("s", seq_len=4, max_group_cells=3)
    groups = build_groups(lengths, np.arange(7), "p", cut)
    assert groups.documents.tolist() == [0, 0, 0, 2, 3, 4, 5, 6]
    assert groups.first_cells.tolist() == [0, 3, 6, 0, 0, 0, 0, 0]
    assert groups.num_cells.tolist() == [3, 3, 1, 1, 1, 2, 1, 2]
    longer = build_groups(np.array([16, 12]), np.arange(2), "p", cut)
    assert longer.num_cells.tolist() == [3, 1, 3]
    packed = build_groups(lengths, np.arange(7), "p", replace(cut, pack=True))
    assert packed.documents.tolist() == [0, 0, 0, 2, 3, 4, 6]
    assert packed.num_cells.tolist() == [3, 3, 1, 1, 1, 2, 2]
    assert packed.segment_documents.tolist() == [2, 5]
    assert np.diff(packed.segment_offsets).tolist() == [0, 0, 0, 2, 0, 0, 0]
    kept = build_groups(lengths, np.array([3, 6]), "p", cut)
    assert kept.ids_of(np.arange(2)).tolist() == groups.ids_of(np.array([4, 7])).tolist()


def test_nested_streams_behind_links_are_read_once(root: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "scratch"
    (elsewhere / "deep").mkdir(parents=True)
    (elsewhere / "deep" / "y.txt").write_text("text")
    (root / "a" / "part").symlink_to(elsewhere)
    (root / "a" / "again").symlink_to(root / "a")
    (root / "c").symlink_to(elsewhere)
    names = [stream.relative_path for stream in discover_nested(root)]
    assert names == ["a/part/deep/y.txt", "a/x.md", "b/deep/a.jsonl", "b/z.txt", "c/deep/y.txt"]


@pytest.mark.parametrize("layout", ["nested", "direct"])
def test_files_that_no_format_reads_do_not_vanish_silently(root: Path, caplog, layout: str) -> None:
    (root / "a" / "x.cpp").unlink()
    no_data = ("_part.jsonl.gz", ".x.csv", "README.rst", "LICENSE", "tokenizer.json", "manifest.json", "y.idx", "x.pyc")
    for name in ("x.csv", "y.txt.zst", "z.TXT", "noname", *no_data):
        (root / "b" / name).write_bytes(b"x")
    for name in (".git/objects/abc", "__pycache__/x.o"):
        (root / "a" / name).parent.mkdir(parents=True)
        (root / "a" / name).write_bytes(b"x")
    streams = discover_nested(root) if layout == "nested" else discover_direct([str(root / "b" / "*")])
    assert {Path(stream.path).name for stream in streams} >= {"z.txt"}
    (said,) = (record.getMessage() for record in caplog.records if "does not read" in record.getMessage())
    b = "b" if layout == "nested" else root / "b"
    files = f"{b}/noname, {b}/x.csv, {b}/y.txt.zst and 1 more"
    where = root if layout == "nested" else "paths"
    assert said.startswith(f"{where}: does not read 4 files (.TXT, .csv, .zst and 1 more): {files}; if they are data")
    caplog.clear()
    discover_direct([str(root / "b" / "z.txt"), str(root / "b" / "z.TXT")])
    assert caplog.text == ""


def test_a_root_without_streams_names_what_lies_in_it(root: Path, tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    (flat / "x.csv").write_text("a,b")
    with pytest.raises(UserError, match=r"flat: has no stream files \(it does not read 1 file \(.csv\): x.csv\); put"):
        discover([str(flat)])
    (flat / "y.txt").write_text("text")
    with pytest.raises(
        UserError, match=r'read those that lie in it \(y.txt\) with paths = \[".*flat/\*"\] instead of root'
    ):
        discover_nested(flat)
    with pytest.raises(UserError, match=r"names no stream file \(it does not read 1 file \(.csv\): "):
        discover_direct([str(flat / "*.csv")])
    (root / "c").mkdir()
    (root / "c" / "x.csv").write_text("a,b")
    with pytest.raises(UserError, match=r"root/c: has no stream files \(it does not read 1 file \(.csv\): c/x.csv\)"):
        discover_nested(root, ["c"])


def test_what_no_source_reads_of_a_root_is_named(root: Path) -> None:
    for name in ("es/deep/x.txt", "tab/x.csv", "empty/README.md", "_out/x.txt", "README.md", "x.csv"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("text")
    assert unread_parts(root, ["a", "b"], "auto") == UnreadParts(["es", "tab"], ["loose.txt", "x.csv"])
    assert unread_parts(root, None, "auto").modalities == []
