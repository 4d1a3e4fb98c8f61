"""Local files that the ranks of a node share: copies of what URLs name, and tokenized text.

    CACHE/<key>/entry.json      what it is a copy of; written last, and what makes it whole
    CACHE/<key>/files/          the files
    CACHE/<key>.lock            held shared by every process that uses them, exclusively by the one that makes or deletes them

What no process uses is deleted, the least recently used first, where room is needed.
It could go with sources by URL and text that is tokenized once.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from trainer.errors import UserError
from trainer.files import open_plain, read_json
from trainer.metrics.logger import get_logger

logger = get_logger(__name__)
ENTRY = "entry.json"
POLL_SEC, HEAD_START_SEC = 0.2, 5.0


@dataclass(frozen=True)
class Snapshot:
    """A local copy. It is not deleted while this object, or another process's like it, exists."""

    key: str
    directory: Path
    is_new: bool  # whether this process has just made it
    lock: BinaryIO


class Cache:
    """The copies below the directory that `[data] cache_dir` names (None: the user's own).

    Raises UserError: it cannot be a directory.
    """

    def __init__(self, directory: str | Path | None) -> None:
        own = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "trainer", "data")
        place = Path(directory or own)
        # A name that is too long, a circle of links, no such user's home.
        with suppress(OSError, RuntimeError):
            place = place.expanduser().resolve()
            # In this order: another process may make it in between.
            if not place.exists() or place.is_dir():
                self.directory = place
                return
        raise UserError("data.cache_dir", f"{place} cannot be a directory", "name another one")

    def hold(
        self,
        key: str,
        target: Path,  # below the directory of the key
        *,
        is_whole: Callable[[], bool],
        make: Callable[[], None],
        waiting: str,  # what to say when it is waited for
        is_first: bool = True,  # False: leave it to another process to begin, for some seconds
        on_wait: Callable[[], None] = lambda: None,  # called now and then
    ) -> Snapshot:
        """The copy under a key, made by one process unless it is whole; others wait for that."""
        others_until = time.monotonic()
        if not is_first:
            others_until += HEAD_START_SEC
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            lock = open_plain(self.directory / f"{key}.lock", "ab")
            is_new = has_said = False
            # Shared by those that use the copy, alone by the one that makes it; a lock that is
            # changed may be lost.
            while not (_try(lock, fcntl.LOCK_SH) and is_whole()):
                if time.monotonic() >= others_until and _try(lock, fcntl.LOCK_EX):
                    if not is_whole():
                        make()
                        is_new = True
                    continue
                fcntl.flock(lock, fcntl.LOCK_UN)  # two that share it would wait for each other
                if not has_said:
                    logger.info("%s", waiting)
                has_said = True
                on_wait()
                time.sleep(POLL_SEC * random.uniform(0.5, 1.5))
            os.utime(self.directory / key / ENTRY)  # used now: the last one to be deleted
        except OSError as error:
            where, problem = str(error.filename or self.directory), f"cannot be used: {error.strerror}"
            raise UserError(where, problem, "name another directory: data.cache_dir") from None
        return Snapshot(key, target, is_new, lock)

    def make_room(self, url: str, size: int, to_download: int, place: Path) -> None:
        """Delete the least recently used copies that nobody uses, as far as needed."""
        for other in self.others(place):
            if self._free() >= to_download:
                break
            self._delete(other)
        free = self._free()
        if free < to_download:
            shutil.rmtree(place)
            problem = f"takes {size / 1e9:.3g} GB as a local copy; {free / 1e9:.3g} GB are free in {self.directory}"
            raise UserError(url, problem, "name another data.cache_dir, or read fewer modalities")

    def _free(self) -> int:
        return shutil.disk_usage(self.directory).free

    def others(self, place: Path) -> list[Path]:
        """The other copies, the least recently used first."""

        def used_at(path: Path) -> float:
            with suppress(OSError):
                return (path / ENTRY).stat().st_mtime
            return 0.0

        plans = self.directory.glob("*/plan.json")
        return sorted((path.parent for path in plans if path.parent != place), key=used_at)

    def _delete(self, place: Path) -> None:
        """Delete a copy, unless a process uses it."""
        with open_plain(self.directory / f"{place.name}.lock", "ab") as lock:
            if not _try(lock, fcntl.LOCK_EX):  # a process reads it
                return
            url = read_entry(place / "plan.json").get("url")
            (place / ENTRY).unlink(missing_ok=True)
            shutil.rmtree(place)
        logger.info("deleted the local copy of %s to make room", url)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Held while room is counted and made."""
        with open_plain(self.directory / "room.lock", "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _try(lock: BinaryIO, kind: int) -> bool:
    """Take a lock, unless another process has one that it excludes."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_entry(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}
