"""Windows of a linear loss, whose gradient is mean + sigma * noise, so that every answer is known in closed form;
and of processes whose signal and noise depend on the step. The batch has size 1."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.metrics import noise_scale
from trainer.metrics.noise_scale import Current, History, Window, estimate

DIM = 20
MEAN = [0.5] * DIM
GRAD_SQ = 5.0
SIGMA = math.sqrt(2.0)
TR_SIGMA = DIM * 2.0
B_SIMPLE = 8.0

Vector = NDArray[np.float64]
Micro = tuple[Vector, float, float]  # gradient of the mean loss, kappa, v


def weighted_sum(micros: Sequence[Micro]) -> Vector:
    total: Vector = np.sum([kappa * gradient for gradient, kappa, _ in micros], axis=0)
    return total


def draw_micro(rng: random.Random, weights: Sequence[float], kappa: float) -> Micro:
    """A micro-batch of independent examples with these weights, drawn by its exact distribution."""
    noise = sum(w * w for w in weights) / sum(weights) ** 2
    return np.array([mu + SIGMA * math.sqrt(noise) * rng.gauss(0.0, 1.0) for mu in MEAN]), kappa, noise


def sums_of(ranks: Sequence[Sequence[Micro]], tokens: float = 0.0) -> tuple[list[float], float]:
    """The reduced sums and the big square norm of a window, by their definitions."""
    sums = [0.0] * noise_scale.NUM_SUMS
    for micros in ranks:
        for gradient, kappa, noise in micros:
            sums[noise_scale.KAPPA] += kappa
            sums[noise_scale.KAPPA_SQUARE] += kappa**2
            sums[noise_scale.SMALL_SQUARE] += kappa**2 * float(gradient @ gradient)
            sums[noise_scale.SMALL_NOISE] += kappa * noise
            sums[noise_scale.BIG_NOISE] += kappa**2 * noise
        middle = micros if len(ranks) > 1 else micros[: (len(micros) + 1) // 2]
        own = weighted_sum(middle)
        sums[noise_scale.MIDDLE_OWN_KAPPA] += sum(kappa**2 for _, kappa, _ in middle)
        sums[noise_scale.MIDDLE_OWN_SQUARE] += sum(
            kappa**2 * float(gradient @ gradient) for gradient, kappa, _ in middle
        )
        sums[noise_scale.MIDDLE_KAPPA] += sum(kappa for _, kappa, _ in middle) ** 2
        sums[noise_scale.MIDDLE_SQUARE] += float(own @ own)
        sums[noise_scale.RANKS] += 1.0
    sums[noise_scale.TOKENS] = tokens
    averaged = np.mean([weighted_sum(micros) for micros in ranks], axis=0)
    return sums, float(averaged @ averaged)


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


def assert_mean_is(values: Sequence[float], expected: float) -> None:
    mean = math.fsum(values) / len(values)
    error = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
    assert abs(mean - expected) < 5.0 * error, f"{mean} +- {error}, expected {expected}"
    assert error < 0.1 * abs(expected), "the test has no power"


def constant_window(tr_sigma: float = 40.0, grad_sq: float = 5.0, **changes: float) -> Window:
    fields = {"between": tr_sigma, "within": tr_sigma, "small_noise": 0.5, "big_noise": 1 / 16, "num_tokens": 0.0}
    return Window(tr_sigma=tr_sigma, grad_sq=grad_sq, world_size=2, **{**fields, "rows_before": 0.0, **changes})


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
