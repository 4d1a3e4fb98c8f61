"""Columns of a run reduced to what a chart can show, without hiding outliers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Values over steps. A point is one logged value, or a bucket of neighboring ones.

    Attributes:
        first, last: first and last logged step of each point [N], ascending.
        mean, low, high: over the finite values of each point [N]; equal if the point is one value.
        num_values: number of finite values in all points.
        bad_steps: steps with NaN or infinite values, which are not in the points.
    """

    first: Ints
    last: Ints
    mean: Floats
    low: Floats
    high: Floats
    num_values: int
    bad_steps: Ints

    @property
    def is_reduced(self) -> bool:
        """Whether points are buckets."""
        return self.num_values > len(self.mean)

    @property
    def is_constant(self) -> bool:
        """Whether all values are the same finite number."""
        return bool(len(self.mean)) and not len(self.bad_steps) and float(self.low.min()) == float(self.high.max())


def make_curve(steps: ArrayLike, values: ArrayLike, *, limit: int) -> Curve:
    """A curve of at most `limit` points.

    More values are put into buckets of equal width in steps. A point then has the mean, lowest and highest value of its bucket,
    so an outlier stays visible in a run of any length.

    Args:
        steps: ascending and unique [V].
        values: NaN and infinities go to `bad_steps` [V].
        limit: at least 1.
    """
    step, value = np.asarray(steps, np.int64), np.asarray(values, np.float64)
    finite = np.isfinite(value)
    bad = step[~finite]
    step, value = step[finite], value[finite]
    if len(step) <= limit:
        return Curve(step, step, value, value, value, len(step), bad)
    width = (int(step[-1]) - int(step[0]) + 1) / limit
    bucket = ((step - step[0]) / width).astype(np.int64)
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    counts = np.diff(starts, append=len(step))
    return Curve(
        first=step[starts],
        last=step[starts + counts - 1],
        # Dividing before the sum keeps values near the largest float from overflowing.
        mean=np.add.reduceat(value / np.repeat(counts, counts), starts),
        low=np.minimum.reduceat(value, starts),
        high=np.maximum.reduceat(value, starts),
        num_values=len(step),
        bad_steps=bad,
    )


def band_curve(steps: ArrayLike, middle: ArrayLike, low: ArrayLike, high: ArrayLike, *, limit: int) -> Curve | None:
    """A curve with a band around it, at steps where all three are known; None if that is nowhere.

    Args:
        steps: ascending and unique [V].
        middle, low, high: [V]; where one is not finite there is no point.
        limit: at least 1.
    """
    columns = [np.asarray(column, np.float64) for column in (middle, low, high)]
    known = np.isfinite(columns).all(axis=0)
    if not known.any():
        return None
    at = np.asarray(steps, np.int64)[known]
    curve, bottom, top = (make_curve(at, column[known], limit=limit) for column in columns)
    return replace(curve, low=bottom.mean, high=top.mean)


def running_total(values: ArrayLike) -> Floats:
    """Cumulative sum of a counter; values that are not finite count as 0."""
    value = np.asarray(values, np.float64)
    total: Floats = np.cumsum(np.where(np.isfinite(value), value, 0.0))
    return total
