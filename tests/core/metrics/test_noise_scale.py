"""The estimates of one window against closed forms; averages over windows: values, errors, what is absent and why, resume."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.noise_windows import (
    B_SIMPLE,
    GRAD_SQ,
    TR_SIGMA,
    Micro,
    assert_mean_is,
    constant_window,
    even_window,
    ragged_window,
    sums_of,
    window_of,
)
from trainer.metrics import noise_scale
from trainer.metrics.noise_scale import Absent, NoiseScaleAverage, PairAverage, Window, estimate
from trainer.wording import counted

LAYOUTS = [(1, 2), (1, 4), (2, 1), (2, 4), (4, 2)]


@pytest.mark.parametrize(("world_size", "num_micros"), LAYOUTS)
@pytest.mark.parametrize("draw", [even_window, ragged_window])
def test_estimates_are_unbiased(draw: Callable[..., list[list[Micro]]], world_size: int, num_micros: int) -> None:
    rng = random.Random(f"{draw.__name__} {world_size} {num_micros}")
    windows = [window_of(draw(rng, world_size, num_micros)) for _ in range(1200)]
    assert_mean_is([w.tr_sigma for w in windows], TR_SIGMA)
    assert_mean_is([w.grad_sq for w in windows], GRAD_SQ)


@pytest.mark.parametrize(("draw", "world_size", "num_micros"), [(ragged_window, 4, 3), (even_window, 1, 6)])
def test_between_and_within_are_unbiased(
    draw: Callable[..., list[list[Micro]]], world_size: int, num_micros: int
) -> None:
    rng = random.Random(7)
    windows = [window_of(draw(rng, world_size, num_micros)) for _ in range(1500)]
    assert_mean_is([w.between for w in windows if w.between is not None], TR_SIGMA)
    assert_mean_is([w.within for w in windows if w.within is not None], TR_SIGMA)


def test_the_middle_of_some_ranks_does_not_pass_for_that_of_all() -> None:
    """A rank measures none if a parameter was not used in its last micro-batch."""
    ranks = even_window(random.Random(3), 2, 4)
    sums, grad_sq = sums_of(ranks)
    alone, _ = sums_of(ranks[:1] * 2)
    for index in range(noise_scale.MIDDLE_OWN_KAPPA, noise_scale.MIDDLE_SQUARE + 1):
        sums[index] = alone[index] / 2
    window = estimate(sums, grad_sq)
    assert isinstance(window, noise_scale.Window)
    assert window.between is window.within is None


def test_an_estimate_is_never_clamped() -> None:
    sums, _ = sums_of(even_window(random.Random(0), 2, 2))
    for grad_sq, name in ((0.0, "grad_sq"), (1e6, "tr_sigma")):
        assert getattr(estimate(sums, grad_sq), name) < 0.0


def test_b_simple_is_the_true_one_within_its_standard_error() -> None:
    rng, average = random.Random(11), NoiseScaleAverage(ema=0.998)
    for _ in range(1000):
        average.update(window_of(even_window(rng, 2, 4)))
    metrics = average.metrics()
    assert abs(metrics["gns/b_simple"] - B_SIMPLE) < 4.0 * metrics["gns/b_simple_se"]
    assert metrics["gns/b_simple_se"] < 0.1 * B_SIMPLE
    assert metrics["gns/b_simple_low"] < B_SIMPLE < metrics["gns/b_simple_high"]
    assert metrics["gns/b_small"] == pytest.approx(2.0)
    assert metrics["gns/b_big"] == pytest.approx(16.0)
    assert metrics["gns/batch_ratio"] == pytest.approx(16.0 / metrics["gns/b_simple"])
    assert metrics["gns/gns_mu"] == pytest.approx(metrics["gns/b_simple"] / 4.0)
    assert metrics["gns/Bsimple_from_mu"] == pytest.approx(metrics["gns/b_simple"])
    assert metrics["gns/consistency"] == pytest.approx(1.0, abs=0.15)
    assert "gns/b_simple_tokens" not in metrics


def test_one_micro_batch_on_one_rank_is_absent_with_advice() -> None:
    average = NoiseScaleAverage()
    average.update(estimate(*sums_of(even_window(random.Random(0), 1, 1))))
    assert average.metrics() == {"gns/skipped": 0.0}
    assert "two batch sizes are compared: accumulate two" in (average.reason or "")


def with_mean_at(num_errors: float, fluctuations: list[float]) -> list[float]:
    """The fluctuations, shifted so that their average is that many of its own standard errors above zero."""
    pair = PairAverage(0.95)
    for value in fluctuations:
        pair.update(value, value)
    fit = pair.fit()
    shift = num_errors * math.sqrt(fit.covariance[0, 0]) - fit.now[0]  # the error does not depend on the mean
    return [value + shift for value in fluctuations]


@pytest.mark.parametrize(("num_errors", "is_known"), [(2.1, False), (4.0, False), (4.2, True)])
def test_a_point_needs_an_average_that_luck_does_not_explain(num_errors: float, is_known: bool) -> None:
    """Student's t with 37 degrees of freedom exceeds 4.13 once in 10,000 times."""
    rng = random.Random(3)
    average = NoiseScaleAverage(ema=0.95)
    for grad_sq in with_mean_at(num_errors, [rng.gauss(0.0, 1.0) for _ in range(100)]):
        average.update(constant_window(grad_sq=grad_sq))
    metrics = average.metrics()
    assert [key in metrics for key in ("gns/b_simple", "gns/b_simple_se", "gns/b_simple_high")] == [is_known] * 3
    assert "gns/b_simple_low" in metrics
    assert (average.reason is None) == is_known
    assert is_known or "no upper bound; it is at least" in str(average.reason)


