"""The end of a process: requests to stop, whether it still works, and how to leave it for good."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

logger = logging.getLogger(__name__)
# A closed terminal sends SIGHUP.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# A terminal's Ctrl-C reaches every process of the group, and torchrun then sends its own signal:
# within this time a further signal is the same request.
SAME_REQUEST_SEC = 3.0

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
    for stream in filter(None, (sys.stdout, sys.stderr)):  # closed at the start: None
        within(FLUSH_SEC, stream.flush)
    os._exit(code)


def within(seconds: float, action: Callable[[], object]) -> bool:
    """Do it, but wait for it no longer than that; whether it has ended."""
    thread = threading.Thread(target=action, name="ending", daemon=True)
    with suppress(RuntimeError):  # the interpreter is shutting down, and starts no thread
        thread.start()
        thread.join(seconds)
        return not thread.is_alive()
    return False


class StopRequest:
    """A request to stop this process; a second one, after `SAME_REQUEST_SEC`, ends it at once."""

    def __init__(self) -> None:
        self._since = 0.0
        self._former: dict[signal.Signals, Any] = {}
        """The handlers that were there before; empty: not installed."""
        self.requested = False  # True from the first signal on
        self.on_end: Callable[[str], object] = str
        """Called with the reason before the process is ended without waiting."""
        self.signal_name: str | None = None
        self.is_muted = False  # logs no request: the run ends by itself, torchrun ends others

    def install(self) -> bool:
        """Handle the stop signals of this process, from its main thread. False: it does already."""
        if self._former:
            return False
        for number in STOP_SIGNALS:
            # After nohup SIGHUP must stay ignored: it comes when the terminal is closed.
            former = signal.getsignal(number)
            if number != signal.SIGHUP or former is not signal.SIG_IGN:
                self._former[number] = former
                signal.signal(number, self._handle)
        return True

    def uninstall(self) -> None:
        """Restore the former handlers."""
        for number, former in self._former.items():
            signal.signal(number, former)
        self._former = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.requested:
            self._since, self.requested = now, True
            self.signal_name = signal.Signals(number).name
            if not self.is_muted:
                text = "%s: stopping after this step (again after %.0f s: at once)"
                logger.warning(text, self.signal_name, SAME_REQUEST_SEC)
        elif now - self._since > SAME_REQUEST_SEC:
            reason = f"{signal.Signals(number).name} came again: ended at once"

            def report() -> None:
                self.on_end(reason)  # first: the main thread may hold the lock of the log
                logger.warning(reason)

            end_process(128 + number, report)
