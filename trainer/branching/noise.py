"""The noise scale that a run logged at a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.runs.load import RunRecord

# The estimate for the moment itself, where the run logged it; otherwise its moving average, which lags behind a drift.
ESTIMATES = ("gns/b_now", "gns/b_simple")


@dataclass(frozen=True)
class NoiseScale:
    """B in sequences, and its bounds; None: not known.

    Args:
        key: of the estimate; its bounds are `<key>_low` and `<key>_high`.
        step: of the row.
    """

    key: str
    step: int
    value: float | None
    low: float | None
    high: float | None


def noise_scale_at(run: RunRecord, step: int, *, estimates: Sequence[str] = ESTIMATES) -> NoiseScale | None:
    """That of the last row by `step` that has an estimate or a bound; None if no row has."""
    for key in estimates:
        columns = {name: dict(zip(*run.train.column(name), strict=True)) for name in (key, f"{key}_low", f"{key}_high")}
        steps = [at for column in columns.values() for at in column if at <= step]
        if steps:
            at = max(steps)
            value, low, high = (column.get(at) for column in columns.values())
            return NoiseScale(key, at, value, low, high)
    return None
