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
from numpy.typing import NDArray

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
    one, state = History(), history.state_dict()
    state["phases"] = [
        (phase, [[(n, x[run], y[run]) for n, x, y in level] for level in levels]) for phase, levels in state["phases"]
    ]
    one.load_state_dict(state)
    return one


def continued(
    spread: int, rows: int, *, steps: int, runs: int, seed: int, dim: int = 20, micros: int = 4
) -> Iterator[NDArray[np.float64]]:
    """[3, runs] of each window: S and |G|^2, both 1 in truth, and the rows of its document before a row, on average.

    A micro-batch is a row of a document of so many `rows`, the next of which comes `spread` windows later; nine tenths of
    its noise are the document's.
    """
    rng = np.random.default_rng([seed, spread, rows])
    documents = rng.standard_normal((spread, runs, micros, dim))
    ages = rng.integers(rows, size=documents.shape[:-1])
    for step in range(steps):
        own, age = documents[step % spread], ages[step % spread]
        noise = math.sqrt(0.9) * own + math.sqrt(0.1) * rng.standard_normal(own.shape)
        gradients = dim**-0.5 + math.sqrt(micros / dim) * noise
        big, small = (gradients.mean(axis=1) ** 2).sum(axis=-1), (gradients**2).sum(axis=(1, 2)) / micros
        tr_sigma = (small - big) / (micros - 1)
        yield np.array([tr_sigma, big - tr_sigma, age.mean(axis=-1)])
        age[...] = (age + 1) % rows
        own[age == 0] = rng.standard_normal((int((age == 0).sum()), dim))


def covers(current: Current, truth: float) -> bool:
    low, high, *_ = current.ratio
    return low is not None and low <= truth and (high is None or truth <= high)
