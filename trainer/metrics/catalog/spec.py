"""The type of a catalog row: what one metric key means and how its values are put together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter", "flag"]
WindowReduction = Literal["mean", "weighted_mean", "sum", "max", "min", "last"]
# Lowest and highest healthy value; None where that side is open.
Band = tuple[float | None, float | None]
RankReduction = Literal["mean", "weighted_mean", "sum", "min", "max", "sum_and_worst"]


@dataclass(frozen=True, kw_only=True)
class MetricSpec:
    """One key, or one pattern with parts in angle brackets (`objective/<name>`).

    Attributes:
        name: the key as it stands in a payload, or the pattern.
        unit: unit of the value; empty for a pure number.
        kind: gauge (a level), counter (adds up) or flag (0 or 1).
        window: how the values of several micro-steps or steps become one.
        ranks: how the values of several ranks become one; `sum_and_worst` gives the total under the key and the
            largest rank under `<key>_max`.
        description: what it means, in a sentence.
        healthy: what a good run shows.
        pathological: what a bad run shows, and what it hints at.
        group: heading under which documents and charts put it.
        title: label of its chart.
        precision: digits after the point in text.
        band: the healthy values in numbers, where they are the same for every run; charts shade it.
    """

    name: str
    unit: str
    kind: Kind = "gauge"
    window: WindowReduction = "mean"
    ranks: RankReduction = "mean"
    description: str
    healthy: str
    pathological: str
    group: str
    title: str
    precision: int = 4
    band: Band | None = None

    @property
    def is_pattern(self) -> bool:
        """Whether the name stands for many keys."""
        return "<" in self.name
