"""The error of a mean over sampled units, such as documents."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from trainer.metrics.noise_scale import t_quantile

FEWEST_UNITS = 5
"""Fewer sampled units, documents for example, say too little about the error of their mean."""


class Moments(NamedTuple):
    """A weighted mean over sampled units in the making, with the sums for its standard error.

    Unit i has a total y_i and a weight w_i. The mean is R = sum(y) / sum(w), a ratio of two sums
    that both vary from sample to sample, and its standard error sqrt(n / (n - 1) sum((y - R w)^2))
    / sum(w) (Cochran, Sampling Techniques, 3rd ed. 1977, section 6.4). With equal weights it is
    that of an ordinary mean.
    """

    num: float  # of units, n
    total: float  # sum of y
    weight: float  # sum of w
    total_sq: float  # sum of y^2
    cross: float  # sum of y w
    weight_sq: float  # sum of w^2

    @classmethod
    def of(cls, totals: Any, weights: Any) -> Moments:
        """Moments of units, float64 arrays or tensors [n]; those of weight 0 do not count."""
        is_unit = weights != 0
        totals, weights = totals[is_unit], weights[is_unit]
        sums = (totals, weights, totals * totals, totals * weights, weights * weights)
        return cls(len(totals), *(float(each.sum()) for each in sums))

    def mean(self) -> float:
        """R; NaN without units."""
        return self.total / self.weight if self.num else math.nan

    def wide_error(self) -> float:
        """An error of R that holds for few units of unequal weight: by their effective number (Kish
        1965), and widened by Student's t so that 1.96 of it cover 95 %. NaN for fewer units than
        `FEWEST_UNITS`, or than two effective ones."""
        num, effective = self.num, self.weight**2 / max(self.weight_sq, 1e-300)
        if num < FEWEST_UNITS or effective < 2:
            return math.nan
        ratio = self.mean()
        squares = self.total_sq - 2 * ratio * self.cross + ratio * ratio * self.weight_sq
        squares = max(squares, 0.0)  # it may be below by rounding; a NaN stays one
        error = math.sqrt(squares * num / (num - 1)) / self.weight
        error *= math.sqrt((num - 1) / num * effective / (effective - 1))
        return error * t_quantile(1.96, effective - 1) / 1.96
