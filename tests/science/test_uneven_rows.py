"""The noise scale of rows of 1 to 12 tokens, whatever their noise depends on: unbiased, with bounds as wrong as they say."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from tests.support.noise_windows import DIM, GRAD_SQ, MEAN, Micro, assert_mean_is, window_of
from trainer.metrics.noise_scale.estimate import NoiseScaleAverage, Window

RUNS, STEPS = 60, 50
OF_ROW, OF_TOKENS = (
    31.0 * GRAD_SQ,
    31.0 * GRAD_SQ * 650 / 78,
)  # where one of them is all the noise, B is 31 for many rows
KINDS = {"of tokens": (0.0, 1.0), "of both": (0.5, 0.5), "of the row": (1.0, 0.0)}
LAYOUTS = [(1, 4, 1), (1, 4, 2), (2, 2, 2)]  # ranks, micro-batches, rows


def draw(rng: random.Random, rows: int, of_row: float, of_tokens: float) -> tuple[Micro, np.ndarray]:
    """A micro-batch of rows whose mean gradients have the noise `of_row + of_tokens / tokens`, and the rows' tokens."""
    tokens = np.array([rng.randint(1, 12) for _ in range(rows)])
    share = tokens / tokens.sum()
    sigma = math.sqrt(float(share**2 @ (of_row + of_tokens / tokens)) / DIM)
    gradient = [mean + sigma * rng.gauss(0.0, 1.0) for mean in MEAN]
    return (gradient, 0.01 * float(tokens.sum()), float(share @ share)), tokens


@pytest.mark.parametrize(("world_size", "micros", "rows"), LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_uneven_rows_bias_neither_the_noise_scale_nor_its_bounds(
    kind: str, world_size: int, micros: int, rows: int
) -> None:
    of_row, of_tokens = KINDS[kind][0] * OF_ROW, KINDS[kind][1] * OF_TOKENS
    rng = random.Random(f"{kind} {world_size} {micros} {rows}")
    windows: list[Window] = []
    truths = []  # per effective row, of the batch as it was drawn
    for _ in range(RUNS * STEPS):
        drawn = [[draw(rng, rows, of_row, of_tokens) for _ in range(micros)] for _ in range(world_size)]
        windows.append(window_of([[micro for micro, _ in own] for own in drawn]))
        tokens = np.concatenate([part for own in drawn for _, part in own])
        truths.append(of_row + of_tokens * float(tokens.sum() / (tokens @ tokens)))
    assert_mean_is([w.grad_sq for w in windows], GRAD_SQ)
    assert_mean_is([w.tr_sigma - truth for w, truth in zip(windows, truths, strict=True)], 0.0, power=3.0 * GRAD_SQ)
    both = [(w.between, w.within) for w in windows]
    assert_mean_is([between - within for between, within in both if between and within], 0.0, power=3.0 * GRAD_SQ)
    truth = float(np.mean(truths)) / GRAD_SQ
    wrong = 0
    for run in range(RUNS):
        average = NoiseScaleAverage()
        for window in windows[run * STEPS : (run + 1) * STEPS]:
            average.update(window)
        found = average.metrics()
        wrong += not found["gns/b_simple_low"] <= truth <= found.get("gns/b_simple_high", math.inf)
    assert wrong <= 5  # 1.5 are expected
