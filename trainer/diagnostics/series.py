"""One key of a run as a series, and the small arithmetic that several rules share."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from trainer.diagnostics.outcome import MAX_EVIDENCE, Evidence
from trainer.runs.load import Run


@dataclass(frozen=True)
class Series:
    """The logged steps of a key, ascending, and its values there; false if the run has no such key."""

    key: str
    steps: array[int]
    values: array[float]

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def total(self) -> float:
        """Sum of the values."""
        return math.fsum(self.values)

    def where(self, is_meant: Callable[[float], bool]) -> list[int]:
        """The indices whose values are meant."""
        return [index for index, value in enumerate(self.values) if is_meant(value)]

    def evidence(self, indices: Iterable[int]) -> Evidence:
        """Some steps and their values, at most `MAX_EVIDENCE` spread over all that are given."""
        chosen = thin(list(indices))
        return Evidence(self.key, tuple(self.steps[i] for i in chosen), tuple(self.values[i] for i in chosen))

    def since(self, step: int) -> Series:
        """The part from a step on."""
        start = next((i for i, s in enumerate(self.steps) if s >= step), len(self))
        return Series(self.key, self.steps[start:], self.values[start:])


def series(run: Run, key: str) -> Series:
    """A key's values; empty if the run does not log it."""
    steps, values = run.column(key)
    return Series(key, steps, values)


def thin(indices: Sequence[int]) -> list[int]:
    """At most `MAX_EVIDENCE` of them, the first and the last among them."""
    if len(indices) <= MAX_EVIDENCE:
        return list(indices)
    stride = (len(indices) - 1) / (MAX_EVIDENCE - 1)
    return [indices[round(k * stride)] for k in range(MAX_EVIDENCE)]


def number(value: float) -> str:
    """A number for a sentence: whole ones as they are, others with three digits that count, nan and inf by their names."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def count_of(count: float, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number(count)} {noun}" if count == 1 else f"{number(count)} {noun}s"


def aligned(*columns: Series) -> tuple[list[int], list[list[float]]]:
    """The steps that all columns have, and each column's values at them."""
    first, *others = columns
    if all(other.steps == first.steps for other in others):
        return list(first.steps), [list(column.values) for column in columns]
    tables = [dict(zip(column.steps, column.values, strict=True)) for column in columns]
    steps = [step for step in first.steps if all(step in table for table in tables)]
    return steps, [[table[step] for step in steps] for table in tables]


def typical_deviation(values: Sequence[float], center: float) -> float:
    """Robust standard deviation about a centre: 1.4826 times the median distance, which is sigma for a normal variable."""
    return 1.4826 * median(abs(value - center) for value in values)
