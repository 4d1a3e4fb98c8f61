"""The estimator's arithmetic against closed forms: a linear loss has the gradient mu + sigma * noise."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.errors import UserError
from trainer.metrics import noise_scale
from trainer.metrics.noise_scale import Absent, NoiseScaleAverage, Window, estimate
from trainer.metrics.pair_average import PairAverage

DIM = 20
MEAN = [0.5] * DIM
GRAD_SQ = 5.0
SIGMA = math.sqrt(2.0)
TR_SIGMA = DIM * 2.0
B_SIMPLE = 8.0

Micro = tuple[list[float], float, float]  # gradient of the mean loss, kappa, v
Vector = list[float]


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def weighted_sum(vectors: Sequence[Vector], weights: Sequence[float]) -> Vector:
    return [dot(column, weights) for column in zip(*vectors, strict=True)]


def draw_micro(rng: random.Random, weights: Sequence[float], kappa: float) -> Micro:
    """A micro-batch of independent examples with these weights, drawn by its exact distribution."""
    noise = sum(w * w for w in weights) / sum(weights) ** 2
    return [mu + SIGMA * math.sqrt(noise) * rng.gauss(0.0, 1.0) for mu in MEAN], kappa, noise


def sums_of(ranks: Sequence[Sequence[Micro]], tokens: float = 0.0) -> tuple[list[float], float]:
    """The reduced sums and the big square norm of a window, by their definitions."""
    sums = [0.0] * noise_scale.NUM_SUMS
    accumulated: list[Vector] = []
    for micros in ranks:
        for gradient, kappa, noise in micros:
            sums[noise_scale.KAPPA] += kappa
            sums[noise_scale.SMALL_SQUARE] += kappa * dot(gradient, gradient)
            sums[noise_scale.SMALL_NOISE] += kappa * noise
            sums[noise_scale.BIG_NOISE] += kappa**2 * noise
        middle = micros if len(ranks) > 1 else micros[: (len(micros) + 1) // 2]
        total = sum(kappa for _, kappa, _ in middle)
        own = weighted_sum([g for g, _, _ in middle], [kappa for _, kappa, _ in middle])
        sums[noise_scale.MIDDLE_KAPPA] += total
        sums[noise_scale.MIDDLE_SQUARE] += dot(own, own) / total
        sums[noise_scale.MIDDLE_NOISE] += sum(kappa**2 * noise for _, kappa, noise in middle) / total
        sums[noise_scale.RANKS] += 1.0
        accumulated.append(weighted_sum([g for g, _, _ in micros], [kappa for _, kappa, _ in micros]))
    sums[noise_scale.TOKENS] = tokens
    averaged = weighted_sum(accumulated, [1.0 / len(ranks)] * len(ranks))
    return sums, dot(averaged, averaged)


def even_window(rng: random.Random, world_size: int, num_micros: int, examples: int = 2) -> list[list[Micro]]:
    weights = [1.0] * examples
    return [[draw_micro(rng, weights, 1.0 / num_micros) for _ in range(num_micros)] for _ in range(world_size)]


def ragged_window(rng: random.Random, world_size: int, num_micros: int) -> list[list[Micro]]:
    """As the trainer does it: kappa is a constant times the micro-batch's tokens."""
    ranks = []
    for _ in range(world_size):
        all_weights = [[rng.choice((1.0, 3.0, 40.0)) for _ in range(rng.choice((1, 2, 5)))] for _ in range(num_micros)]
        ranks.append([draw_micro(rng, weights, 0.003 * sum(weights)) for weights in all_weights])
    return ranks


def window_of(ranks: Sequence[Sequence[Micro]], tokens: float = 0.0) -> Window:
    sums, grad_sq = sums_of(ranks, tokens)
    window = estimate(sums, grad_sq)
    assert isinstance(window, Window), window
    return window


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))


def assert_mean_is(values: Sequence[float], expected: float) -> None:
    mean, error = mean_and_error(values)
    assert abs(mean - expected) < 5.0 * error, f"{mean} +- {error}, expected {expected}"
    assert error < 0.1 * abs(expected), "the test has no power"


def constant_window(tr_sigma: float = 40.0, grad_sq: float = 5.0, **changes: float) -> Window:
    fields = {"between": tr_sigma, "within": tr_sigma, "small_noise": 0.5, "big_noise": 1 / 16, "num_tokens": 0.0}
    return Window(tr_sigma=tr_sigma, grad_sq=grad_sq, world_size=2, **{**fields, **changes})


LAYOUTS = [(1, 2), (1, 4), (2, 1), (2, 4), (4, 2)]


@pytest.mark.parametrize(("world_size", "num_micros"), LAYOUTS)
@pytest.mark.parametrize("draw", [even_window, ragged_window])
def test_estimates_are_unbiased(draw: Callable[..., list[list[Micro]]], world_size: int, num_micros: int) -> None:
    rng = random.Random(f"{draw.__name__} {world_size} {num_micros}")
    windows = [window_of(draw(rng, world_size, num_micros)) for _ in range(1200)]
    assert_mean_is([w.tr_sigma for w in windows], TR_SIGMA)
    assert_mean_is([w.grad_sq for w in windows], GRAD_SQ)


def test_between_and_within_are_unbiased_on_several_ranks() -> None:
    rng = random.Random(7)
    windows = [window_of(ragged_window(rng, 4, 3)) for _ in range(1500)]
    assert_mean_is([w.between for w in windows if w.between is not None], TR_SIGMA)
    assert_mean_is([w.within for w in windows if w.within is not None], TR_SIGMA)


def averaged(ranks_of: Callable[[random.Random], list[list[Micro]]], steps: int = 1000) -> dict[str, float]:
    rng = random.Random(11)
    average = NoiseScaleAverage(ema=0.998)
    for _ in range(steps):
        average.update(window_of(ranks_of(rng)))
    return average.metrics()


def test_b_simple_is_the_true_one_within_its_standard_error() -> None:
    metrics = averaged(lambda rng: even_window(rng, 2, 4))
    assert abs(metrics["gns/b_simple"] - B_SIMPLE) < 4.0 * metrics["gns/b_simple_se"]
    assert metrics["gns/b_simple_se"] < 0.1 * B_SIMPLE
    assert metrics["gns/b_small"] == pytest.approx(2.0)
    assert metrics["gns/b_big"] == pytest.approx(16.0)
    assert metrics["gns/batch_ratio"] == pytest.approx(16.0 / metrics["gns/b_simple"])
    assert metrics["gns/gns_mu"] == pytest.approx(metrics["gns/b_simple"] / 4.0)
    assert metrics["gns/Bsimple_from_mu"] == pytest.approx(metrics["gns/b_simple"])
    assert metrics["gns/consistency"] == pytest.approx(1.0, abs=0.15)
    assert "gns/b_simple_tokens" not in metrics


def test_coverage_of_the_standard_error() -> None:
    rng = random.Random(5)
    hits = trials = 0
    for _ in range(100):
        average = NoiseScaleAverage(ema=0.95)
        for _ in range(60):
            average.update(window_of(even_window(rng, 2, 4, examples=4)))
        metrics = average.metrics()
        if "gns/b_simple" in metrics:
            trials += 1
            hits += abs(metrics["gns/b_simple"] - B_SIMPLE) < 1.96 * metrics["gns/b_simple_se"]
    assert trials >= 95
    assert 0.87 <= hits / trials <= 1.0


def mistake_increments_keep_their_factor(sums: list[float], grad_sq: float) -> list[float]:
    """(a) increments carry 1/m while the big gradient is their sum (m = 4)."""
    changed = list(sums)
    changed[noise_scale.SMALL_SQUARE] /= 16.0
    return changed


def mistake_unit_is_the_global_micro(sums: list[float], grad_sq: float) -> list[float]:
    """(c) the norms of b examples are taken for those of W * b examples (W = 2)."""
    changed = list(sums)
    changed[noise_scale.SMALL_NOISE] /= 2.0
    return changed


def mistake_noise_in_the_big_norm(sums: list[float], grad_sq: float) -> list[float]:
    """(d) the big norm is taken for |G|^2 itself."""
    changed = list(sums)
    changed[noise_scale.BIG_NOISE] = 1e-12
    return changed


def test_the_textbook_mistakes_are_far_off() -> None:
    """The true answer is 8.00; each mistake must be outside what the estimator's own test allows."""
    mistakes = [
        mistake_increments_keep_their_factor,
        mistake_unit_is_the_global_micro,
        mistake_noise_in_the_big_norm,
    ]
    for mistake in mistakes:
        rng = random.Random(11)
        average = NoiseScaleAverage(ema=0.998)
        for _ in range(600):
            sums, grad_sq = sums_of(even_window(rng, 2, 4))
            window = estimate(mistake(sums, grad_sq), grad_sq)
            assert isinstance(window, Window)
            average.update(window)
        ratio = average._noise.mean_x / average._noise.mean_y
        assert abs(ratio - B_SIMPLE) > 1.5, mistake.__doc__


def test_an_increment_taken_across_the_reduction_is_far_off() -> None:
    """(b) the last increment is the reduced gradient less the rank's sum before it."""
    rng = random.Random(3)
    average = NoiseScaleAverage(ema=0.998)
    for _ in range(600):
        ranks = even_window(rng, 2, 4)
        sums, grad_sq = sums_of(ranks)
        means = [weighted_sum([g for g, _, _ in micros], [k for _, k, _ in micros]) for micros in ranks]
        reduced = weighted_sum(means, [0.5, 0.5])
        for micros in ranks:
            *before, (last, kappa, _) = micros
            seen = weighted_sum([reduced, *[g for g, _, _ in before]], [1.0, *[-k for _, k, _ in before]])
            sums[noise_scale.SMALL_SQUARE] += dot(seen, seen) / kappa - kappa * dot(last, last)
        window = estimate(sums, grad_sq)
        assert isinstance(window, Window)
        average.update(window)
    assert abs(average._noise.mean_x / average._noise.mean_y - B_SIMPLE) > 1.5


@settings(max_examples=30, derandomize=True, deadline=None)
@given(seed=st.integers(0, 10_000), world_size=st.sampled_from([1, 2, 4, 8]))
def test_layout_does_not_change_the_estimate(seed: int, world_size: int) -> None:
    """Eight ragged micro-batches on 1 rank, or the same eight on 2, 4 or 8."""
    (micros,) = ragged_window(random.Random(seed), 1, 8)
    share = 8 // world_size
    ranks = [micros[r * share : (r + 1) * share] for r in range(world_size)]
    one, several = window_of([micros]), window_of(ranks)
    assert several.tr_sigma == pytest.approx(one.tr_sigma, rel=1e-9, abs=1e-9)
    assert several.grad_sq == pytest.approx(one.grad_sq, rel=1e-9, abs=1e-9)
    assert (several.small_noise, several.big_noise) == pytest.approx((one.small_noise, one.big_noise))


@settings(max_examples=30, derandomize=True, deadline=None)
@given(seed=st.integers(0, 10_000), factor=st.floats(1e-6, 1e6))
def test_the_scale_of_the_loss_cancels(seed: int, factor: float) -> None:
    ranks = ragged_window(random.Random(seed), 2, 3)
    scaled = [[(g, kappa * factor, noise) for g, kappa, noise in micros] for micros in ranks]
    assert window_of(scaled).tr_sigma == pytest.approx(window_of(ranks).tr_sigma, rel=1e-6, abs=1e-6)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(seed=st.integers(0, 100_000), world_size=st.integers(1, 4), num_micros=st.integers(1, 4))
