"""Globs whose `**` enters every directory once, so that a link to an ancestor ends."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path


def find_files(pattern: str) -> list[str]:
    """The files that a glob matches, sorted; `**` as a whole path component crosses directories, hidden ones excepted.

    `glob.glob` follows a link to an ancestor again and again until the path is too long. Here a directory that is
    reached by several ways is entered once, by a link only if there is no other way.
    """
    return sorted({path.removeprefix(f".{os.sep}") for path in _matches(pattern) if os.path.isfile(path)})


def _matches(pattern: str) -> Iterator[str]:
    parts = pattern.split(os.sep)
    if "**" not in parts:
        yield from glob.iglob(pattern)
        return
    at = parts.index("**")
    rest = [part for part in parts[at + 1 :] if part] or ["*"]
    head = os.sep.join(parts[:at]) or (os.sep if at else os.curdir)
    for base in glob.iglob(head):
        for directory in directories(base):
            yield from _matches(os.path.join(glob.escape(directory), *rest))


def named_directory(path: str) -> str:
    """The directory that a file lies in, or that a glob searches: what comes before its first part with a wildcard."""
    parts = path.split(os.sep)
    is_glob = not os.path.isfile(path)
    fixed = next((i for i, part in enumerate(parts[:-1]) if is_glob and glob.has_magic(part)), len(parts) - 1)
    return os.sep.join(parts[:fixed]) or (os.sep if path.startswith(os.sep) else os.curdir)


def directories(base: str, *, enters_hidden: bool = False) -> Iterator[str]:
    """`base` and all directories below it, each once; directories before links to them."""
    seen: set[tuple[int, int]] = set()
    own: list[str] = [base]
    links: list[str] = []
    while own or links:
        directory = own.pop() if own else links.pop()
        try:
            status = os.stat(directory)
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            with os.scandir(directory) as found:
                entries = sorted(found, key=lambda entry: entry.name, reverse=True)
        except OSError:  # no directory, or one that may not be read: a glob matches nothing there
            continue
        yield directory
        for entry in entries:
            if (enters_hidden or not entry.name.startswith(".")) and entry.is_dir():
                (links if entry.is_symlink() else own).append(entry.path)


def files_below(directory: Path) -> Iterator[Path]:
    """What lies in a directory and in those below it, also behind links, as in a glob: each directory is entered once."""
    for below in directories(str(directory), enters_hidden=True):
        yield from Path(below).iterdir()
