"""Files: written completely or not at all, and read within bounds.

A temporary file next to the target is written, synced and renamed: a failed write leaves the old
file. Since run directories are shared, a link, pipe or device in the place of a file must neither
hang the program nor make it write elsewhere, and any content is at worst reported as damage.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import resource
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

MOST_OPEN_FILES = 65_536  # that a process asks for
_LEFTOVER = re.compile(r"\..+\.\d+\.tmp")  # see `_temporary`


@contextmanager
def replacing(path: Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """A new file that replaces `path` if the block ends well. `sync`: wait until the disk has it;
    otherwise a crash of the machine may lose it."""
    with replacing_path(path, sync=sync) as temporary, temporary.open("wb") as file:
        yield file


@contextmanager
def replacing_path(path: Path, *, sync: bool = True) -> Iterator[Path]:
    """As `replacing`, for a writer that opens the file itself: the path to write to."""
    temporary = _temporary(path)
    try:
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
    """Write a whole file; text as UTF-8. See `replacing`. `follow`: the path is a user's: a link
    stays a link, and a pipe or device is written to."""
    if isinstance(content, str):
        content = content.encode("utf-8", "backslashreplace")
    is_device = path.parent in (Path("/dev"), Path("/dev/fd"))  # but /dev/shm holds plain files
    if follow and path.exists() and (is_device or not path.is_file()):
        with path.open("ab") as file:  # /dev/stdout, perhaps of a file with more; a pipe
            file.write(content)
        return
    if follow:
        path = Path(os.path.realpath(path))
    with replacing(path, sync=sync) as file:
        file.write(content)


def write_new(path: Path, content: bytes) -> None:
    """Write a file that only one process can make, on any host; a FileExistsError in others."""
    with open(open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(content)


def write_json(path: Path, value: Mapping[str, Any], *, sync: bool = True) -> None:
    """Write a JSON object. See `replacing`."""
    write_file(path, json.dumps(value, indent=1) + "\n", sync=sync)


def replace_link(path: Path, target: str) -> None:
    """Make `path` a symbolic link to `target`, in place of a link or file."""
    temporary = _temporary(path)
    temporary.symlink_to(target)
    temporary.replace(path)


def discard(path: Path) -> None:
    """Delete whatever is there, of a directory what can be, and open no file: a pipe would wait."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_tree(path: Path) -> None:
    """Delete a directory at once, by its name; what is left of it is for `remove_leftovers`."""
    doomed = _temporary(path)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_leftovers(directory: Path) -> None:
    """Delete the temporary files that killed processes left. Nobody may be writing there."""
    if not directory.is_dir():
        return
    for path in directory.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            discard(path)


def sync_directory(path: Path) -> None:
    """Wait until the disk has a directory's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary(path: Path) -> Path:
    # Not by the process id, which another host or container may have, too.
    return path.with_name(f".{path.name}.{secrets.randbelow(10**12)}.tmp")


MOST_BYTES: Final = 1 << 28  # of a file that is read as a whole; none of ours comes near
LONGEST_LINE: Final = 1 << 24


def open_descriptor(path: str | Path, flags: int) -> int:
    """`os.open` of a plain file, or an OSError: never waits, follows a link for reading alone."""
    flags |= os.O_NONBLOCK | os.O_CLOEXEC
    if flags & (os.O_WRONLY | os.O_RDWR):
        flags |= os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _not_plain(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_plain(path)
    return descriptor


def open_plain(path: str | Path, mode: str = "rb") -> io.BufferedRandom:
    """`open` of a plain file, in binary, for reading or appending; see `open_descriptor`."""
    return cast(io.BufferedRandom, open(path, mode, opener=open_descriptor))


def refuse_special(path: Path) -> None:
    """An OSError if anything but a plain file is at a path to write to."""
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise _not_plain(path)


def read_bytes(path: Path) -> bytes:
    """A whole plain file. OSError: it cannot be read or is none; ValueError: it is too large."""
    with open_plain(path) as file:
        if os.fstat(file.fileno()).st_size > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES >> 20} MiB")
        return file.read()


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a plain file, with their ends; one beyond all measure comes in pieces."""
    with open_plain(path) as file:
        yield from iter(lambda: file.readline(LONGEST_LINE), b"")


def parse_json(data: str | bytes) -> Any:
    """JSON, or a ValueError, also if it is nested too deeply."""
    return within_depth(json.loads, data)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises as `read_bytes` and `parse_json` do."""
    found = parse_json(read_bytes(path))
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def is_count(value: object) -> bool:
    """Whether it is a number of something, in 63 bits."""
    return type(value) is int and 0 <= value < 2**63


def parse_count(text: str) -> int | None:
    """A number of something in at most 18 ASCII digits, so in 63 bits; None: anything else."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def within_depth(parse: Callable[[Any], Any], data: str | bytes) -> Any:
    """The data as `parse` reads it; raises as `parse_json` does."""
    try:
        return parse(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _not_plain(path: str | Path) -> OSError:
    return OSError(errno.EINVAL, "not a plain file", str(path))


def allow_open_files() -> int:
    """Have as many files allowed open as this process may, up to a bound; returns their number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = min({hard, MOST_OPEN_FILES} - {resource.RLIM_INFINITY})
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed
