"""The blend over the run: expected shares of the micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.arrays import Ints
from trainer.data.weights import ScheduledWeight, WeightSpec, positions, zero_batches
from trainer.micro_batches import MicroBatches

SAMPLED = 1 << 14  # batches of a piece of the run
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ZeroSpan:
    """The first range of batches in which the weight of a source is zero; `last` is None if it lasts to the end."""

    first: int
    last: int | None


def shares_at(weights: Sequence[WeightSpec], batches: Ints, micro_batches: MicroBatches) -> FloatArray:
    """The probability of each source at each batch, float64 [sources, batches]; zero where all weights are zero."""
    raw = np.array([spec.evaluate_many(positions(spec.unit, batches, micro_batches)) for spec in weights])
    total = raw.sum(axis=0)
    shares: FloatArray = np.divide(raw, total, out=np.zeros_like(raw), where=total > 0)
    return shares


def expected_batches(weights: Sequence[WeightSpec], num_batches: int, micro_batches: MicroBatches) -> list[float]:
    """The expected number of micro-batches of each source: the sum of its probability over the run.

    Between two points of the schedules a probability is smooth: long pieces are sampled, so that any run takes as long.
    """
    edges = {0, num_batches}
    for spec in weights:
        points = spec.points if isinstance(spec, ScheduledWeight) else ()
        edges |= {x if spec.unit == "batch" else micro_batches.batches_before(max(x, 1)) for x in points}
    sums = np.zeros(len(weights))
    for start, end in itertools.pairwise(sorted(edge for edge in edges if edge <= num_batches)):
        count = min(end - start, SAMPLED)
        middles = start + (np.arange(count) + 0.5) * ((end - start) / count)
        sums += shares_at(weights, middles.astype(np.int64), micro_batches).mean(axis=1) * (end - start)
    return [float(total) for total in sums]


def first_zero(weight: WeightSpec, num_batches: int, micro_batches: MicroBatches) -> ZeroSpan | None:
    """The first range within the run in which the weight is zero."""
    for first, last in zero_batches(weight, micro_batches):
        if first < num_batches:
            return ZeroSpan(first, None if last is None or last >= num_batches - 1 else last)
    return None


def sample_points(length: int, most: int = 240) -> Ints:
    """At most `most` evenly spread integers from 0 to `length - 1`, including both ends."""
    return np.unique(np.linspace(0, length - 1, min(most, length)).round().astype(np.int64))
