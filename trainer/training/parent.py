"""The end of a process whose launcher is gone: nobody else would end the ranks that a killed launcher leaves behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, MutableMapping

PARENT = "TRAINER_PARENT"
"""Who starts a process that must not outlive it sets this to its own process id; torchrun need not."""
CHECK_EVERY_SEC = 1.0
EXIT_ORPHANED = 1


def stop_with_parent(
    stop: Callable[[], None], *, within_sec: float, environ: MutableMapping[str, str] = os.environ
) -> None:
    """Call `stop` from a thread when the launcher that started this process is gone, and end `within_sec` after that.

    The parent is asked for again and again: Linux's signal of its death comes with the end of the parent's thread already,
    and other systems have none. A process that has no launcher (a shell's, a scheduler's) goes on without its parent.
    """
    named = environ.pop(PARENT, "")  # not for the processes that this one starts
    if not named and "TORCHELASTIC_RUN_ID" not in environ:
        return
    parent = int(named) if named else os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(CHECK_EVERY_SEC)
        stop()
        time.sleep(within_sec)
        os._exit(EXIT_ORPHANED)

    threading.Thread(target=watch, name="parent", daemon=True).start()
