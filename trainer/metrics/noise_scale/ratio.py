"""The ratio of two estimates, with bounds that hold however badly the denominator is known. Floats in, floats out."""

from __future__ import annotations

import math
from typing import NamedTuple

# Normal quantiles of the two bounds of a ratio. The upper one is strict because a point is reported only where it exists: a
# run looks hundreds of times, and at 97.5 % too, the few luckiest windows would report a B far too small, with a bound that
# excludes the truth.
LOW_QUANTILE = 1.96  # the ratio is below the lower bound in 2.5 % of all windows
HIGH_QUANTILE = 3.72  # the ratio is above the upper bound in 0.01 % of all windows


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
