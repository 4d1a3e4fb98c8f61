"""The estimates of one window against closed forms, and the textbook mistakes against the estimates."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.noise_windows import (
    GRAD_SQ,
    TR_SIGMA,
    Micro,
    assert_mean_is,
    even_window,
    ragged_window,
    sums_of,
    window_of,
)
from trainer.metrics.noise_scale import estimate as noise_scale
from trainer.metrics.noise_scale.estimate import Window, estimate

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


@settings(max_examples=30, derandomize=True, deadline=None)
@given(seed=st.integers(0, 10_000), factor=st.floats(1e-6, 1e6))
def test_the_scale_of_the_loss_cancels(seed: int, factor: float) -> None:
    ranks = ragged_window(random.Random(seed), 2, 3)
    scaled = [[(g, kappa * factor, noise) for g, kappa, noise in micros] for micros in ranks]
    assert window_of(scaled).tr_sigma == pytest.approx(window_of(ranks).tr_sigma, rel=1e-6, abs=1e-6)


def test_an_estimate_is_never_clamped() -> None:
    sums, _ = sums_of(even_window(random.Random(0), 2, 2))
    small = estimate(sums, 0.0)
    assert isinstance(small, Window)
    assert small.grad_sq < 0.0
    big = estimate(sums, 1e6)
    assert isinstance(big, Window)
    assert big.tr_sigma < 0.0


def test_the_arithmetic_needs_no_torch() -> None:
    program = "import sys, trainer.metrics.noise_scale.estimate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[3], check=False).returncode == 0
