"""The one guard for diagnostics: a failure costs that diagnostic, never the run.

    diagnostics = Diagnostics()
    token_types = diagnostics.best_effort("token_type")
    token_types.run(measure, batch)

A collective must not stand inside a guard: other ranks would wait for it. Guard the local part, and
let what is missing enter the reduction as the identity.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from trainer.metrics.logger import get_logger
from trainer.wording import counted, error_text, short_repr

P = ParamSpec("P")
R = TypeVar("R")
EventCallback = Callable[[dict[str, Any]], None]
LeaveOut = Callable[[str, str], object]
"""Takes a metric's name and its mistake; see `BestEffort.leave_out`."""
logger = get_logger(__name__, rank_zero_only=False)


def as_number(value: Any) -> float:
    """A float of a number, also of numpy's, or of a tensor with one element, for which it waits.

    A TypeError if it is none, or beyond the range of a float.
    """
    if type(value) is float:
        return value
    try:
        # Of a complex number of numpy, float() would give the real part.
        if isinstance(value, str | bytes | bytearray) or "complex" in str(getattr(value, "dtype", "")):
            raise TypeError
        return float(value)
    except Exception:  # noqa: BLE001 - an object of the user's own may do anything
        raise TypeError(f"must be a number, got {short_repr(value)}") from None


def checked(values: Any, leave_out: LeaveOut, take: Callable[[Any], R]) -> dict[str, R | None]:
    """The values by name; None for one that is no number: a total without it would be wrong.

    `take`, such as `as_number`, makes a value of what was given, or raises a TypeError.
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"must be a mapping of names to numbers, got {short_repr(values)}")
    taken: dict[str, R | None] = {}
    for name, value in values.items():
        if is_name(name, leave_out):
            try:
                taken[name] = take(value)
            except TypeError as error:
                leave_out(name, str(error))
                taken[name] = None
    return taken


def is_name(name: Any, leave_out: LeaveOut) -> bool:
    """Whether it can be a metric's name; if not, it is left out."""
    if isinstance(name, str) and name:
        return True
    leave_out(short_repr(name), "the name of a metric must be a text that is not empty")
    return False


class SkipBatch(Exception):
    """A diagnostic cannot measure this batch, for an expected reason; the next is tried again."""


class BestEffort:
    """Guard of one diagnostic.

    Attributes:
        enabled: False after an unexpected exception.
        num_skipped, last_skip: batches passed over by `SkipBatch`, and the last reason.
    """

    def __init__(self, name: str, *, on_event: EventCallback | None = None) -> None:
        self.name, self.enabled = name, True
        self.num_skipped, self.last_skip = 0, ""
        self._left_out: set[str] = set()
        self._on_event = on_event

    def run(self, diagnostic: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """Call the diagnostic; None if it is off, skipped this batch or failed."""
        if not self.enabled:
            return None
        try:
            return diagnostic(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - a diagnostic may fail in any way
            self.fail(error)
            return None

    def leave_out(self, key: str, problem: str) -> None:
        """Say, once, that a metric is left out; all others continue."""
        if key not in self._left_out:  # it may come with every step
            self._left_out.add(key)
            logger.warning("%s: metric %r is left out: %s", self.name, key, problem)

    def fail(self, error: Exception) -> None:
        """Skip this batch, or turn the diagnostic off with one warning, by its exception."""
        if isinstance(error, SkipBatch):
            self.num_skipped += 1
            self.last_skip = str(error)
            return
        if not self.enabled:
            return
        self.enabled = False
        logger.warning("%s failed and is off from now on: %s", self.name, error_text(error))
        event = {"event": "diagnostic_disabled", "name": self.name, "error": error_text(error)}
        if self._on_event is not None:
            with suppress(Exception):  # nor must its report stop the run
                self._on_event({**event, "traceback": "".join(traceback.format_exception(error))})


class Diagnostics:
    """All guards of a run, one for each name."""

    def __init__(self) -> None:
        self._write: EventCallback | None = None
        self._unwritten: list[dict[str, Any]] = []  # failed before the file of events was open
        self._guards: dict[str, BestEffort] = {}

    def best_effort(self, name: str) -> BestEffort:
        """The guard of that name, always the same object."""
        if name not in self._guards:
            self._guards[name] = BestEffort(name, on_event=self._record)
        return self._guards[name]

    def write_with(self, write: EventCallback) -> None:
        """Record failures with `write`: those to come, and those so far."""
        self._write = write
        while self._unwritten:
            self._record(self._unwritten.pop(0))

    def _record(self, event: dict[str, Any]) -> None:
        if self._write is None:
            self._unwritten.append(event)
        else:
            self._write(event)

    def summary(self) -> list[str]:
        """Missing measurements: a line for each diagnostic that failed, and each that skipped."""
        lines = []
        for name, guard in self._guards.items():
            if not guard.enabled:
                lines.append(f"{name} failed during the run; what it reports is missing since then")
            if guard.num_skipped:
                skipped = counted(guard.num_skipped, "batch")
                lines.append(f"{name} skipped {skipped}, the last one because: {guard.last_skip}")
        return lines
