"""What is reported of the noise scale covers the truth: over noise scales, numbers of windows and dimensions.

One step of m micro-batches whose examples' gradients are normal, with mean G and covariance sigma^2 I in `dim` dimensions: the
squared norm of the big gradient is a noncentral chi-squared variable, and the spread of the micro-gradients about it an
independent central one. So a window is two draws, for thousands of runs at once. Few dimensions stand for gradients whose
noise is concentrated in few directions: their square norms are skewed.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from trainer.metrics.noise_scale import PairAverage

RUNS = 1000
RATIOS = (0.5, 1.0, 10.0, 30.0, 100.0, 1000.0, 1e6)  # B over the batch, whose size is 1 here
NUM_WINDOWS = (5, 8, 20, 60, 400)
SHAPES = [(20, 8, 0.95), (300, 4, 0.95), (300, 4, 0.999), (100_000, 8, 0.95), (5, 4, 0.95)]
TOLERANCE = 3.0 * math.sqrt(0.9 * 0.1 / RUNS)


@dataclass(frozen=True)
class Shown:
    """What `RUNS` runs show of the noise scale after some windows; NaN: absent."""

    truth: float
    value: np.ndarray
    error: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @property
    def covers(self) -> np.ndarray:
        """Without both bounds nothing is said, which counts as wrong; without the upper one it is infinity."""
        return (self.low <= self.truth) & ~(self.high < self.truth)

    @property
    def has_point(self) -> np.ndarray:
        return ~np.isnan(self.value)


def simulate(rng: np.random.Generator, ratio: float, dim: int, micros: int, ema: float) -> dict[int, Shown]:
    """What runs show after each of `NUM_WINDOWS` windows."""
    first, drawn, shown = PairAverage(ema), [], {}
    variance = ratio / dim  # of a component of the big gradient; |G|^2 = 1
    for count in range(1, max(NUM_WINDOWS) + 1):
        along = (1.0 + math.sqrt(variance) * rng.standard_normal(RUNS)) ** 2
        big = along + variance * rng.chisquare(dim - 1, RUNS)
        small = big + variance * rng.chisquare(dim * (micros - 1), RUNS)
        tr_sigma = (small - big) / (micros - 1)  # V1 = micros, V3 = 1
        drawn.append((tr_sigma, big - tr_sigma))
        first.update(float(tr_sigma[0]), float(big[0] - tr_sigma[0]))
        if count in NUM_WINDOWS:
            shown[count] = read(np.array(drawn), ema, first, ratio)
    return shown


def read(pairs: np.ndarray, ema: float, first: PairAverage, truth: float) -> Shown:
    """The ratio of every run of `pairs` [windows, 2, RUNS], by the first run's fit and its formulas for all at once."""
    weights = ema ** np.arange(len(pairs))[::-1]
    weights /= weights.sum()
    now, fit, rows = np.tensordot(weights, pairs, axes=1), first.fit(), []
    deviations = weights[:, None, None] * (pairs - now)
    covariance = np.einsum("nir,njr->rij", deviations, deviations) / (1.0 - weights @ weights)
    assert np.allclose(fit.now, now[:, 0])
    assert np.allclose(fit.covariance, covariance[0])
    for run in range(RUNS):
        low, high, value, error = replace(fit, now=now[:, run], covariance=covariance[run]).ratio()
        rows.append([math.nan if x is None else x for x in (value, error, low, high)])
    return Shown(truth, *np.array(rows).T)


@pytest.fixture(scope="module")
def everything() -> list[tuple[str, Shown]]:
    rng = np.random.default_rng(14)
    found = []
    for (dim, micros, ema), ratio in itertools.product(SHAPES, RATIOS):
        for count, shown in simulate(rng, ratio, dim, micros, ema).items():
            found.append((f"B/batch {ratio:g}, {count} windows, {dim} dimensions, m = {micros}, ema {ema}", shown))
    return found


def failures(checked: list[tuple[str, float]], low: float, high: float = 1.0) -> list[str]:
    assert len(checked) > 20, "the test has no power"
    return [f"{what}: {share:.4f}" for what, share in checked if not low <= share <= high]


def test_the_interval_covers_the_truth_in_90_to_99_percent_everywhere(everything: list[tuple[str, Shown]]) -> None:
    shares = [(what, float(shown.covers.mean())) for what, shown in everything]
    assert not failures(shares, 0.90, 0.99 + TOLERANCE / 3)
    assert not failures([(what, share) for what, share in shares if "5 dimensions" not in what], 0.945)


def test_a_point_is_shown_only_where_its_interval_and_two_errors_cover(everything: list[tuple[str, Shown]]) -> None:
    """Also given that it is shown: selection does not spoil it."""
    often = [(what, shown) for what, shown in everything if shown.has_point.mean() >= 0.05]
    by_bounds = [(what, float(shown.covers[shown.has_point].mean())) for what, shown in often]
    assert not failures(by_bounds, 0.90 - TOLERANCE)
    by_errors = [
        (what, float((abs(shown.value - shown.truth) <= 2.0 * shown.error)[shown.has_point].mean()))
        for what, shown in often
    ]
    assert not failures(by_errors, 0.90 - TOLERANCE)


def test_lucky_windows_show_no_point_that_excludes_the_truth(everything: list[tuple[str, Shown]]) -> None:
    """However rarely points are shown: the truth is above the upper bound in about one of 10,000 windows."""
    wrong = [(what, int((shown.high < shown.truth).sum())) for what, shown in everything]
    assert max(count for _, count in wrong) <= 4, max(wrong, key=lambda item: item[1])
    assert sum(count for _, count in wrong) <= 2e-4 * RUNS * len(wrong)


def test_points_are_shown_where_the_data_determine_them(everything: list[tuple[str, Shown]]) -> None:
    """The opposite error: an interval that is never bounded covers everything."""
    shares = {what: float(shown.has_point.mean()) for what, shown in everything}
    assert shares["B/batch 1, 20 windows, 20 dimensions, m = 8, ema 0.95"] > 0.9
    assert shares["B/batch 10, 60 windows, 300 dimensions, m = 4, ema 0.95"] > 0.8
    assert shares["B/batch 30, 400 windows, 300 dimensions, m = 4, ema 0.999"] > 0.9
    assert shares["B/batch 100, 60 windows, 100000 dimensions, m = 8, ema 0.95"] > 0.9
