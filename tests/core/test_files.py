"""Files are written completely or not at all, all by the one helper; and read without a wait, a detour or a traceback."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.runs import ROOT
from trainer.files import (
    MOST_BYTES,
    open_plain,
    parse_count,
    parse_json,
    read_bytes,
    read_json,
    read_lines,
    refuse_special,
    remove_leftovers,
    remove_tree,
    replace_link,
    replacing,
    write_file,
)
from trainer.tools.runs.load import read_toml

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
    # Whole directories, written beside their place by the helper; downloads, whose size is compared; and standard output.
    allowed = (
        "trainer/cli/main.py",
        "trainer/lab/remote.py",
        "trainer/lab/tokenized.py",
        "trainer/metrics/sinks.py",
        "trainer/tools/corpora.py",
        "trainer/training/checkpoint.py",
        "trainer/tools/saved_model.py",
    )
    paths = [path for path in sorted((ROOT / "trainer").rglob("*.py")) if path != ROOT / HELPER]
    found = [write for path in paths for write in writes(path)]
    moves = re.compile(r"\.rename|part\.replace|open\((1|2|own),")
    assert [each for each in found if not (each.startswith(allowed) and moves.search(each))] == []
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
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as memory:
        for text in ("a page", "another"):
            write_file(Path(memory, "page"), text, follow=True)
        assert Path(memory, "page").read_text() == "another"
    code = "import pathlib, trainer.files as files; files.write_file(pathlib.Path('/dev/stdout'), 'new', follow=True)"
    with (tmp_path / "target").open("a") as log:  # as `>> log` of a shell
        subprocess.run([sys.executable, "-c", code], stdout=log, check=True)
    assert (tmp_path / "target").read_text() == "newnew"
    (tmp_path / "target").write_text("new")
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


def test_a_count_is_a_few_digits_and_nothing_else():
    assert [*map(parse_count, ("0", "007", "9" * 18))] == [0, 7, 10**18 - 1]
    for text in ("\u00b2", "\u0663", "9" * 5000, "-1", " 1", "1_0", ""):
        assert parse_count(text) is None


PRECIOUS = "precious, and without a newline"


def make_link(path: Path) -> None:
    (path.parent / "victim").write_text(PRECIOUS)
    path.symlink_to("victim")


SPECIAL = {
    "a directory": Path.mkdir,
    "a pipe": os.mkfifo,
    "a symbolic link": make_link,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_plain_file_is_refused_by_name_and_nobody_waits(tmp_path, kind):
    path = tmp_path / "it"
    SPECIAL[kind](path)
    if kind == "a symbolic link":
        assert read_bytes(path) == PRECIOUS.encode()
    else:
        with pytest.raises(OSError, match="not a plain file"):
            read_bytes(path)
    for refused in (lambda: open_plain(path, "ab"), lambda: refuse_special(path)):
        with pytest.raises(OSError, match="not a plain file") as caught:
            refused()
        assert caught.value.filename == str(path)
    if kind == "a symbolic link":
        assert (tmp_path / "victim").read_text() == PRECIOUS


@pytest.mark.parametrize("kind", ["a pipe", "a symbolic link"])
def test_a_written_file_takes_the_place_of_what_was_planted(tmp_path, kind):
    path = tmp_path / "it"
    SPECIAL[kind](path)
    (tmp_path / "victim").write_text(PRECIOUS)
    (tmp_path / f".it.{os.getpid()}.tmp").symlink_to("victim")
    write_file(path, "new")
    assert (path.is_symlink(), path.read_text(), (tmp_path / "victim").read_text()) == (False, "new", PRECIOUS)


def test_a_plain_file_is_opened_as_always(tmp_path):
    path = tmp_path / "it"
    refuse_special(path)
    with open_plain(path, "ab") as file:
        file.write(b"one\n\ntwo")
    assert list(read_lines(path)) == [b"one\n", b"\n", b"two"]
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "absent")


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


@pytest.mark.parametrize(("text", "message"), [(nested(100_000), "nested too deeply"), ("9" * 6_000, "integer")])
def test_nesting_and_endless_integers_are_damage(tmp_path, text, message):
    (tmp_path / "it.toml").write_text(f"a = {text}")
    with pytest.raises(ValueError, match=message):
        parse_json(text)
    with pytest.raises(ValueError, match=message):
        read_toml(tmp_path / "it.toml")


def test_so_is_a_file_without_end_and_one_of_another_kind(tmp_path):
    path = tmp_path / "it"
    path.touch()
    os.truncate(path, MOST_BYTES + 1)
    with pytest.raises(ValueError, match="more than 256 MiB"):
        read_bytes(path)
    for content in (b"[1]", b"", b"{", b"\xff\xfe{}", b'"text"'):
        path.write_bytes(content)
        with pytest.raises(ValueError):  # noqa: PT011 - many
            read_json(path)
