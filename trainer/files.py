"""The one way in which the program writes a file: completely or not at all.

What is written goes to a temporary file beside the target, is synced to disk, and then takes the target's place. A write that
fails, or a process that is killed, leaves the old file as it was. Appending (metrics.jsonl) is `LineFile`'s.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

# `.<name>.<process>.tmp`; before it had the ending, without.
_LEFTOVER = re.compile(r"\.(.+\.\d+\.tmp|(latest|status\.json|env\.json)\.\d+)")


def similar_path(path: str | Path) -> str | None:
    """A path that exists and differs from `path`, which does not, in one name that looks alike; None: there is none."""
    wanted = Path(path)
    parents = [wanted, *wanted.parents]
    missing = next((each for each in reversed(parents) if not each.exists()), None)
    if missing is None:
        return None
    try:
        names = sorted(each.name for each in missing.parent.iterdir())
    except OSError:
        return None
    rest = wanted.relative_to(missing)
    close = (missing.with_name(name) / rest for name in difflib.get_close_matches(missing.name, names, n=3))
    return next((str(each) for each in close if each.exists()), None)


def did_you_mean(path: str | Path) -> str:
    """The question whether `similar_path` was meant; empty if there is none."""
    similar = similar_path(path)
    return f"did you mean {similar}?" if similar else ""


@contextmanager
def replacing(path: Path, *, sync: bool = True, follow: bool = False) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block ends well; otherwise `path` stays as it was.

    Args:
        sync: wait until the disk has it. Without, a crash of the machine (not of the process) may lose it.
        follow: for a path that a user has given: a link stays a link, and a pipe or device is written to.

    Raises:
        OSError: it cannot be written.
    """
    if follow and path.exists() and not path.is_file():  # /dev/stdout, a pipe: nothing to replace
        with path.open("wb") as file:
            yield file
        return
    path = Path(os.path.realpath(path)) if follow else path
    with replacing_path(path, sync=sync) as temporary, temporary.open("wb") as file:
        yield file


@contextmanager
def replacing_path(path: Path, *, sync: bool = True) -> Iterator[Path]:
    """As `replacing`, for a writer that opens the file itself: the path to write to."""
    temporary = _temporary(path)
    try:
        temporary.unlink(missing_ok=True)  # of an earlier process of this number, or planted
        temporary.touch(exist_ok=False)  # which follows no link
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)  # the writer may have put a file of its own there, for its user alone
        if sync:
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if sync:
        sync_directory(path.parent)


def write_file(path: Path, content: str | bytes, *, sync: bool = True, follow: bool = False) -> None:
    """Write a whole file; text as UTF-8. See `replacing`."""
    with replacing(path, sync=sync, follow=follow) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


def write_json(path: Path, value: Mapping[str, Any], *, sync: bool = True) -> None:
    """Write a JSON object. See `replacing`."""
    write_file(path, json.dumps(value, indent=1) + "\n", sync=sync)


def replace_link(path: Path, target: str) -> None:
    """Make `path` a symbolic link to `target`, in place of what it is."""
    temporary = _temporary(path)
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(path)


def remove_tree(path: Path) -> None:
    """Delete a directory so that it is there as a whole, or not under its name: `remove_leftovers` deletes what is left."""
    doomed = _temporary(path)
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_leftovers(directory: Path) -> None:
    """Delete the temporary files and directories that killed processes have left behind; nobody may be writing there."""
    for path in directory.iterdir() if directory.is_dir() else ():
        if _LEFTOVER.fullmatch(path.name):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Wait until the disk has a directory's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")
