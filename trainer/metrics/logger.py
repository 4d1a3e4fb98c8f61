"""Human-readable log lines on stderr, and the formatting of numbers in them."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, TextIO

from trainer.files import parse_count
from trainer.wording import printable_lines

ROOT: Final = "trainer"
_COLOURS: Final = {logging.WARNING: "33", logging.ERROR: "31", logging.CRITICAL: "1;31"}
_IN_LINE: Final = (  # metrics in the line of a step: their name there, and format
    ("lr", "lr", ".2e"),
    ("grad_norm", "grad_norm", ".3f"),
    ("tokens_per_sec", "tok/s", ",.0f"),
    ("mfu", "mfu", ".1%"),
)


def _rank() -> int:
    return parse_count(os.environ.get("RANK", "")) or 0


def is_terminal() -> bool:
    """Whether somebody reads stderr as it is written."""
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


class _RankFormatter(logging.Formatter):
    """`[rank N] LEVEL message`, on a terminal with a colored level, or after the time (UTC)."""

    def __init__(self, time_format: str | None = None) -> None:
        super().__init__("%(message)s")
        self._time_format = time_format

    def format(self, record: logging.LogRecord) -> str:
        level, when = record.levelname, ""
        if self._time_format is not None:
            when = time.strftime(self._time_format, time.gmtime(record.created))
        elif is_terminal() and not os.environ.get("NO_COLOR"):
            level = f"\033[{_COLOURS.get(record.levelno, '32')}m{level}\033[0m"
        # A name in a message must not act on the terminal. Line breaks stay: tracebacks have them.
        return f"{when}[rank {_rank()}] {level} " + printable_lines(super().format(record))


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, so that redirections apply, the records of rank 0 and of
    loggers that log on every rank."""

    every_rank: Final[set[str]] = set()

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(_RankFormatter())

    def filter(self, record: logging.LogRecord) -> bool:
        return record.name in self.every_rank or _rank() == 0

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr  # setStream would flush the old stream, which may be closed
        super().emit(record)


class _LogFile(logging.FileHandler):
    """A full disk only costs lines, which stderr has too."""

    def handleError(self, record: logging.LogRecord) -> None:
        """A line is lost."""


def get_logger(name: str, rank_zero_only: bool = True) -> logging.Logger:
    """A logger of this name below `trainer`, which writes `[rank N] LEVEL message` to stderr.

    `rank_zero_only`: keep this logger's records of other ranks (RANK of the environment; 0 if it is
    no number) off stderr; their log files have them. The last call for a name applies.
    """
    root = logging.getLogger(ROOT)
    if not any(isinstance(handler, _StderrHandler) for handler in root.handlers):
        # Below `trainer`, not at the root: the logging of a host program stays as it is.
        root.addHandler(_StderrHandler())
        if root.level == logging.NOTSET:
            root.setLevel(logging.INFO)
    full_name = name if f"{name}.".startswith(f"{ROOT}.") else f"{ROOT}.{name}"
    (_StderrHandler.every_rank.discard if rank_zero_only else _StderrHandler.every_rank.add)(full_name)
    return logging.getLogger(full_name)


def add_log_file(path: Path) -> logging.Handler:
    """Also append this rank's records, with their time, to a file, from now on."""
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(_RankFormatter("%Y-%m-%dT%H:%M:%SZ "))
    logging.getLogger(ROOT).addHandler(handler)
    return handler


def remove_log_file(handler: logging.Handler) -> None:
    """Close the file of `add_log_file`."""
    logging.getLogger(ROOT).removeHandler(handler)
    with suppress(OSError):
        handler.close()


def format_number(value: float | str) -> str:
    """A human-readable number: integers with k/M/B, floats with 4 decimals.

    Floats below 0.01 (but zero) or above 1e6 in size use scientific notation. Strings stay.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        for size, suffix in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
            # From 999,950 on, the smaller unit would show 1000.0k.
            if abs(value) >= max(size * 0.99995, 1000):
                return f"{value / size:.1f}{suffix}"
        return str(value)
    if value and not 0.01 <= abs(value) <= 1e6:
        return f"{value:.2e}"
    return f"{value:.4f}"


def format_metrics(step: int, values: Mapping[str, float | str]) -> str:
    """`[step 10] loss=2.3400 | tokens=1.2M`."""
    parts = " | ".join(f"{name}={format_number(value)}" for name, value in values.items())
    return f"[step {step}] {parts}"


def format_train_line(step: int, metrics: Mapping[str, float]) -> str:
    """The line of a training step from the payload's metrics; absent metrics are omitted."""
    parts: dict[str, float | str] = {}
    if "loss" in metrics:
        parts["loss"] = float(metrics["loss"])
    for key, name, form in _IN_LINE:
        if key in metrics:
            parts[name] = format(metrics[key], form)
    if "gpu/peak_gb" in metrics and "gpu/total_gb" in metrics:
        parts["mem"] = f"{metrics['gpu/peak_gb']:.1f}/{metrics['gpu/total_gb']:.0f}GB"
    if "step_time_sec" in metrics:
        seconds = metrics["step_time_sec"]
        parts["step_time"] = f"{seconds:.2f}s" if seconds >= 0.1 else f"{seconds:.4f}s"
    return format_metrics(step, parts)
