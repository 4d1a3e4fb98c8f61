"""The noise scale as it is now, from a history of S and |G|^2 that both drift.

An average over past steps lags behind a process that drifts, and its standard error does not say so. A straight line that is
fitted to the past and read off at the last step does not lag, as long as the window is short enough for a line. How short
that is, the data say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.metrics.noise_scale.ratio import Ratio, bounded_ratio, t_quantile

BLOCKS = 32  # of one length, before two of them become one of twice that length
MIN_WINDOWS = 8  # a line has two parameters, and the scatter about it has to be known
GROWTH = 1.4  # of the window from one candidate to the next
TOLERANCE = 2.0  # normal quantile by which the fits over all shorter windows must agree with a window's
ROUNDING = 1e-9  # relative difference that says nothing
SHORTENED = 0.5  # share of the longest window without visible curvature that is used


class Current(NamedTuple):
    """The noise scale at the last step."""

    ratio: Ratio
    steps: int
    """Windows that it was computed from: the last ones with an estimate."""


@dataclass(frozen=True)
class _Fit:
    """x and y at the last step by a line over the last `steps` windows."""

    steps: int
    now: NDArray[np.float64]
    """[2]"""
    covariance: NDArray[np.float64]
    """[2, 2] of `now`."""
    freedom: float


class History:
    """Pairs (x, y) of all steps: the latest singly, older ones in sums over 2, 4, 8, ... steps.

    At most `BLOCKS` sums of each length are kept, so that its size grows with the logarithm of the steps.
    """

    def __init__(self) -> None:
        self._levels: list[list[tuple[float, float]]] = [[]]  # sums over 2^level steps, oldest first

    def add(self, x: float, y: float) -> None:
        """Add the next step's pair."""
        block = (x, y)
        for level in self._levels:
            level.append(block)
            if len(level) <= BLOCKS:
                return
            (x0, y0), (x1, y1) = level.pop(0), level.pop(0)
            block = (x0 + x1, y0 + y1)
        self._levels.append([block])

    def current(self) -> Current | None:
        """x / y at the last step with its bounds; None before `MIN_WINDOWS` pairs."""
        fits = list(self._fits())
        if not fits:
            return None
        longest = longest_straight(fits)
        enough = max(SHORTENED * longest.steps, fits[0].steps)
        # Half of it: curvature that is just not visible would still shift the line's end by about its standard error. It grows
        # with the square of the window.
        fit = max((fit for fit in fits if fit.steps <= enough), key=lambda fit: fit.steps)
        (x, y), ((var_x, cov), (_, var_y)) = fit.now.tolist(), fit.covariance.tolist()
        return Current(bounded_ratio(x, y, var_x, var_y, cov, freedom=fit.freedom), fit.steps)

    def _fits(self) -> Iterator[_Fit]:
        """Fits over longer and longer windows that end at the last step.

        Weighted least squares, and the heteroscedasticity-consistent covariance HC3 (MacKinnon and White 1985): the noise of
        both series changes with their size. The degrees of freedom are Satterthwaite's, for equal noise in every step.
        """
        blocks = [(1 << level, *block) for level, sums in enumerate(self._levels) for block in reversed(sums)]
        if not blocks:
            return
        size, *sums = np.array(blocks, dtype=np.float64).T  # newest first
        ends = np.cumsum(size)
        age = ends - 0.5 * (size + 1.0)  # of a block's middle; the last step's is 0
        means = np.stack(sums, axis=1) / size[:, None]  # [blocks, 2]
        wanted = float(MIN_WINDOWS)
        while wanted < GROWTH * ends[-1]:
            k = min(int(np.searchsorted(ends, wanted)) + 1, len(ends))
            wanted *= GROWTH
            if ends[k - 1] < MIN_WINDOWS:
                continue
            w, a, z = size[:k], age[:k], means[:k]
            share = w / w.sum()
            centre = a - share @ a
            spread = (w * centre) @ centre
            tilt = w * centre / spread
            weight = share - tilt * (share @ a)  # of each block in the value at age 0
            now, slope = weight @ z, tilt @ z
            leverage = share + tilt * centre
            residual = weight[:, None] * (z - now - a[:, None] * slope) / (1.0 - leverage)[:, None]
            parts = weight**2 / w
            freedom = max(parts.sum() ** 2 / (parts @ parts) - 2.0, 1.0)
            yield _Fit(int(ends[k - 1]), now, residual.T @ residual, float(freedom))

    def state_dict(self) -> list[list[list[float]]]:
        """All sums, as plain floats."""
        return [[list(block) for block in level] for level in self._levels]

    def load_state_dict(self, state: Sequence[Sequence[Sequence[float]]]) -> None:
        """Restore a saved state exactly."""
        self._levels = [[(float(x), float(y)) for x, y in level] for level in state] or [[]]


def longest_straight(fits: Sequence[_Fit]) -> _Fit:
    """The longest window whose fit agrees with those over all shorter ones, in x and in y.

    By the intersection of confidence intervals (Goldenshluger and Nemirovski 1997, "On spatially adaptive estimation of
    nonparametric regression"): as long as the intervals of all windows up to this one have a point in common, curvature has
    not yet shifted the fit visibly.
    """
    low, high = np.full(2, -math.inf), np.full(2, math.inf)
    longest = fits[0]
    for fit in fits:
        margin = t_quantile(TOLERANCE, fit.freedom) * np.sqrt(np.diag(fit.covariance)) + ROUNDING * abs(fit.now)
        low, high = np.maximum(low, fit.now - margin), np.minimum(high, fit.now + margin)
        if (low > high).any():
            break
        longest = fit
    return longest