def test_weighting_by_kappa_orders_the_noise_factors(seed: int, world_size: int, num_micros: int) -> None:
    sums, _ = sums_of(ragged_window(random.Random(seed), world_size, num_micros))
    kappa = sums[noise_scale.KAPPA]
    small, big = sums[noise_scale.SMALL_NOISE] / kappa, sums[noise_scale.BIG_NOISE] / kappa**2
    assert big <= small * (1.0 + 1e-12)
    if world_size > 1:
        middle = sums[noise_scale.MIDDLE_NOISE] / sums[noise_scale.MIDDLE_KAPPA]
        assert big <= middle * (1.0 + 1e-12)
        assert middle <= small * (1.0 + 1e-12)


def test_a_divided_gradient_needs_the_factor_one() -> None:
    ranks = ragged_window(random.Random(1), 2, 2)
    sums, grad_sq = sums_of(ranks)
    factor = sums[noise_scale.KAPPA] / 2.0
    divided = estimate(sums, grad_sq / factor**2, grad_factor=1.0)
    assert isinstance(divided, Window)
    assert divided.tr_sigma == pytest.approx(window_of(ranks).tr_sigma)


def test_ranks_with_the_same_data_have_consistency_zero() -> None:
    metrics = averaged(lambda rng: even_window(rng, 1, 4) * 2, steps=400)
    assert metrics["gns/consistency"] == pytest.approx(0.0, abs=0.05)


def test_a_micro_batch_used_again_and_again_has_consistency_at_the_cap() -> None:
    def reused(rng: random.Random) -> list[list[Micro]]:
        return [[micro] * 4 for (micro,) in even_window(rng, 2, 1)]

    assert averaged(reused, steps=400)["gns/consistency"] == noise_scale.CONSISTENCY_CAP


@pytest.mark.parametrize("draw", [even_window, ragged_window])
def test_one_rank_compares_half_the_window_with_the_whole(draw: Callable[..., list[list[Micro]]]) -> None:
    metrics = averaged(lambda rng: draw(rng, 1, 6), steps=1500)
    assert metrics["gns/consistency"] == pytest.approx(1.0, abs=0.2)


def test_halves_with_the_same_data_have_consistency_zero_on_one_rank() -> None:
    metrics = averaged(lambda rng: [micros * 2 for micros in even_window(rng, 1, 3)], steps=400)
    assert metrics["gns/consistency"] == pytest.approx(0.0, abs=0.05)


def test_one_micro_batch_on_one_rank_is_absent_with_advice() -> None:
    average = NoiseScaleAverage()
    average.update(estimate(*sums_of(even_window(random.Random(0), 1, 1))))
    assert average.metrics() == {"gns/skipped": 0.0}
    assert average.reason is not None
    assert "halve the micro-batch and accumulate two" in average.reason


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", ["sums", "grad_sq"])
def test_a_window_that_is_not_finite_is_a_counted_skip(value: float, place: str) -> None:
    average = NoiseScaleAverage()
    for _ in range(8):
        average.update(constant_window())
    before = average.metrics()
    sums, grad_sq = sums_of(even_window(random.Random(0), 2, 2))
    if place == "sums":
        sums[noise_scale.SMALL_SQUARE] = value
    else:
        grad_sq = value
    average.update(estimate(sums, grad_sq))
    assert average.metrics() == {**before, "gns/skipped": 1.0}


def test_a_fault_or_an_empty_step_is_a_counted_skip() -> None:
    sums, grad_sq = sums_of(even_window(random.Random(0), 2, 2))
    sums[noise_scale.FAULTS] = 1.0
    empty = [0.0] * noise_scale.NUM_SUMS
    empty[noise_scale.RANKS] = 2.0
    average = NoiseScaleAverage()
    average.update(estimate(sums, grad_sq))
    average.update(estimate(empty, 0.0))
    assert average.metrics() == {"gns/skipped": 2.0}


def test_an_estimate_is_never_clamped() -> None:
    sums, _ = sums_of(even_window(random.Random(0), 2, 2))
    small = estimate(sums, 0.0)
    assert isinstance(small, Window)
    assert small.grad_sq < 0.0
    big = estimate(sums, 1e6)
    assert isinstance(big, Window)
    assert big.tr_sigma < 0.0


