"""The sinks of a run's metrics: their interface, one that never waits, metrics.jsonl and events.jsonl, and standard output."""

from __future__ import annotations

import json
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TextIO

from trainer.files import open_descriptor, parse_json
from trainer.metrics.best_effort import BestEffort
from trainer.metrics.catalog.lookup import EVAL_PREFIX
from trainer.metrics.logger import format_metrics, format_train_line, get_logger
from trainer.metrics.payload_contract import all_values, encode_payload, non_finite_word

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


SAMPLE: Final = "sample"
"""The event with text generated by the model: `global_step`, `prompt`, `text`."""


class LineFile:
    """Appends lines to a file; a line is completely passed to the operating system before `append` returns.

    The lines are JSON objects. On opening, a last line without a newline (the writer was killed, the disk was full) is
    repaired: a complete object gets its newline, a fragment is removed.

    If the file, or its directory, is removed or replaced by somebody, further lines would go into a nameless file.
    That is noticed at the next line, which begins a new file, with a warning.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open()
        try:
            self._repair_last_line()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = open_descriptor(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._fd), os.lstat(self.path))
        except FileNotFoundError:
            return False

    def _repair_last_line(self) -> None:
        end = start = os.lseek(self._fd, 0, os.SEEK_END)
        tail = b""
        while start > 0 and b"\n" not in tail:
            start = max(0, start - 65536)
            tail = os.pread(self._fd, end - start, start)
        tail = tail[tail.rfind(b"\n") + 1 :]
        if not tail:
            return
        try:
            is_complete = isinstance(parse_json(tail), dict)
        except ValueError:
            is_complete = False
        if is_complete:
            self._write(b"\n")
        else:
            os.ftruncate(self._fd, end - len(tail))
            logger.warning("%s: removed %d bytes of an incomplete last line", self.path, len(tail))

    def append(self, line: str) -> None:
        """Write one line.

        Raises:
            OSError: the line could not be written completely (disk full, quota); the error names the file.
        """
        if not self._is_in_place():
            logger.warning("%s was removed or replaced; what it held is lost, a new file continues here", self.path)
            os.close(self._fd)
            self._open()
        self._write(line.encode("utf-8") + b"\n")

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            if not self._is_in_place():
                logger.warning("%s was removed or replaced; what it held is lost", self.path)
            os.close(self._fd)
            self._fd = -1


class JsonlSink(LineFile):
    """Appends each payload as one line; write failures raise, since a run needs its record."""

    is_essential = True

    def log(self, payload: Mapping[str, Any]) -> None:
        """Append one payload.

        Raises:
            OSError: it could not be written completely.
        """
        self.append(encode_payload(payload))

    def event(self, event: Mapping[str, Any]) -> None:
        """Events go to events.jsonl."""


def _strict(value: Any) -> Any:
    """The value with NaN and infinities as words, for strict JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return non_finite_word(value)
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value


class EventWriter(LineFile):
    """Appends events, each one line of strict JSON with `event` (its name) and `time` (seconds since 1970)."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        super().__init__(path)
        self._clock = clock

    def write(self, event: Mapping[str, Any]) -> None:
        """Append one event; values that JSON cannot represent are written as text.

        Raises:
            ValueError: the event has no name.
            OSError: it could not be written.
        """
        if not event.get("event"):
            raise ValueError(f"an event needs its name under 'event', got {sorted(event)}")
        line = {"time": round(self._clock(), 3), **_strict(event)}
        self.append(json.dumps(line, allow_nan=False, separators=(",", ":"), default=str))


StdoutMode = Literal["json", "line", "off"]
STDOUT_MODES: Final = ("json", "line", "off")


class PayloadStream:
    """A file descriptor to which lines are written as they are.

    Without a buffer: one that cannot be flushed, because nobody reads, would block the interpreter at exit.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, text: str) -> int:
        """Write all of it, however long that takes."""
        data = text.encode("utf-8")
        while data:
            data = data[os.write(self._descriptor, data) :]
        return len(text)

    def flush(self) -> None:
        """Nothing is buffered."""

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return os.isatty(self._descriptor)


Output = TextIO | PayloadStream
"""What payloads are written to."""


def resolve_stdout_mode(mode: str, stream: Output | None = None) -> StdoutMode:
    """Resolve `auto` to `line` on a terminal and `json` elsewhere; other modes are returned unchanged."""
    if mode == "auto":
        return "line" if (stream or sys.stdout).isatty() else "json"
    if mode not in STDOUT_MODES:
        raise ValueError(f"stdout mode must be one of auto, {', '.join(STDOUT_MODES)}, got {mode!r}")
    return mode  # type: ignore[return-value]


@contextmanager
def kept_for_payloads() -> Iterator[Output]:
    """What stdout was, for payloads alone: whatever else writes to it meanwhile (a model's `print`) goes to stderr.

    That is done to the file descriptor, so that it holds for libraries in C and for child processes too.
    """
    stdout = sys.stdout
    with redirect_stdout(sys.stderr):
        try:
            stdout.flush()
            descriptor, stderr = stdout.fileno(), sys.stderr.fileno()
        except (OSError, ValueError, AttributeError):  # closed, absent, or replaced by something in memory
            yield stdout
            return
        # Never closed: a thread may still wait in a write to it, which must not go to another file of the same number.
        own = os.dup(descriptor)
        os.dup2(stderr, descriptor)
        try:
            yield PayloadStream(own)
        finally:
            os.dup2(own, descriptor)


def render_line(payload: Mapping[str, Any]) -> str:
    """The payload as a human-readable line."""
    step, values = payload["global_step"], all_values(payload)
    if payload["mode"] == "train":
        return format_train_line(step, values)
    # Parts of the held-out loss (`eval_token_type/digit/loss`) are for programs; a set or task of one's own is not a part.
    shown = {key: v for key, v in values.items() if "/" not in key or key.startswith("eval/")}
    return format_metrics(step, {key: value for key, value in shown.items() if "/depth/" not in key})


class StdoutSink:
    """Writes one line per payload, in one write, flushed at once.

    If the reader goes away (`| head`) or the stream fails, the output ends with one warning and the run continues.
    """

    def __init__(self, mode: StdoutMode, *, stream: Output | None = None) -> None:
        self._mode: StdoutMode = mode
        self._stream: Output = stream or sys.stdout

    def log(self, payload: Mapping[str, Any]) -> None:
        """Write one payload."""
        if self._mode != "off":
            self._write(encode_payload(payload) if self._mode == "json" else render_line(payload))

    def event(self, event: Mapping[str, Any]) -> None:
        """Events are no payloads."""

    def _write(self, line: str) -> None:
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._mode = "off"
            logger.warning("stdout failed and is off: %s: %s", type(error).__name__, error)
            # Buffered output, and anything printed later, would fail when the interpreter flushes it at exit.
            with suppress(OSError, ValueError):
                target, null = self._stream.fileno(), os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, target)
                os.close(null)

    def close(self) -> None:
        """Nothing is buffered."""
