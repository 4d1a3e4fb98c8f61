"""The decision: up to which batch the loss after equal tokens is that of the best batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean, stdev

ERRORS_WIDE = 2.0  # half-width of an error bar, in standard errors


@dataclass(frozen=True)
class Measured:
    """A batch and the losses of its best learning rate, by seed; none: no branch of it ended with a loss."""

    factor: Fraction
    losses: Mapping[int, float]

    @property
    def mean(self) -> float:
        """Over seeds."""
        return fmean(self.losses.values())

    @property
    def error(self) -> float | None:
        """Standard error of the mean; None with a single seed."""
        return standard_error(list(self.losses.values()))


@dataclass(frozen=True)
class Compared:
    """A batch beside the reference.

    Args:
        excess: mean loss above the reference's, over the seeds that both have.
        error: standard error of `excess`; None with a single seed.
        allowed: the larger of the tolerance and the error bar.
        is_within: `excess` is at most `allowed`.
    """

    factor: Fraction
    excess: float
    error: float | None
    allowed: float
    is_within: bool


@dataclass(frozen=True)
class Verdict:
    """What the branches say.

    Args:
        reference: the batch with the lowest loss.
        compared: the batches that have a loss, ascending.
        largest: the largest batch up to which every one from the reference on is within.
        next_larger: the smallest batch that is not; None: the largest measured batch is within.
        is_unresolved: an error bar, not the tolerance, decided for a batch up to `largest`.
        beyond: batches above `next_larger` that are within again, which noise alone explains.
    """

    reference: Fraction
    compared: Sequence[Compared]
    largest: Fraction
    next_larger: Fraction | None
    is_unresolved: bool
    beyond: Sequence[Fraction]


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean; None for fewer than two."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def decide(measured: Sequence[Measured], *, tolerance: float) -> Verdict | None:
    """Compare every batch with the one of the lowest mean loss; None if no batch has a loss.

    Differences are taken seed by seed, since branches of one seed read the same data. A batch without a loss is not within.

    Args:
        tolerance: relative to the loss of the reference.
    """
    ascending = sorted(measured, key=lambda each: each.factor)
    with_loss = [each for each in ascending if each.losses]
    if not with_loss:
        return None
    reference = min(with_loss, key=lambda each: each.mean)
    compared = {each.factor: _compare(each, reference, tolerance) for each in with_loss}
    upward = [each.factor for each in ascending if each.factor >= reference.factor]
    outside = [factor for factor in upward if factor not in compared or not compared[factor].is_within]
    next_larger = outside[0] if outside else None
    chain = [factor for factor in upward if next_larger is None or factor < next_larger]
    return Verdict(
        reference=reference.factor,
        compared=list(compared.values()),
        largest=chain[-1],
        next_larger=next_larger,
        is_unresolved=any(compared[factor].excess > tolerance * abs(reference.mean) for factor in chain),
        beyond=[factor for factor in upward if factor > chain[-1] and factor not in outside],
    )


def _compare(each: Measured, reference: Measured, tolerance: float) -> Compared:
    common = sorted(each.losses.keys() & reference.losses.keys())
    differences = [each.losses[seed] - reference.losses[seed] for seed in common]
    # Without a common seed the means are compared; that has no error bar.
    excess = fmean(differences) if differences else each.mean - reference.mean
    error = standard_error(differences)
    allowed = max(tolerance * abs(reference.mean), ERRORS_WIDE * (error or 0.0))
    return Compared(each.factor, excess, error, allowed, excess <= allowed)
