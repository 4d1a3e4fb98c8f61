"""Payloads on standard output: JSON lines for programs, or one short human-readable line per step."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any, Final, Literal, Protocol

from trainer.metrics.logger import format_metrics, format_train_line, get_logger
from trainer.metrics.payload_contract import RESTART, all_values, encode_payload

logger = get_logger(__name__)
StdoutMode = Literal["json", "line", "off"]
STDOUT_MODES: Final = ("json", "line", "off")


def resolve_stdout_mode(mode: str, stream: Output | None = None) -> StdoutMode:
    """Resolve `auto` to `line` on a terminal and `json` elsewhere; other modes are returned unchanged."""
    if mode == "auto":
        return "line" if (stream or sys.stdout).isatty() else "json"
    if mode not in STDOUT_MODES:
        raise ValueError(f"stdout mode must be one of auto, {', '.join(STDOUT_MODES)}, got {mode!r}")
    return mode  # type: ignore[return-value]


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


class Output(Protocol):
    """What payloads are written to."""

    def write(self, text: str, /) -> int:
        """Write it."""

    def flush(self) -> None:
        """Pass it on at once."""

    def fileno(self) -> int:
        """The descriptor, where there is one."""

    def isatty(self) -> bool:
        """Whether it is a terminal."""


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
    step = payload["global_step"]
    values = all_values(payload)
    if payload["mode"] == "train":
        return format_train_line(step, values)
    # Parts of the held-out loss (`eval_token_type/digit/loss`) are for programs; a set or task of one's own is not a part.
    return format_metrics(step, {key: v for key, v in values.items() if "/" not in key or key.startswith("eval/")})


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
        """Write a restart event, in JSON mode only."""
        if self._mode == "json" and event.get("event") == RESTART:
            self._write(encode_payload(event))

    def _write(self, line: str) -> None:
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._mode = "off"
            logger.warning("stdout failed and is off: %s: %s", type(error).__name__, error)
            self._discard_rest()

    def _discard_rest(self) -> None:
        # Buffered output, and anything printed later, would fail when the interpreter flushes it at exit.
        try:
            target = self._stream.fileno()
        except (OSError, ValueError):
            return
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, target)
        finally:
            os.close(null)

    def close(self) -> None:
        """Nothing is buffered."""
