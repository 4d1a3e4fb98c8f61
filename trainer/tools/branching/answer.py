"""The answer of the branches of a checkpoint: up to which batch the loss after equal tokens is that of the best batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from statistics import fmean, stdev
from typing import Any

from trainer.tools.branching.run_branches import BranchResult
from trainer.tools.branching.study import Branch, Study
from trainer.tools.runs.noise_scale import NoiseScale, noise_scale_of
from trainer.wording import counted, duration_text, number_text

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
        return _standard_error(list(self.losses.values()))


@dataclass(frozen=True)
class Compared:
    """A batch against the reference.

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
    """

    reference: Fraction
    compared: Sequence[Compared]
    largest: Fraction
    next_larger: Fraction | None
    is_unresolved: bool


def _standard_error(values: Sequence[float]) -> float | None:
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
    outside = (factor for factor in upward if factor not in compared or not compared[factor].is_within)
    next_larger = next(outside, None)
    chain = [factor for factor in upward if next_larger is None or factor < next_larger]
    return Verdict(
        reference=reference.factor,
        compared=list(compared.values()),
        largest=chain[-1],
        next_larger=next_larger,
        is_unresolved=any(compared[factor].excess > tolerance * abs(reference.mean) for factor in chain),
    )


def _compare(each: Measured, reference: Measured, tolerance: float) -> Compared:
    """Both have a loss of every seed."""
    differences = [loss - reference.losses[seed] for seed, loss in each.losses.items()]
    excess, error = fmean(differences), _standard_error(differences)
    allowed = max(tolerance * abs(reference.mean), ERRORS_WIDE * (error or 0.0))
    return Compared(each.factor, excess, error, allowed, excess <= allowed)


@dataclass(frozen=True)
class BatchRow:
    """One batch.

    Args:
        lr, lr_scale: the best of the grid; None: no rate gave a loss with every seed.
        is_edge: it is the lowest or highest of a grid of several rates: a better one may lie outside.
        tokens: that a branch trained on, averaged over seeds.
        compared: None without a loss.
    """

    branch: Branch
    sequences: float
    step_tokens: float
    lr: float | None
    lr_scale: float | None
    is_edge: bool
    measured: Measured
    tokens: float | None
    compared: Compared | None

    @property
    def factor(self) -> Fraction:
        """Of today's batch."""
        return self.branch.batch.factor

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        compared, batch, has_loss = self.compared, self.branch.batch, bool(self.measured.losses)
        return {
            "factor": str(self.factor),
            "sequences": self.sequences,
            "tokens": self.step_tokens,
            "micro_batches": batch.micro_batches,
            "row_share": str(batch.row_share),
            "steps": self.branch.steps,
            "trained_tokens": self.tokens,
            "lr": self.lr,
            "lr_scale": self.lr_scale,
            "is_edge": self.is_edge,
            "losses": {str(seed): loss for seed, loss in self.measured.losses.items()},
            "loss": self.measured.mean if has_loss else None,
            "error": self.measured.error if has_loss else None,
            "excess": None if compared is None else compared.excess,
            "excess_error": None if compared is None else compared.error,
            "allowed": None if compared is None else compared.allowed,
            "is_within": compared is not None and compared.is_within,
        }


@dataclass(frozen=True)
class Answer:
    """All that a call says at its end."""

    study: Study
    tolerance: float
    rows: Sequence[BatchRow]
    verdict: Verdict | None
    noise: NoiseScale | None

    def row(self, factor: Fraction) -> BatchRow:
        """The row of a batch."""
        return next(row for row in self.rows if row.factor == factor)

    def to_json(self) -> dict[str, Any]:
        """For programs: numbers unrounded, factors as text."""
        study, verdict, critical = self.study, self.verdict, None
        if verdict is not None:
            largest = self.row(verdict.largest)
            critical = {
                "factor": str(verdict.largest),
                "sequences": largest.sequences,
                "tokens": largest.step_tokens,
                "next_larger": None if verdict.next_larger is None else str(verdict.next_larger),
                "is_unresolved": verdict.is_unresolved,
            }
        return {
            "run": str(study.origin.run.path),
            "step": study.origin.step,
            **study.common,
            "lr_in_force": study.origin.lr,
            "lr_rule": study.lr_rule,
            "tolerance": self.tolerance,
            "seeds": study.num_seeds,
            "impossible": list(study.impossible),
            "tokens_per_sequence": study.origin.tokens_per_step / study.origin.sequences_per_step,
            "batches": [row.to_json() for row in self.rows],
            "reference": None if verdict is None else str(verdict.reference),
            "critical": critical,
            "noise_scale": None if self.noise is None else asdict(self.noise),
            "sentence": sentence(self),
        }


