"""The end of a process that does not end by itself: whether it still works, and how to leave it for good."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

# Below this share of one core a process waits. Idle ones use 0.1 % for their threads' polling; one that computes gets
# several per cent even of a machine under ten times its load.
WORKING_SHARE = 0.01
LAST_WORDS_SEC = 10.0
FLUSH_SEC = 2.0


class ProcessorUse:
    """Tells a process that works (compiles, tokenizes, waits for a device by polling it) from one that waits."""

    def __init__(self) -> None:
        self._last = time.monotonic(), time.process_time()

    def is_working(self) -> bool:
        """Whether this process has used its processors since the last call, in any of its threads."""
        before, self._last = self._last, (time.monotonic(), time.process_time())
        return self._last[1] - before[1] > WORKING_SHARE * (self._last[0] - before[0])


def end_process(code: int, last_words: Callable[[], object] = lambda: None) -> NoReturn:
    """End the process from any thread, whatever the others wait for.

    Args:
        last_words: what is to be said or written before. It is not waited for long: it may need a lock that a thread that
            hangs holds, or a disk that does not answer.
    """
    within(LAST_WORDS_SEC, last_words)
    for stream in (sys.stdout, sys.stderr):
        within(FLUSH_SEC, stream.flush)
    os._exit(code)


def within(seconds: float, action: Callable[[], object]) -> None:
    """Do it, but wait for it no longer than that."""
    thread = threading.Thread(target=action, name="ending", daemon=True)
    thread.start()
    thread.join(seconds)
