"""Processes whose signal and noise depend on the step, and what the noise scale's history holds of them, in many runs at once.

The examples' gradients are normal, with mean G and covariance sigma^2 I in `dim` dimensions, m micro-batches to a step: see
`tests.core.properties.test_noise_scale_coverage`. The batch has size 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.metrics.noise_scale.estimate import Current, History


@dataclass(frozen=True)
class Process:
    """B over the batch, and |G|^2, at each step."""

    ratio: Callable[[int], float]
    grad_sq: Callable[[int], float]


def constant(value: float) -> Callable[[int], float]:
    return lambda step: value


def histories(
    process: Process, steps: Sequence[int], *, runs: int, dim: int, micros: int, seed: int
) -> Iterator[tuple[int, list[History]]]:
    """The history of each run after each of `steps`."""
    rng, history = np.random.default_rng([seed, dim]), History()
    for step in range(1, max(steps) + 1):
        grad_sq = process.grad_sq(step)
        variance = process.ratio(step) * grad_sq / dim
        along = (math.sqrt(grad_sq) + math.sqrt(variance) * rng.standard_normal(runs)) ** 2
        big = along + variance * rng.chisquare(dim - 1, runs)
        tr_sigma: Any = variance * rng.chisquare(dim * (micros - 1), runs) / (micros - 1)
        history.add(tr_sigma, big - tr_sigma)
        if step in steps:
            yield step, [of_run(history, run) for run in range(runs)]


def of_run(history: Any, run: int) -> History:
    """The history of one run, from that of all, whose sums are arrays."""
    one = History()
    one.load_state_dict([[(x[run], y[run]) for x, y in level] for level in history.state_dict()])
    return one


def covers(current: Current, truth: float) -> bool:
    low, high, *_ = current.ratio
    return low is not None and low <= truth and (high is None or truth <= high)
