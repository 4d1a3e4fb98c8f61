"""The interface of all sinks, how metrics are named in backends that group by prefix, and a sink that never waits."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from trainer.metrics.best_effort import BestEffort
from trainer.metrics.catalog.lookup import EVAL_PREFIX
from trainer.metrics.logger import get_logger

logger = get_logger(__name__)


class Sink(Protocol):
    """Receives payloads, one per call, in step order.

    An exception costs that sink alone, with one warning. Of a sink with the attribute `is_essential = True` it ends the run.
    """

    def log(self, payload: Mapping[str, Any]) -> None:
        """Write one payload (see `payload_contract`)."""

    def event(self, event: Mapping[str, Any]) -> None:
        """Write one event, such as a restart; sinks ignore events that they do not support."""

    def close(self) -> None:
        """Flush and close; nothing is logged afterwards. A second call does nothing."""


def display_key(key: str) -> str:
    """`loss` -> `train/loss`, `eval_loss` -> `eval/loss`, `eval_x/y` -> `eval/x/y`, and `x/y` unchanged."""
    if key.startswith(EVAL_PREFIX):
        return f"eval/{key.removeprefix(EVAL_PREFIX)}"
    return key if "/" in key else f"train/{key}"


class BackgroundSink:
    """Passes payloads and events to a sink in a thread; `log` and `event` never wait.

    The reader of a pipe may stop reading, and a service may stop answering: the thread then waits instead of the step, and with
    it all ranks. Once the queue is full, rows are dropped and counted.

    Args:
        sink: what may wait; nobody else may use it while this is open.
        name: in messages.
        guard: of the sink's calls.
        capacity: rows that wait at most; further ones are dropped.
        patience_sec: how long `close` waits without a row having been passed on before it gives up.
        close_sec: how long it waits for the sink's own `close` after the last row.

    Attributes:
        num_dropped: rows and events that the sink did not get.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        name: str,
        guard: BestEffort,
        capacity: int = 1000,
        patience_sec: float = 5.0,
        close_sec: float = 5.0,
    ) -> None:
        self.sink = sink
        self.name = name
        self.num_dropped = 0
        self._guard = guard
        self._capacity = capacity
        self._patience_sec = patience_sec
        self._close_sec = close_sec
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_passed = 0
        self._has_all = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()

    def log(self, payload: Mapping[str, Any]) -> None:
        """Queue one payload."""
        self._put(partial(self.sink.log, payload))

    def event(self, event: Mapping[str, Any]) -> None:
        """Queue one event."""
        self._put(partial(self.sink.event, event))

    def close(self) -> None:
        """Wait until the sink has everything and is closed, but no longer than it makes progress; say what was dropped."""
        if self._is_closed:
            return
        self._is_closed = True
        self._queue.put(None)
        passed = -1
        while not self._has_all.wait(self._patience_sec) and passed != self._num_passed:
            passed = self._num_passed
        if self._has_all.is_set():
            self._thread.join(self._close_sec)
        else:
            # The row that is being passed on, and those that wait; the last entry is the request to close.
            self.num_dropped += self._queue.qsize()
        abandon = getattr(self.sink, "abandon", None)  # of a sink that could hold up the interpreter's exit
        if self._thread.is_alive() and abandon is not None:
            self._guard.run(abandon)
        if self.num_dropped:
            logger.warning("%s: %d rows were dropped, because they were not taken in time", self.name, self.num_dropped)

    def _put(self, call: Callable[[], None]) -> None:
        if self._is_closed or not self._guard.enabled:
            return
        if self._queue.qsize() >= self._capacity:
            self.num_dropped += 1
            return
        self._queue.put(call)

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            self._guard.run(call)
            self._num_passed += 1
        self._has_all.set()
        self._guard.run(self.sink.close)
