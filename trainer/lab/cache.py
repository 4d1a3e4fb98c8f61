"""A directory of what is made once for all ranks of a node, such as the tokens of text.

CACHE/<key>/entry.json      what it is made of; written last
CACHE/<key>/files/          the files
CACHE/<key>.lock            held by the process that makes it
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from trainer.errors import UserError
from trainer.files import open_plain
from trainer.metrics.logger import get_logger

logger = get_logger(__name__)
ENTRY = "entry.json"
FULL = (errno.ENOSPC, errno.EDQUOT)
POLL_SEC, HEAD_START_SEC = 0.2, 5.0


class Cache:
    """What is below the directory that `[data] cache_dir` names (None: the user's own)."""

    def __init__(self, directory: str | Path | None) -> None:
        own = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "trainer", "data")
        try:
            self.directory = Path(os.path.realpath(Path(directory or own).expanduser()))
        except RuntimeError:
            raise UserError("data.cache_dir", f"{directory or own} is in nobody's home", "name another one") from None

    def hold(
        self,
        key: str,
        *,
        is_whole: Callable[[], bool],
        make: Callable[[], None],
        waiting: str,  # what to say when it is waited for
        is_first: bool = True,  # False: leave it to another process to begin, for some seconds
        on_wait: Callable[[], None] = lambda: None,  # called now and then
    ) -> bool:
        """Make what is under a key, unless another process has or does. Returns whether."""
        others_until = time.monotonic()
        if not is_first:
            others_until += HEAD_START_SEC
        is_new = has_said = False
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with open_plain(self.directory / f"{key}.lock", "ab") as lock:
                while not is_whole():
                    if time.monotonic() >= others_until and _try(lock):
                        if not is_whole():
                            make()
                            is_new = True
                        continue
                    if not has_said:
                        logger.info("%s", waiting)
                    has_said = True
                    on_wait()
                    time.sleep(POLL_SEC * random.uniform(0.5, 1.5))
        except OSError as error:
            where, problem = str(error.filename or self.directory), f"cannot be used: {error.strerror}"
            fix = f"name another data.cache_dir; if it is full, delete what no run reads in {self.directory}"
            raise UserError(where, problem, fix) from None
        return is_new

    def need(self, what: str, num_bytes: int) -> None:
        """Refuse what does not fit. Raises UserError."""
        free = shutil.disk_usage(self.directory).free
        if free < num_bytes:
            room = f"{free / 1e9:.3g} GB are free in {self.directory}"
            problem = f"takes {num_bytes / 1e9:.3g} GB more; {room}"
            raise UserError(what, problem, "delete what no run reads there, or name another data.cache_dir")


def _try(lock: BinaryIO) -> bool:
    """Take a lock, unless another process has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def has_size(path: Path, size: int) -> bool:
    """Whether there is a file of this size."""
    try:
        return path.stat().st_size == size
    except OSError:
        return False
