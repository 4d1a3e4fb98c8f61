"""Files that somebody else may have written: opened without waiting or being led elsewhere, read within bounds.

A run directory is copied, shared and sent around. A link, pipe or device that has the name of one of its files must neither
hang the program nor make it write somewhere else, and no content may be more than damage, which has one sentence.
"""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, cast

MOST_BYTES: Final = 1 << 28
"""Of a file that is read as a whole; none of ours comes near."""
LONGEST_LINE: Final = 1 << 24
_MOST_LEVELS: Final = 64
_MOST_BITS: Final = 1023  # of an integer, which a float can still be made of
_KINDS: Final = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_descriptor(path: str | Path, flags: int) -> int:
    """`os.open` of a plain file: never waits, and follows a link for reading alone. Also an `opener` of `open`.

    Raises:
        OSError: it cannot be opened, or is no plain file.
    """
    writes = flags & (os.O_WRONLY | os.O_RDWR)
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if writes else 0), 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            refuse_special(Path(path))
        raise
    if not stat.S_ISREG(mode := os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_plain(path, mode)
    return descriptor


def open_plain(path: str | Path, mode: str = "rb") -> io.BufferedRandom:
    """`open` of a plain file, in binary, for reading or appending; see `open_descriptor`."""
    return cast(io.BufferedRandom, open(path, mode, opener=open_descriptor))


def refuse_special(path: Path) -> None:
    """Refuse a path that may not be written to: anything there but a plain file.

    Raises:
        OSError: its text says what is there.
    """
    mode = path.lstat().st_mode if os.path.lexists(path) else stat.S_IFREG
    if not stat.S_ISREG(mode):
        raise _not_plain(path, mode)


def read_bytes(path: Path) -> bytes:
    """A whole plain file.

    Raises:
        OSError: it cannot be read, or is no plain file.
        ValueError: it is too large to be what is expected.
    """
    with open_plain(path) as file:
        if os.fstat(file.fileno()).st_size > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES >> 20} MiB")
        return file.read()


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a plain file, with their ends; one beyond all measure comes in pieces.

    Raises:
        OSError: it cannot be read, or is no plain file.
    """
    with open_plain(path) as file:
        yield from iter(lambda: file.readline(LONGEST_LINE), b"")


def parse_json(data: str | bytes) -> Any:
    """JSON that is nested no deeper, and has no longer integers, than any of ours.

    Raises:
        ValueError: it is not.
    """
    return _within_bounds(json.loads, data)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        OSError, ValueError: there is none; see `read_bytes` and `parse_json`.
    """
    found = parse_json(read_bytes(path))
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def read_toml(path: Path) -> dict[str, Any]:
    """The TOML in a file, within the bounds of `parse_json`.

    Raises:
        OSError, ValueError: as `read_json`.
    """
    found: dict[str, Any] = _within_bounds(tomllib.loads, read_bytes(path).decode())
    return found


def is_file_name(name: object) -> bool:
    """Whether it names a file of the directory that lists it, and nothing else."""
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\0"} & set(name)


def _within_bounds(parse: Callable[[Any], Any], data: str | bytes) -> Any:
    try:
        found = parse(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    level: list[Any] = [found]
    for _ in range(_MOST_LEVELS):
        if any(type(each) is int and each.bit_length() > _MOST_BITS for each in level):
            raise ValueError(f"an integer of more than {_MOST_BITS} bits")
        if not (level := [inner for each in level for inner in _inner(each)]):
            return found
    raise ValueError("nested too deeply")


def _inner(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _not_plain(path: str | Path, mode: int) -> OSError:
    return OSError(errno.EINVAL, f"{_KINDS.get(stat.S_IFMT(mode), 'something else')}, not a plain file", str(path))
