"""One key of a run as a series, and arithmetic that several rules share."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import fsum
from statistics import median
from typing import Final

from trainer.tools.diagnostics.outcome import Evidence
from trainer.tools.runs.load import RunRecord

MAX_EVIDENCE: Final = 12


@dataclass(frozen=True)
class Series:
    """The logged steps of a key, ascending, and its values there; false if the run does not log the key."""

    key: str
    steps: array[int]
    values: array[float]

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def total(self) -> float:
        """Sum of the values."""
        return fsum(self.values)

    @property
    def positive(self) -> list[int]:
        """The indices of values above 0."""
        return self.where(lambda value: value > 0)

    def where(self, condition: Callable[[float], bool]) -> list[int]:
        """The indices of values that meet a condition."""
        return [index for index, value in enumerate(self.values) if condition(value)]

    def largest(self, count: int = 1) -> list[int]:
        """The indices of the `count` largest values, ascending."""
        return sorted(sorted(range(len(self)), key=lambda index: -self.values[index])[:count])

    def at(self, indices: Iterable[int]) -> Series:
        """The series at some indices."""
        pairs = [(self.steps[index], self.values[index]) for index in indices]
        return Series(self.key, array("q", (step for step, _ in pairs)), array("d", (value for _, value in pairs)))

    def since(self, step: int) -> Series:
        """The series from a step on."""
        return self.at(index for index, logged in enumerate(self.steps) if logged >= step)

    def evidence(self, indices: Iterable[int] | None = None) -> Evidence:
        """Steps and values at some indices (None: all), at most `MAX_EVIDENCE`: first, last and evenly between."""
        shown = list(range(len(self)) if indices is None else indices)
        if len(shown) > MAX_EVIDENCE:
            stride = (len(shown) - 1) / (MAX_EVIDENCE - 1)
            shown = [shown[round(k * stride)] for k in range(MAX_EVIDENCE)]
        column = self.at(shown)
        return Evidence(self.key, tuple(column.steps), tuple(column.values))


def series(run: RunRecord, key: str) -> Series:
    """The values of a key; empty if the run does not log it."""
    return Series(key, *run.column(key))


def aligned(*columns: Series) -> list[Series]:
    """The columns at the steps that all of them have."""
    if all(column.steps == columns[0].steps for column in columns):
        return list(columns)
    common = set(columns[0].steps).intersection(*(column.steps for column in columns))
    return [column.at(i for i, step in enumerate(column.steps) if step in common) for column in columns]


def typical_deviation(values: Iterable[float], center: float) -> float:
    """Robust standard deviation about a center: 1.4826 times the median distance, which is sigma for normal variables."""
    return 1.4826 * median(abs(value - center) for value in values)
