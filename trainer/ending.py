"""The end of a process: whether it still works, and how to leave it for good."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

# Below this share of one core a process waits. Idle ones use 0.1 % for the polling of their
# threads; one that computes gets several per cent even of a machine under ten times its load.
WORKING_SHARE = 0.01
LAST_WORDS_SEC = 10.0
FLUSH_SEC = 2.0


class ProcessorUse:
    """Tells a process that works (compiles, tokenizes, polls a device) from one that waits."""

    def __init__(self) -> None:
        self._last = 0.0, 0.0

    def is_working(self) -> bool:
        """Whether any thread but this one has used a processor since the last call."""
        before, self._last = self._last, (time.monotonic(), time.process_time() - time.thread_time())
        return self._last[1] - before[1] > WORKING_SHARE * (self._last[0] - before[0])


def end_process(code: int, last_words: Callable[[], object] = lambda: None) -> NoReturn:
    """End the process from any thread, after `last_words`, whatever the others wait for."""
    # Not waited for long: they may need a lock that a hanging thread holds, or a disk that is gone.
    within(LAST_WORDS_SEC, last_words)
    for stream in (sys.stdout, sys.stderr):
        within(FLUSH_SEC, stream.flush)
    os._exit(code)


def within(seconds: float, action: Callable[[], object]) -> bool:
    """Do it, but wait for it no longer than that; whether it is done."""
    thread = threading.Thread(target=action, name="ending", daemon=True)
    with suppress(RuntimeError):  # the interpreter is shutting down, and starts no thread
        thread.start()
        thread.join(seconds)
    return not thread.is_alive()
