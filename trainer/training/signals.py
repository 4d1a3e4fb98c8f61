"""Requests to stop: signals set a flag that the ranks agree on at the next step boundary.

SIGTERM, SIGINT, SIGUSR1, and SIGHUP, which a closed terminal sends.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import FrameType

from trainer.metrics.logger import get_logger

logger = get_logger(__name__)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# A terminal's Ctrl-C reaches every process of the group, and torchrun then sends its own signal after it: within this
# time a further signal is the same request.
SAME_REQUEST_SEC = 3.0


def say_stopping(name: str) -> None:
    """What a person is told at the first request."""
    logger.warning("%s: stopping after this step (again: at once)", name)


class StopRequest:
    """Whether somebody asked this process to stop. A second request stops it at once.

    Args:
        on_first: called with the signal's name when the first request comes (in the handler: keep it short).
        clock: seconds that never go back.
    """

    def __init__(self, on_first: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._on_first = on_first
        self._clock = clock
        self._since = 0.0
        self.requested = False
        """True from the first signal on."""
        self.signal_name: str | None = None
        self._cause: str | None = None

    def request(self, cause: str) -> None:
        """Request the stop because of `cause`, from any thread; a stop that is requested already goes on."""
        if not self.requested:
            self._cause = cause
            os.kill(os.getpid(), signal.SIGTERM)

    def install(self) -> None:
        """Handle the stop signals of this process, from its main thread."""
        for number in STOP_SIGNALS:
            # nohup has the program ignore SIGHUP, which then survives when the terminal is closed.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    def mute(self) -> None:
        """Say nothing from now on, since the run ends by itself: torchrun ends the ranks that are left when one has ended."""
        self._on_first = lambda name: None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = self._clock()
        if not self.requested:
            self._since, self.requested = now, True
            self.signal_name = self._cause or signal.Signals(number).name
            self._on_first(self.signal_name)
        elif now - self._since > SAME_REQUEST_SEC:
            os._exit(128 + number)
