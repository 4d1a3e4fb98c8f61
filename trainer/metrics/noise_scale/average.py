"""Exponential averages of two series with the covariance of the averages, for a ratio with a standard error."""

from __future__ import annotations

import math
from collections.abc import Mapping

MIN_PAIRS = 5  # fewer pairs say too little about their own spread for a standard error


class PairAverage:
    """Bias-corrected exponential averages of x and y with the covariance of the two averages.

    The averages are weighted means with weights `ema ** age`, kept in the form that has no cancellation (West 1979):
    the bias correction is the division by the sum of the weights.
    """

    FIELDS = ("weight", "weight_sq", "mean_x", "mean_y", "c_xx", "c_yy", "c_xy", "count")

    def __init__(self, ema: float) -> None:
        self._ema = ema
        self.weight = self.weight_sq = 0.0
        self.mean_x = self.mean_y = 0.0
        self.c_xx = self.c_yy = self.c_xy = 0.0
        self.count = 0.0

    def update(self, x: float, y: float) -> None:
        """Take one more pair."""
        fresh = 1.0 - self._ema
        self.weight = self._ema * self.weight + fresh
        self.weight_sq = self._ema**2 * self.weight_sq + fresh**2
        dx, dy = x - self.mean_x, y - self.mean_y
        self.mean_x += fresh / self.weight * dx
        self.mean_y += fresh / self.weight * dy
        self.c_xx = self._ema * self.c_xx + fresh * dx * (x - self.mean_x)
        self.c_yy = self._ema * self.c_yy + fresh * dy * (y - self.mean_y)
        self.c_xy = self._ema * self.c_xy + fresh * dx * (y - self.mean_y)
        self.count += 1.0

    def covariance(self) -> tuple[float, float, float] | None:
        """Variance of the average of x, of y, and their covariance; None before `MIN_PAIRS` pairs."""
        if self.count < MIN_PAIRS:
            return None
        share = self.weight_sq / self.weight**2  # sum of the squared weights: 1 / (effective number of pairs)
        scale = share / (1.0 - share) / self.weight
        return self.c_xx * scale, self.c_yy * scale, self.c_xy * scale

    def ratio(self) -> tuple[float, float] | None:
        """x / y of the averages and its standard error by the delta method; None while y is within 2 errors of 0."""
        moments = self.covariance()
        if moments is None or self.mean_y <= 2.0 * math.sqrt(moments[1]):
            return None
        var_x, var_y, cov = moments
        value = self.mean_x / self.mean_y
        variance = (var_x - 2.0 * value * cov + value * value * var_y) / self.mean_y**2
        return value, math.sqrt(max(variance, 0.0))

    def state_dict(self) -> dict[str, float]:
        """Plain floats."""
        return {name: float(getattr(self, name)) for name in self.FIELDS}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue exactly where `state_dict` was taken."""
        for name in self.FIELDS:
            setattr(self, name, float(state[name]))