@pytest.mark.parametrize(("num_errors", "is_capped"), [(4.0, False), (4.2, True)])
def test_consistency_is_capped_only_where_the_noise_between_ranks_is_sure(num_errors: float, is_capped: bool) -> None:
    rng = random.Random(3)
    average = NoiseScaleAverage(ema=0.95)
    for between in with_mean_at(num_errors, [rng.gauss(0.0, 1.0) for _ in range(100)]):
        average.update(constant_window(between=between, within=0.0))
    assert average.metrics().get("gns/consistency") == (noise_scale.CONSISTENCY_CAP if is_capped else None)


def test_b_simple_waits_for_enough_windows() -> None:
    average = NoiseScaleAverage()
    assert average.reason == "no window has been seen"
    for _ in range(4):
        average.update(constant_window())
    assert "gns/b_simple" not in average.metrics()
    assert average.reason == "4 of at least 5 windows had an estimate"
    average.update(constant_window())
    assert average.metrics()["gns/b_simple_low"] == pytest.approx(8.0)
    assert average.reason == "5 of at least 8 independent windows are averaged; it is at least 8 sequences"
    for _ in range(4):
        average.update(constant_window())
    assert average.metrics()["gns/b_simple"] == pytest.approx(8.0)
    assert average.reason is None


@pytest.mark.parametrize(
    ("spread", "rows", "stretches", "has_bounds"),
    [(1, 50, 1, (False, False)), (1, 9, 5, (True, False)), (4, 7, 6, (True, False)), (1, 3, 14, (True, True))],
)
def test_without_eight_independent_stretches_there_is_no_upper_bound(
    spread: int, rows: int, stretches: int, has_bounds: tuple[bool, bool]
) -> None:
    rng, average = random.Random(1), NoiseScaleAverage(ema=0.99)
    average.stretches.spread = spread
    for _ in range(40):
        average.update(constant_window(grad_sq=5.0 + rng.gauss(0.0, 0.001), rows_before=(rows - 1) / 2))
    metrics = average.metrics()
    assert tuple(f"gns/b_simple_{bound}" in metrics for bound in ("low", "high")) == has_bounds
    assert ("gns/b_simple" in metrics) == has_bounds[1]
    known = "; it is at least 8 sequences" if has_bounds[0] else ""
    averaged = f"the steps averaged are {counted(stretches, 'independent stretch')} of at least 8{known}"
    assert average.reason == (None if has_bounds[1] else f"documents have lasted about {rows} rows so far: {averaged}")


