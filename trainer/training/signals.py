"""Requests to stop: signals set a flag that the ranks agree on at the next step boundary.

SIGTERM, SIGINT, SIGUSR1, and SIGHUP, which a closed terminal sends.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from trainer.ending import STOP_SIGNALS, end_process
from trainer.import_path import place_of
from trainer.metrics.logger import get_logger

logger = get_logger(__name__)
# A terminal's Ctrl-C reaches every process of the group, and torchrun then sends its own signal:
# within this time a further signal is the same request.
SAME_REQUEST_SEC = 3.0


def say_stopping(name: str) -> None:
    """Log the first request."""
    text = "%s: stopping after this step (again after %.0f s: at once)"
    logger.warning(text, name, SAME_REQUEST_SEC)


class StopRequest:
    """A request to stop this process; a second one stops it at once.

    `on_first` is called in the signal handler with the signal's name, and must return quickly.
    """

    def __init__(self, on_first: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._on_first = on_first
        self._clock = clock
        self._since = 0.0
        self._former: dict[signal.Signals, Any] = {}
        """The handlers that were there before; empty: not installed."""
        self.requested = False  # True from the first signal on
        self.on_end: Callable[[str], object] = str
        """Called with the reason before the process is ended without waiting."""
        self.signal_name: str | None = None

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

    def mute(self) -> None:
        """Log no request from now on: the run ends by itself, and torchrun ends other ranks."""
        self._on_first = lambda name: None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = self._clock()
        if not self.requested:
            self._since, self.requested = now, True
            self.signal_name = signal.Signals(number).name
            self._on_first(self.signal_name)
        elif now - self._since > SAME_REQUEST_SEC:
            reason = f"{signal.Signals(number).name} came again: ended at once"

            def report() -> None:
                self.on_end(reason)  # first: the main thread may hold the lock of the log
                logger.warning(reason)

            end_process(128 + number, report)


class UnexpectedExit(Exception):
    """The user's code ended the process; the message says how and where."""


@contextmanager
def exits_as_errors(when: Callable[[], str] = str) -> Iterator[None]:
    """Turn `sys.exit` and any other `BaseException` into an `UnexpectedExit`.

    The message of an exit says `when` in the run it came, as ` after step 7`.
    """
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        what = f"{type(error).__name__} was raised"
        if isinstance(error, SystemExit):
            what = f"sys.exit({error.code!r}) was called"
        raise UnexpectedExit(f"{what}{when()}{place_of(error)}") from error
