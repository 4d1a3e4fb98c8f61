"""Columns of a run made small enough to draw, without hiding what was in them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Values over steps, each point one logged value, or one bucket of neighbouring ones.

    Attributes:
        first, last: first and last logged step of each point [N], ascending.
        mean, low, high: of the finite values of each point [N]; all the same where a point is one value.
        num_values: finite values behind the points.
        bad_steps: steps whose value was NaN or infinite; they are not in the points.
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
        """Whether points stand for more than one value."""
        return self.num_values > len(self.mean)

    @property
    def is_constant(self) -> bool:
        """Whether every value is the same finite number."""
        return bool(len(self.mean)) and not len(self.bad_steps) and float(self.low.min()) == float(self.high.max())


def make_curve(steps: ArrayLike, values: ArrayLike, *, limit: int) -> Curve:
    """A curve of at most `limit` points.

    Up to `limit` values are kept as they are. More are put into buckets of equal width in steps, and each gives the mean, the
    lowest and the highest of its values: a single outlier stays visible, whatever the number of steps.

    Args:
        steps: ascending, each once.
        values: as many; NaN and infinities are listed, not drawn.
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
        mean=_means(value, starts, counts),
        low=np.minimum.reduceat(value, starts),
        high=np.maximum.reduceat(value, starts),
        num_values=len(step),
        bad_steps=bad,
    )


def _means(value: Floats, starts: Ints, counts: Ints) -> Floats:
    """Means of the buckets; divided first, so that values near the largest float do not overflow."""
    return np.add.reduceat(value / np.repeat(counts, counts), starts)


def running_total(values: ArrayLike) -> list[float]:
    """The sum of a counter up to each of its rows; what is not finite counts as nothing."""
    value = np.asarray(values, np.float64)
    return [float(total) for total in np.cumsum(np.where(np.isfinite(value), value, 0.0))]
