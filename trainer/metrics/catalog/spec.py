"""The type of a catalog row: the meaning of one metric key and how its values are reduced."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Literal

Kind = Literal["gauge", "counter", "flag"]
WindowReduction = Literal["mean", "weighted_mean", "sum", "max", "min", "last"]
# Lowest and highest healthy value; None if that side is unbounded.
Band = tuple[float | None, float | None]
RankReduction = Literal["mean", "weighted_mean", "sum", "min", "max", "sum_and_worst"]


@dataclass(frozen=True)
class MetricSpec:
    """One key, or one pattern with parts in angle brackets (`objective/<name>`).

    Attributes:
        name: the key in a payload, or the pattern.
        unit: unit of the value; empty for a pure number.
        kind: gauge (a level), counter (accumulates) or flag (0 or 1).
        window: reduction over several micro-steps or steps.
        ranks: reduction over ranks; `sum_and_worst` gives the largest rank's value as `<key>_max`,
            too.
        description: the meaning, in a sentence.
        healthy: the values of a good run.
        pathological: those of a bad run, and the likely cause.
        group: heading in documents and charts.
        title: label of the chart.
        band: the healthy range, if it is the same for every run; charts shade it.
        has_error: its standard error is `<key>_se`.
    """

    description: str
    healthy: str
    pathological: str
    _: KW_ONLY
    name: str
    unit: str = ""
    kind: Kind = "gauge"
    window: WindowReduction = "mean"
    ranks: RankReduction = "mean"
    group: str
    title: str
    band: Band | None = None
    has_error: bool = False

    @property
    def is_pattern(self) -> bool:
        return "<" in self.name


def row_of(name: str, title: str, **settings: Any) -> partial[MetricSpec]:
    """A row without texts: `row_of(name, title, unit=...)(description, healthy, pathological)`."""
    return partial(MetricSpec, name=name, title=title, **settings)