def test_b_simple_is_absent_while_the_mean_gradient_is_not_seen() -> None:
    average = NoiseScaleAverage()
    for k in range(40):
        average.update(constant_window(grad_sq=1.0 if k % 2 else -1.1))
    assert "gns/b_simple" not in average.metrics()
    assert "gns/tr_sigma" in average.metrics()
    assert average.reason is not None
    assert "within 2 standard errors of 0" in average.reason


def test_b_simple_waits_for_enough_windows() -> None:
    average = NoiseScaleAverage()
    assert average.reason == "no window has been seen"
    for _ in range(4):
        average.update(constant_window())
    assert "gns/b_simple" not in average.metrics()
    assert average.reason == "4 of the 5 windows it takes have been seen"
    average.update(constant_window())
    assert average.metrics()["gns/b_simple"] == pytest.approx(8.0)
    assert average.reason is None


def test_tokens_are_those_of_an_effective_example() -> None:
    average = NoiseScaleAverage()
    for _ in range(5):
        average.update(constant_window(num_tokens=16 * 64.0))
    assert average.metrics()["gns/b_simple_tokens"] == pytest.approx(8.0 * 64.0)


def test_averages_equal_the_textbook_form() -> None:
    """sum(w x) / sum(w) with w = ema^age, and the weighted covariance of the mean."""
    rng = random.Random(2)
    pairs = [(rng.gauss(3, 1), rng.gauss(-1, 2)) for _ in range(30)]
    pair = PairAverage(0.9)
    for x, y in pairs:
        pair.update(x, y)
    weights = [0.9**age for age in reversed(range(30))]
    weights = [w / math.fsum(weights) for w in weights]
    mean_x, mean_y = (math.fsum(w * p[i] for w, p in zip(weights, pairs, strict=True)) for i in (0, 1))
    share = math.fsum(w * w for w in weights)
    cov = math.fsum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, pairs, strict=True))
    moments = pair.covariance()
    assert moments is not None
    assert (pair.mean_x, pair.mean_y) == pytest.approx((mean_x, mean_y))
    assert moments[2] == pytest.approx(cov * share / (1.0 - share))


def test_the_error_of_a_ratio_counts_the_covariance() -> None:
    """x = 2 y exactly has no error; opposite fluctuations have twice that of one alone."""
    rng = random.Random(8)
    same, opposite, alone = PairAverage(0.9), PairAverage(0.9), PairAverage(0.9)
    for _ in range(50):
        noise = rng.gauss(0.0, 1e-3)
        same.update(2.0 * (1.0 + noise), 1.0 + noise)
        opposite.update(1.0 + noise, 1.0 - noise)
        alone.update(1.0 + noise, 1.0)
    ratios = [pair.ratio() for pair in (same, opposite, alone)]
    errors = [ratio[1] for ratio in ratios if ratio is not None]
    assert errors[0] == pytest.approx(0.0, abs=1e-9)
    assert errors[1] == pytest.approx(2.0 * errors[2], rel=1e-2)


def test_resume_is_bit_exact() -> None:
    rng = random.Random(4)
    windows = [window_of(ragged_window(rng, 2, 3), tokens=100.0 + k) for k in range(40)]
    whole, first, second = NoiseScaleAverage(), NoiseScaleAverage(), NoiseScaleAverage()
    for window in windows:
        whole.update(window)
    for window in [*windows[:17], Absent("x", is_fault=True)]:
        first.update(window)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.metrics() == first.metrics()
    assert second.reason == first.reason or first.reason == "x"
    for window in windows[17:]:
        second.update(window)
    assert second.metrics() == {**whole.metrics(), "gns/skipped": 1.0}


@pytest.mark.parametrize("ema", [0.0, 1.0, -0.5, math.nan])
def test_an_ema_outside_the_unit_interval_is_refused(ema: float) -> None:
    with pytest.raises(UserError, match=r"gns\.ema: must be between 0 and 1"):
        NoiseScaleAverage(ema)
