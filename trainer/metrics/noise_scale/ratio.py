"""Ratios of two noisy averages with bounds, and the noise scale as it is now. Floats in, floats out.

The bounds of `bounded_ratio` hold however badly the denominator is known. `History` reads S and |G|^2 off at the last step:
an average over past steps lags behind a process that drifts, and its standard error does not show it; a straight line fitted to
the past does not lag, as long as the window is short enough for a line, which the data decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Normal quantiles of the two bounds of a ratio. The upper one is strict because a point is reported only where it exists: a
# run looks hundreds of times, and at 97.5 % too, the few luckiest windows would report a B far too small, with a bound that
# excludes the truth.
LOW_QUANTILE = 1.96  # the ratio is below the lower bound in 2.5 % of all windows
HIGH_QUANTILE = 3.72  # the ratio is above the upper bound in 0.01 % of all windows
BLOCKS = 32  # of one length, before two of them become one of twice that length
MIN_WINDOWS = 8  # a line has two parameters, and the scatter about it has to be known
GROWTH = 1.4  # of the window from one candidate to the next
TOLERANCE = 2.0  # normal quantile by which the fits over all shorter windows must agree with a window's
ROUNDING = 1e-9  # relative difference that says nothing
SHORTENED = 0.5  # share of the longest window without visible curvature that is used


class Ratio(NamedTuple):
    """A ratio of two averages and its bounds; None is a bound, or a value, that the data do not determine."""

    low: float | None
    high: float | None = None
    value: float | None = None
    """None without an upper bound."""
    error: float | None = None
    """Distance of value and upper bound in units of the bound's quantile: the standard error by the delta method where y is
    known well, more where it is not, where that method is too small."""


def bounded_ratio(x: float, y: float, var_x: float, var_y: float, cov: float, *, freedom: float) -> Ratio:
    """x / y with bounds by Fieller (1954), "Some problems in interval estimation".

    The bounds are the ratios r for which `x - r y` is t_low above or t_high below zero, in its own standard errors: no division
    by y, so that they hold for any y, also one that is not told from zero. A noise scale is not negative, so the part of the
    confidence set below zero is left out.

    Args:
        x, y: unbiased and about normal.
        var_x, var_y, cov: their estimated variances and covariance.
        freedom: degrees of freedom of these.
    """
    # The roots of a r^2 - 2 b r + k are the r at which `x - r y` is t of its errors away from zero; b^2 - a k is written
    # without cancellation.
    spread = x * x * var_y - 2.0 * x * y * cov + y * y * var_x
    product = var_x * var_y - cov * cov
    t = t_quantile(LOW_QUANTILE, freedom)
    low: float | None = 0.0
    k = x * x - t * t * var_x
    if x > 0.0 and k > 0.0:
        divisor = x * y - t * t * cov + t * math.sqrt(max(spread - t * t * product, 0.0))
        low = k / divisor if divisor > 0.0 else None
    if not is_positive(y, var_y, freedom):
        return Ratio(low)
    t = t_quantile(HIGH_QUANTILE, freedom)
    root = t * math.sqrt(max(spread - t * t * product, 0.0))
    high = (x * y - t * t * cov + root) / (y * y - t * t * var_y)
    return Ratio(low, high, x / y, (high - x / y) / t)


def is_positive(value: float, variance: float, freedom: float) -> bool:
    """Whether an estimate with this variance is above zero, by the strict test that the upper bound needs."""
    t = t_quantile(HIGH_QUANTILE, freedom)
    return value > 0.0 and value * value > t * t * variance


def t_quantile(z: float, freedom: float) -> float:
    """Quantile of Student's t where the normal one is z: inverse of Wallace (1959), 0.5 % (z = 1.96) and 6 % (3.72) too
    large at 4 degrees of freedom, exact for many."""
    exponent = (z * (8.0 * freedom + 3.0) / (8.0 * freedom + 1.0)) ** 2 / freedom
    return math.sqrt(freedom * math.expm1(min(exponent, 700.0)))  # a tiny `ema` would overflow


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
        blocks: list[tuple[float, ...]] = []
        for level, sums in enumerate(self._levels):
            for x, y in reversed(sums):
                blocks.append((1 << level, x, y))
        if not blocks:
            return
        size, *totals = np.array(blocks, dtype=np.float64).T  # newest first
        ends = np.cumsum(size)
        age = ends - 0.5 * (size + 1.0)  # of a block's middle; the last step's is 0
        means = np.stack(totals, axis=1) / size[:, None]  # [blocks, 2]
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
