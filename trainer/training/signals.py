"""Requests to stop: signals set a flag that the ranks agree on at the next step boundary.

SIGTERM, SIGINT, SIGUSR1, and SIGHUP, which a closed terminal sends; and the death of a launcher, which sends nothing.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, MutableMapping
from types import FrameType

from trainer.metrics.logger import get_logger

logger = get_logger(__name__)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# A terminal's Ctrl-C reaches every process of the group, and torchrun then sends its own signal after it: within this
# time a further signal is the same request.
SAME_REQUEST_SEC = 3.0
PARENT = "TRAINER_PARENT"
"""The process that starts this one sets it to its own id if this one must not outlive it; a torchrun agent need not."""
PARENT_CHECK_SEC = 1.0
EXIT_ORPHANED = 1


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

    def request(self, name: str) -> None:
        """Request the stop because of `name`, unless it is requested already."""
        if not self.requested:
            self._since, self.requested = self._clock(), True
            self.signal_name = name
            self._on_first(name)

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
        if self.requested and self._clock() - self._since > SAME_REQUEST_SEC:
            os._exit(128 + number)
        self.request(signal.Signals(number).name)


def stop_with_parent(
    stop: Callable[[], None], *, within_sec: float, environ: MutableMapping[str, str] = os.environ
) -> None:
    """Call `stop` (from a thread) when the launcher that started this process is gone, and end `within_sec` after that.

    A process that nobody launched so (a shell's, a scheduler's) goes on without its parent.
    """
    named = environ.pop(PARENT, "")  # not for the processes that this one starts
    if not named and "TORCHELASTIC_RUN_ID" not in environ:
        return
    parent = int(named) if named else os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_SEC)
        stop()
        time.sleep(within_sec)
        os._exit(EXIT_ORPHANED)

    threading.Thread(target=watch, name="parent", daemon=True).start()
