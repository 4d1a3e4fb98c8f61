"""Requests to stop: signals set a flag that the ranks agree on at the next step boundary.

SIGTERM, SIGINT, SIGUSR1, and SIGHUP, which a closed terminal sends.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from trainer.ending import STOP_SIGNALS, end_process
from trainer.import_path import place_of
from trainer.metrics.logger import get_logger

logger = get_logger(__name__)
# A terminal's Ctrl-C reaches every process of the group, and torchrun then sends its own signal:
# within this time a further signal is the same request.
SAME_REQUEST_SEC = 3.0


class StopNow(BaseException):  # no `except Exception` around a user's code swallows it
    """A request to stop, raised where nothing is lost by it."""


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
        self.interrupts = False
        """Raise `StopNow` at a request: the main thread only reads, and may wait for ever."""
        self._former: dict[signal.Signals, Any] = {}
        """The handlers that were there before; empty: not installed."""
        self.is_heard = False
        """True from the first signal on, even while the main thread cannot handle it."""
        self.requested = False  # True from the first signal on
        self.on_end: Callable[[str], object] = str
        """Called with the reason before the process is ended without waiting."""
        self.signal_name: str | None = None
        self._cause: str | None = None

    def request(self, cause: str) -> None:
        """Request the stop because of `cause`, from any thread, unless it is requested already."""
        if not self.requested:
            self._cause = cause
            os.kill(os.getpid(), signal.SIGTERM)  # handled in the main thread

    def install(self) -> bool:
        """Handle the stop signals of this process, from its main thread. False: it does already."""
        if self._former:
            return False
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)  # the handler must never wait
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        # A worker's signals are its own.
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        threading.Thread(target=self._listen, args=(reader,), name="stop", daemon=True).start()
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
        signal.set_wakeup_fd(-1)
        os.close(self._writer)
        self._former = {}

    def _listen(self, reader: int) -> None:
        """Notice signals while the main thread handles none."""
        # Python runs handlers between bytecodes of the main thread; the pipe gets signals at once.
        heard = b""
        while not heard or heard[0] not in STOP_SIGNALS:
            heard = os.read(reader, 1)
            if not heard:  # uninstalled
                os.close(reader)
                return
        self.is_heard = True

    def end(self, code: int, reason: str) -> NoReturn:
        """End the process at once, and log why."""

        def report() -> None:
            self.on_end(reason)  # first: the main thread may hold the lock of the log
            logger.warning(reason)

        end_process(code, report)

    def mute(self) -> None:
        """Log no request from now on: the run ends by itself, and torchrun ends other ranks."""
        self._on_first = lambda name: None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = self._clock()
        if not self.requested:
            self._since, self.requested = now, True
            self.signal_name = self._cause or signal.Signals(number).name
            self._on_first(self.signal_name)
            if self.interrupts:
                raise StopNow
        elif now - self._since > SAME_REQUEST_SEC:
            self.end(128 + number, f"{signal.Signals(number).name} came again: ended at once")


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
