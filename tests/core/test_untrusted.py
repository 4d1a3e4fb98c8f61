"""Files that somebody else may have written: no wait, no detour, no traceback."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from trainer.files import (
    MOST_BYTES,
    open_descriptor,
    open_plain,
    parse_json,
    read_bytes,
    read_json,
    read_lines,
    refuse_special,
    write_file,
)
from trainer.tools.runs.load import read_toml


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(path.parent)  # such a path may have 100 characters
        try:
            server.bind(path.name)
        finally:
            os.chdir(here)


def make_link(path: Path) -> None:
    (path.parent / "victim").write_text("precious\n")
    path.symlink_to("victim")


SPECIAL = {"a directory": Path.mkdir, "a pipe": os.mkfifo, "a socket": make_socket, "a symbolic link": make_link}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("mode", ["rb", "ab", "a+b"])
def test_what_is_no_plain_file_is_refused_by_name_and_nobody_waits(tmp_path, kind, mode):
    path = tmp_path / "it"
    SPECIAL[kind](path)
    if kind == "a symbolic link" and mode == "rb":
        assert read_bytes(path) == b"precious\n"
        return
    with pytest.raises(OSError, match=kind) as refused:
        open_plain(path, mode)
    assert refused.value.filename == str(path)
    assert refused.value.strerror == f"{kind}, not a plain file"
    with pytest.raises(OSError, match=kind):
        refuse_special(path)
    if kind == "a symbolic link":
        assert (tmp_path / "victim").read_text() == "precious\n"


def test_a_device_is_no_plain_file():
    for flags in (os.O_RDONLY, os.O_RDWR | os.O_APPEND):
        with pytest.raises(OSError, match="a device, not a plain file"):
            open_descriptor("/dev/zero", flags)


def test_a_plain_file_is_opened_as_always(tmp_path):
    path = tmp_path / "it"
    refuse_special(path)
    with open_plain(path, "ab") as file:
        file.write(b"one\n\ntwo")
    assert list(read_lines(path)) == [b"one\n", b"\n", b"two"]
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "absent")


@pytest.mark.parametrize("kind", ["a pipe", "a symbolic link"])
def test_a_written_file_takes_the_place_of_what_was_planted(tmp_path, kind):
    path = tmp_path / "it"
    SPECIAL[kind](path)
    temporary = tmp_path / f".it.{os.getpid()}.tmp"
    (tmp_path / "victim").write_text("precious\n")
    temporary.symlink_to("victim")
    write_file(path, "new")
    assert path.is_file()
    assert not path.is_symlink()
    assert path.read_text() == "new"
    assert (tmp_path / "victim").read_text() == "precious\n"


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


@pytest.mark.parametrize("levels", [100, 100_000])
def test_nesting_is_damage(tmp_path, levels):
    (tmp_path / "it.json").write_text('{"a": ' + nested(levels) + "}")
    (tmp_path / "it.toml").write_text("a = " + nested(levels))
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json(tmp_path / "it.json")
    with pytest.raises(ValueError, match="nested too deeply"):
        read_toml(tmp_path / "it.toml")
    assert parse_json(nested(60))


@pytest.mark.parametrize("number", ["-" + "1" * 400, "9" * 6_000])
def test_so_is_an_endless_integer(tmp_path, number):
    (tmp_path / "it.toml").write_text(f"a = {number}")
    with pytest.raises(ValueError, match="integer"):
        parse_json(f"[{number}]")
    with pytest.raises(ValueError, match="integer"):
        read_toml(tmp_path / "it.toml")
    assert parse_json(f"[{2**127}, {-(2**63)}]") == [2**127, -(2**63)]


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
