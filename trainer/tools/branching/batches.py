"""Which batches branches can have: a multiple of today's by micro-batches, or by fewer rows in each of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from trainer.config.rules import mixing_of
from trainer.config.schema import RunConfig

STEPS_UNIT = 4  # a branch's steps are a multiple of this, so that the last quarter of its tokens is whole steps


@dataclass(frozen=True)
class BranchBatch:
    """How a branch makes its batch.

    Args:
        factor: of today's batch.
        micro_batches: per step and rank.
        row_share: rows of a micro-batch, as a share of today's.
    """

    factor: Fraction
    micro_batches: int
    row_share: Fraction = Fraction(1)

    def steps(self, base_steps: int) -> int:
        """Steps that train on as many tokens as `base_steps` steps of today's batch."""
        steps = base_steps / self.factor
        assert steps.denominator == 1, (base_steps, self.factor)
        return steps.numerator


def micro_batches_in_force(config: RunConfig, saved: Mapping[str, Any]) -> int:
    """Micro-batches per step and rank of the step that a checkpoint was saved after."""
    in_force, _ = saved["micro_batches"]
    return in_force or config.micro_batches.first


def row_sizes(config: RunConfig) -> list[int]:
    """Rows of a micro-batch, of all sources and modalities; empty if a source makes batches of its own, of fixed size."""
    if any(source.target is not None for source in config.data.source):
        return []
    mixings = [mixing_of(config, source) for source in config.data.source]
    return sorted({size for mixing in mixings for size in (mixing.batch_size, *mixing.batch_size_by_modality.values())})


def fit_batch(factor: Fraction, today: Fraction, sizes: Sequence[int]) -> BranchBatch | None:
    """The batch of `factor` times today's with the most rows per micro-batch; None if there is none.

    Args:
        today: micro-batches per step and rank today; a fraction on another number of ranks.
        sizes: see `row_sizes`.
    """
    wanted = factor * today
    if wanted.denominator == 1:
        return BranchBatch(factor, wanted.numerator)
    # Beyond this a micro-batch has less than a row.
    for micro_batches in range(math.ceil(wanted), math.floor(wanted * min(sizes, default=0)) + 1):
        share = wanted / micro_batches
        if all((size * share).denominator == 1 for size in sizes):
            return BranchBatch(factor, micro_batches, share)
    return None


def why_impossible(factor: Fraction, today: Fraction, sizes: Sequence[int]) -> str:
    """One line on a factor that `fit_batch` finds no batch for."""
    rows = f"rows of {', '.join(map(str, sizes))}" if sizes else "micro-batches of a source's own"
    return (
        f"{factor} of today's batch is impossible: it is {factor * today} of a micro-batch per rank and step, and {rows} "
        "cannot be divided so (train.micro_batches, data.mixing.batch_size)"
    )


def base_steps_for(tokens: float, tokens_per_step: float, factors: Sequence[Fraction]) -> int:
    """Steps of today's batch that have at least `tokens`, and that every factor divides into whole steps."""
    unit = base_steps_unit(factors)
    return max(math.ceil(tokens / tokens_per_step / unit), 1) * unit


def base_steps_unit(factors: Sequence[Fraction]) -> int:
    """The least number of today's steps that is a multiple of `STEPS_UNIT` steps of every factor."""
    return math.lcm(*((STEPS_UNIT * factor).numerator for factor in factors))