def make_answer(study: Study, results: Mapping[Branch, BranchResult], *, tolerance: float) -> Answer:
    """From the results of all branches."""
    by_batch: dict[Fraction, list[Branch]] = {}
    for branch in study.branches:
        by_batch.setdefault(branch.batch.factor, []).append(branch)
    chosen = {factor: _best_rate(branches, results) for factor, branches in by_batch.items()}
    measured = {n: Measured(n, {branch.seed: loss for branch, loss in best.items()}) for n, best in chosen.items()}
    verdict = decide(list(measured.values()), tolerance=tolerance)
    compared = {each.factor: each for each in verdict.compared} if verdict is not None else {}
    rows = []
    for factor, branches in by_batch.items():
        best, scales = list(chosen[factor]), sorted({branch.lr_scale for branch in branches})
        scale = best[0].lr_scale if best else None
        row = BatchRow(
            branch=branches[0],
            sequences=float(factor) * study.origin.sequences_per_step,
            step_tokens=float(factor) * study.origin.tokens_per_step,
            lr=best[0].lr if best else None,
            lr_scale=scale,
            is_edge=len(scales) > 1 and scale in (scales[0], scales[-1]),
            measured=measured[factor],
            tokens=fmean(results[branch].tokens for branch in best) if best else None,
            compared=compared.get(factor),
        )
        rows.append(row)
    return Answer(study, tolerance, rows, verdict, noise_scale_of(study.origin.run, by=study.origin.step))


def _best_rate(branches: Sequence[Branch], results: Mapping[Branch, BranchResult]) -> dict[Branch, float]:
    """The branches of the learning rate with the lowest mean loss, and their losses; a rate without a loss of every seed does
    not count."""
    by_rate: dict[float, dict[Branch, float]] = {}
    for branch in branches:
        if (loss := results[branch].loss) is not None:
            by_rate.setdefault(branch.lr_scale, {})[branch] = loss
    seeds = len({branch.seed for branch in branches})
    whole = [losses for losses in by_rate.values() if len(losses) == seeds]
    return min(whole, key=lambda losses: fmean(losses.values()), default={})


def sentence(answer: Answer) -> str:
    """The answer in words."""
    verdict, study = answer.verdict, answer.study
    if verdict is None:
        return f"At step {study.origin.step:,} no branch ended with a finite loss: try a smaller --lr-grid."
    largest = answer.row(verdict.largest)
    name = f"{number_text(largest.sequences, 3)} sequences"
    size = f"{name} ({largest.step_tokens:,.0f} tokens, {largest.factor} x today's)"
    best = f"the lowest, that of {verdict.reference} x"
    rule = f"within {answer.tolerance:.2%}" + (" or the error bars" if study.num_seeds > 1 else "")
    if verdict.next_larger is None:
        text = f"the critical batch is at least {size}, the largest measured: its loss is {rule} of {best}"
    else:
        text = f"the critical batch is {size}: its loss is {rule} of {best}, that of {verdict.next_larger} x is not"
    if verdict.is_unresolved:
        text += "; the error bars, not the tolerance, decided: more seeds or tokens may lower it"
    if edges := ", ".join(f"{row.factor} x" for row in answer.rows if row.is_edge):
        text += f". The best learning rate of {edges} is at the edge of the grid: widen --lr-grid"
    noise = answer.noise
    scale = "of the run was not logged by then (gns.enabled)"
    if noise is not None:
        scale = f"({noise.where}) is {noise.number}" + (" sequences" if noise.is_known else "")
    return f"At step {study.origin.step:,} {text}. The noise scale {scale}."


def cost_lines(study: Study, num_done: int, num_slots: int) -> list[str]:
    """What is to come, before it starts."""
    origin, steps = study.origin, [branch.steps for branch in study.branches]
    num_todo, rate = len(steps) - num_done, origin.tokens_per_sec
    batches = counted(len({branch.batch.factor for branch in study.branches}), "batch")
    rates = counted(len({branch.lr_scale for branch in study.branches}), "learning rate")
    shape = f"{batches} x {rates} x {counted(study.num_seeds, 'seed')}"
    done = f", of which {num_done} are done" if num_done else ""
    kind = "held-out loss" if study.is_held_out else "training loss over the last quarter (eval.holdout_fraction is 0)"
    total = num_todo * study.tokens
    predicted = "unknown time (the run logged no tokens_per_sec)"
    if rate:
        took = duration_text(total / rate / num_slots)
        predicted = f"about {took} at the run's {rate:,.0f} tokens/s, plus the start of each"
    at_once = f", {num_slots} at once" if num_slots > 1 else ""
    return [
        f"{counted(len(steps), 'branch')} from step {origin.step:,} of {origin.run.path}: {shape}{done}",
        f"each trains {study.tokens:,.0f} tokens in {min(steps):,} to {max(steps):,} steps; what counts is the {kind}",
        *study.impossible,
        f"cost: {counted(num_todo, 'branch')}{at_once}, {total:,.0f} tokens, {predicted}",
    ]
