"""The end of a process: whether it still works, and how to leave it for good."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import NoReturn

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

# Below this share of one core a process waits. Idle ones use 0.1 % for the polling of their
# threads; one that computes gets several per cent even of a machine under ten times its load.
WORKING_SHARE = 0.01
LAST_WORDS_SEC = 10.0
FLUSH_SEC = 2.0
WAIT_FOR_THREADS_SEC = 60.0  # that a finished program waits for a user's threads and handlers


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


def leave_soon(code: int) -> None:
    """Bound the end of a process whose program is done. A stop signal ends it at once."""
    # Python waits for ever for threads and exit handlers that a user's code may have left.
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: end_process(code))
    threading.Thread(target=_leave, args=(code,), name="leaving", daemon=True).start()


def _leave(code: int) -> None:
    time.sleep(WAIT_FOR_THREADS_SEC)
    others = {*threading.enumerate()} - {threading.main_thread()}
    names = ", ".join(each.name for each in others if not each.daemon) or "a handler of the program's exit"
    print(f"train: leaving without {names}, after {WAIT_FOR_THREADS_SEC:.0f} s", file=sys.stderr)  # noqa: T201
    end_process(code)


PARENT = "TRAINER_PARENT"
"""The launcher's process id, for a process that must not outlive it; torchrun need not set it."""
CHECK_EVERY_SEC = 1.0
EXIT_ORPHANED = 1


def stop_with_parent(
    stop: Callable[[], None],
    *,
    within_sec: float,
    end: Callable[[int, str], object] = lambda code, reason: os._exit(code),
    environ: MutableMapping[str, str] = os.environ,
) -> None:
    """Call `stop` from a thread when this process's launcher is gone, and `end` `within_sec` later.

    A process without a launcher (started by a shell, or a scheduler) lives on without its parent.
    """
    named = environ.pop(PARENT, "")  # not for the processes that this one starts
    if not named and "TORCHELASTIC_RUN_ID" not in environ:
        return
    parent = int(named or os.getppid())

    def watch() -> None:
        # Polled: Linux signals the death of the parent's thread, not process, and other systems nothing.
        while os.getppid() == parent:
            time.sleep(CHECK_EVERY_SEC)
        stop()
        time.sleep(within_sec)
        end(EXIT_ORPHANED, f"its launcher is gone, and no step ended within {within_sec:.0f} s")

    threading.Thread(target=watch, name="parent", daemon=True).start()
