"""Files are written completely or not at all, and all by the one helper."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.runs import ROOT
from trainer.files import did_you_mean, is_file_name, remove_leftovers, remove_tree, replace_link, replacing, write_file

HELPER = "trainer/files.py"


def writes(path: Path) -> Iterator[str]:
    """Calls of a module that write or replace a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        text = [a.value for a in [*node.args, *(k.value for k in node.keywords)] if isinstance(a, ast.Constant)]
        modes = [value for value in text if isinstance(value, str) and 0 < len(value) <= 3]
        opens = name in ("open", "fdopen") and any(set("wx") & set(mode) for mode in modes)
        # `replace` of a path has one argument, that of a text two.
        moves = name in ("replace", "rename") and len(node.args) == 1 and not node.keywords
        if name in ("write_text", "write_bytes") or opens or moves:
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"


def test_nothing_else_writes_files() -> None:
    # Whole directories, written beside their place by the helper; and downloads, whose size is compared.
    allowed = (
        "trainer/lab/remote.py",
        "trainer/tools/corpus/writer.py",
        "trainer/training/checkpointing/checkpoint.py",
        "trainer/tools/trained/saved_model.py",
    )
    paths = [path for path in sorted((ROOT / "trainer").rglob("*.py")) if path != ROOT / HELPER]
    found = [write for path in paths for write in writes(path)]
    moves = [write for write in found if write.startswith(allowed) and re.search(r"\.rename\(|part\.replace\(", write)]
    assert found == moves
    assert list(writes(ROOT / HELPER)), "the search is blind"


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_write_that_fails_anywhere_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "it"
    write_file(path, "old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def write() -> None:
        with replacing(path) as file:
            file.write(b"new")
            if call == "write":
                fail()

    with monkeypatch.context() as broken:
        if call != "write":
            broken.setattr(os if call == "fsync" else Path, call, fail)
        with pytest.raises(OSError, match="No space"):
            write()
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["it"]


def test_a_link_that_a_user_names_stays_one_and_a_device_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    write_file(tmp_path / "link", "new", follow=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"
    write_file(Path(os.devnull), "nowhere", follow=True)
    write_file(tmp_path / "link", "own")
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"


def test_links_and_trees_are_replaced_and_removed(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        replace_link(tmp_path / "latest", name)
        assert (tmp_path / "latest").readlink() == Path(name)
    remove_tree(tmp_path / "one")
    (tmp_path / ".two.1.tmp").mkdir()
    (tmp_path / ".two.1").write_text("not ours")
    remove_leftovers(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == [".two.1", "latest", "two"]


def test_a_did_you_mean_differs_in_one_name_and_exists(tmp_path: Path) -> None:
    (tmp_path / "corpus" / "python").mkdir(parents=True)
    assert did_you_mean(tmp_path / "corpsu") == f"did you mean {tmp_path / 'corpus'}?"
    assert did_you_mean(tmp_path / "corpsu" / "python") == f"did you mean {tmp_path / 'corpus' / 'python'}?"
    assert did_you_mean(tmp_path / "corpsu" / "cpp") == ""
    assert did_you_mean(tmp_path / "corpus" / "java") == ""
    assert did_you_mean(tmp_path / "corpus") == ""


def test_names_of_files():
    assert all(map(is_file_name, ("a", ".a", "a b", "ä", "...", "a\nb")))
    assert not any(map(is_file_name, ("", ".", "..", "a/b", "/a", "a\0", None, 7, ["a"])))


def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be():
    code = "import resource; from trainer.files import allow_open_files; resource.setrlimit(7, (300, 1000))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print(allow_open_files(), resource.getrlimit(7))"],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "1000 (1000, 1000)\n", done.stderr