def test_averages_equal_the_textbook_form() -> None:
    """sum(w x) / sum(w) with w = ema^age, and the covariance by its deviations, stretch by stretch."""
    rng = random.Random(2)
    pairs = [(rng.gauss(3, 1), rng.gauss(-1, 2)) for _ in range(30)]
    stretches = noise_scale.Stretches()
    stretches.spread, stretches.rows = 2, 3.0
    pair = PairAverage(0.9, stretches)
    for number, (x, y) in enumerate(pairs):
        pair.update(x, y, number % 2)
    weights = [0.9**age for age in reversed(range(30))]
    weights = [w / math.fsum(weights) for w in weights]
    mean_x, mean_y = (math.fsum(w * p[i] for w, p in zip(weights, pairs, strict=True)) for i in (0, 1))
    # Three rows, two steps apart: every second step of six is a stretch.
    together = [list(range(first, first + 6, 2)) for first in (0, 1, 6, 7, 12, 13, 18, 19, 24, 25)]
    share = math.fsum(math.fsum(weights[k] for k in own) ** 2 for own in together)
    x, y = ([weights[k] * (pair[i] - mean) for k, pair in enumerate(pairs)] for i, mean in enumerate((mean_x, mean_y)))
    cov = math.fsum(sum(x[k] for k in own) * sum(y[k] for k in own) for own in together)
    fit = pair.fit()
    assert tuple(fit.now) == pytest.approx((mean_x, mean_y))
    assert fit.covariance[0, 1] == pytest.approx(cov / (1.0 - share))
    assert (fit.stretches, fit.freedom) == pytest.approx((1.0 / share, 1.0 / share - 1.0))


def test_the_bounds_are_fiellers() -> None:
    """At a bound r, the average of x - r y is as many of its own standard errors from zero as the bound says."""
    rng = random.Random(8)
    pair = PairAverage(0.9)
    for _ in range(200):
        common = rng.gauss(0.0, 0.3)
        pair.update(3.0 + common + rng.gauss(0.0, 0.2), 2.0 + 2.0 * common + rng.gauss(0.0, 0.1))
    fit = pair.fit()
    ratio = fit.ratio()
    ((var_x, cov), (_, var_y)), (mean_x, mean_y) = fit.covariance, fit.now
    distances = []
    for bound in (ratio.low, ratio.high):
        assert bound is not None
        error = math.sqrt(var_x - 2.0 * bound * cov + bound**2 * var_y)
        distances.append((mean_x - bound * mean_y) / error)
    assert distances == pytest.approx([2.1009, -4.6480], rel=5e-3)  # Student's t at 18 degrees: 97.5 % and 99.99 %


def test_resume_is_bit_exact() -> None:
    """Also of a history so long that its oldest windows are kept in blocks, and of which phase a window is."""
    rng = random.Random(4)
    windows: list[Window | Absent] = [window_of(ragged_window(rng, 2, 3), tokens=100.0 + k) for k in range(300)]
    windows = [replace(window, rows_before=k % 7) for k, window in enumerate(windows) if isinstance(window, Window)]
    windows.insert(149, Absent("x", is_fault=True))
    whole, first, second = NoiseScaleAverage(), NoiseScaleAverage(), NoiseScaleAverage()
    for each, part in ((whole, windows), (first, windows[:150])):
        each.stretches.spread = 4
        for window in part:
            each.update(window)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.stretches.spread = 4  # as the next window says
    assert second.metrics() == first.metrics()
    for window in windows[150:]:
        second.update(window)
    assert second.state_dict() == whole.state_dict()
    assert second.metrics() == whole.metrics()
    assert {phase for phase, _ in whole.state_dict()["history"]["phases"]} == {0, 1, 2, 3}


def test_a_drain_reports_each_skip_once_also_across_a_resume() -> None:
    average, resumed = NoiseScaleAverage(), NoiseScaleAverage()
    bad = Absent("x", is_fault=True)
    average.update(bad)
    assert average.drain_metrics() == {"gns/skipped": 1.0}
    average.update(bad)
    resumed.load_state_dict(average.state_dict())
    assert resumed.drain_metrics() == {"gns/skipped": 1.0}
    assert resumed.drain_metrics() == {"gns/skipped": 0.0}
    assert resumed.metrics() == {"gns/skipped": 2.0}
