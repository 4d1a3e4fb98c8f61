"""The answer of the branches: the largest batch that is as good as the best after equal tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import takewhile
from statistics import fmean, stdev
from typing import Any

import numpy as np
from rich.console import Console

from trainer.metrics.noise_scale.estimate import t_quantile
from trainer.tools.branching.run_branches import BranchResult
from trainer.tools.branching.study import Branch, Study
from trainer.tools.fitted_table import Column, duration_text, fitted_table
from trainer.tools.runs.noise_scale import noise_scale_of
from trainer.wording import counted, number_text

# Normal quantile of an error bar: 96.4 %, of which comparing with the luckiest batch takes up to 3 %.
BAR_QUANTILE = 2.1
Losses = Mapping[int, float]  # of a batch at its best learning rate, by seed; empty: none
Answer = dict[str, Any]  # the content of cbs.json: numbers unrounded, factors as text


@dataclass(frozen=True)
class Compared:
    """A batch against the reference."""

    excess: float  # mean of its loss above that of the reference
    error: float | None  # standard error; None for the reference, and with a single seed
    bar: float | None
    tolerated: float  # excess

    @property
    def is_within(self) -> bool:
        return self.excess <= self.tolerated

    @property
    def is_open(self) -> bool:
        """Whether the error bar reaches across the tolerance."""
        return abs(self.excess - self.tolerated) < (self.bar or 0.0)


@dataclass(frozen=True)
class Verdict:
    """The critical batch, from the losses of the branches."""

    reference: Fraction  # the batch with the lowest loss
    compared: Mapping[Fraction, Compared]  # the batches that have a loss, ascending
    largest: Fraction  # up to which every batch from the reference on is within
    next_larger: Fraction | None  # the smallest that is not; None: the largest measured is within
    lowest: Fraction  # `largest`, as far as the error bars leave it open
    highest: Fraction


def standard_error(losses: Losses) -> float | None:
    """Standard error of the mean over seeds; None with a single one."""
    if len(losses) < 2:
        return None
    return stdev(losses.values()) / math.sqrt(len(losses))


def error_and_bar(measured: Mapping[Fraction, Losses]) -> tuple[float, float] | tuple[None, None]:
    """Standard error and error bar of the difference between the mean losses of two batches.

    None with a single seed or batch. Branches of one seed read the same data, so what its losses
    share is no error. The variance is that of the residuals of batches plus seeds (a randomized
    block design), pooled over all batches; the bar uses Student's t with their degrees of freedom.
    """
    losses = np.array([[each[seed] for seed in sorted(each)] for each in measured.values()])
    freedom = (losses.shape[0] - 1) * (losses.shape[1] - 1)
    if freedom == 0:
        return None, None
    # Rows are batches, columns seeds: with both means taken out, what is left is chance.
    residuals = losses - losses.mean(0) - losses.mean(1, keepdims=True) + losses.mean()
    error = math.sqrt(2.0 * float(np.square(residuals).sum()) / freedom / losses.shape[1])
    return error, error * t_quantile(BAR_QUANTILE, freedom)


def decide(measured: Mapping[Fraction, Losses], *, tolerance: float) -> Verdict | None:
    """Compare every batch with the one of the lowest mean loss; None if no batch has a loss.
    `measured`: all batches with a loss have the same seeds; one without is not within. `tolerance`:
    relative to the loss of the reference."""
    found = {factor: losses for factor, losses in sorted(measured.items()) if losses}
    if not found:
        return None
    means = {factor: fmean(losses.values()) for factor, losses in found.items()}
    reference = min(means, key=lambda factor: means[factor])
    lowest, tolerated = means[reference], tolerance * abs(means[reference])
    error, bar = error_and_bar(found)
    compared = {n: Compared(mean - lowest, error, bar, tolerated) for n, mean in means.items()}
    # Its difference to itself has no error.
    compared[reference] = Compared(0.0, None, None, tolerated)
    upward = [factor for factor in sorted(measured) if factor >= reference]

    def chain(holds: Callable[[Compared], bool]) -> list[Fraction]:
        return list(takewhile(lambda each: each in compared and holds(compared[each]), upward))

    within = chain(lambda each: each.is_within)
    return Verdict(
        reference,
        compared,
        largest=within[-1],
        next_larger=next(iter(upward[len(within) :]), None),
        lowest=chain(lambda each: each.is_within and not each.is_open)[-1],
        highest=chain(lambda each: each.is_within or each.is_open)[-1],
    )


def make_answer(study: Study, results: Mapping[Branch, BranchResult], *, tolerance: float) -> Answer:
    """From the results of all branches."""
    by_batch: dict[Fraction, list[Branch]] = {}
    for branch in study.branches:
        by_batch.setdefault(branch.factor, []).append(branch)
    chosen = {factor: _best_rate(branches, results) for factor, branches in by_batch.items()}
    measured = {n: {each.seed: loss for each, loss in best.items()} for n, best in chosen.items()}
    verdict = decide(measured, tolerance=tolerance)
    compared = verdict.compared if verdict else {}
    rows, origin = {}, study.origin
    for factor, branches in by_batch.items():
        rows[factor] = _row(study, branches, chosen[factor], results)
        rows[factor]["error"] = standard_error(measured[factor])
        rows[factor] |= _comparison(compared.get(factor))
    noise = noise_scale_of(origin.run, by=origin.step)
    answer: Answer = {
        "run": str(origin.run.path),
        "step": origin.step,
        **study.common,
        "lr_in_force": origin.lr,
        "tolerance": tolerance,
        "seeds": study.num_seeds,
        "impossible": list(study.impossible),
        "tokens_per_sequence": origin.tokens_per_step / origin.sequences_per_step,
        "batches": list(rows.values()),
        "reference": None,
        "critical": None,
        "noise_scale": noise and asdict(noise),
        "sentence": f"At step {origin.step:,} no branch ended with a finite loss: try a smaller --lr-grid.",
    }
    if verdict is None:
        return answer
    scale = "of the run was not logged by then (gns.enabled)"
    if noise is not None:
        scale = f"({noise.where}) is {noise.number}"
        if noise.is_known:
            scale += " sequences"
    answer["reference"] = str(verdict.reference)
    answer["critical"] = {
        **{key: rows[verdict.largest][key] for key in ("factor", "sequences", "tokens")},
        "next_larger": verdict.next_larger and str(verdict.next_larger),
        "lowest": str(verdict.lowest),
        "highest": str(verdict.highest),
        "is_unresolved": verdict.lowest < verdict.highest,
    }
    answer["sentence"] = f"At step {origin.step:,} {_finding(answer)}. The noise scale {scale}."
    return answer


def _row(
    study: Study, branches: Sequence[Branch], best: Mapping[Branch, float], results: Mapping[Branch, BranchResult]
) -> dict[str, Any]:
    """A batch and what its best branches came to; None where no branch of it ended with a loss."""
    factor, origin = branches[0].factor, study.origin
    row: dict[str, Any] = {"factor": str(factor)}
    row["sequences"] = float(factor) * origin.sequences_per_step
    row["tokens"] = float(factor) * origin.tokens_per_step
    row |= {"micro_batches": branches[0].micro_batches, "steps": branches[0].steps}
    row |= {"trained_tokens": None, "lr": None, "lr_scale": None, "loss": None, "is_edge": False}
    row["losses"] = {str(branch.seed): loss for branch, loss in best.items()}
    if best:
        first, scales = next(iter(best)), sorted({branch.lr_scale for branch in branches})
        row["trained_tokens"] = fmean(results[branch].tokens for branch in best)
        row |= {"lr": first.lr, "lr_scale": first.lr_scale, "loss": fmean(best.values())}
        # The best rate is the lowest or highest of a grid of several: a better one may lie outside.
        row["is_edge"] = len(scales) > 1 and first.lr_scale in (scales[0], scales[-1])
    return row


def _comparison(each: Compared | None) -> dict[str, Any]:
    if each is None:
        unknown = {"excess": None, "excess_error": None, "error_bar": None}
        return {**unknown, "is_within": False, "is_open": False}
    found = {"excess": each.excess, "excess_error": each.error, "error_bar": each.bar}
    return {**found, "is_within": each.is_within, "is_open": each.is_open}


def _best_rate(branches: Sequence[Branch], results: Mapping[Branch, BranchResult]) -> dict[Branch, float]:
    """The branches of the learning rate with the lowest mean loss, and their losses.

    A rate without a loss of every seed does not count.
    """
    by_rate: dict[float, dict[Branch, float]] = {}
    # The learning rate is chosen for each batch alone: one for all would favour one batch.
    for branch in branches:
        loss = results[branch].loss
        if loss is not None:
            by_rate.setdefault(branch.lr_scale, {})[branch] = loss
    seeds = len({branch.seed for branch in branches})
    whole = [losses for losses in by_rate.values() if len(losses) == seeds]
    return min(whole, key=lambda losses: fmean(losses.values()), default={})


def _finding(answer: Answer) -> str:
    critical = answer["critical"]
    name = f"{number_text(critical['sequences'], 3)} sequences"
    size = f"{name} ({critical['tokens']:,.0f} tokens, {critical['factor']} x today's)"
    rule = f"within {answer['tolerance']:.2%} of the lowest, that of {answer['reference']} x"
    larger, lowest = critical["next_larger"], critical["lowest"]
    text = f"the critical batch is {size}: its loss is {rule}, that of {larger} x is not"
    if larger is None:
        text = f"the critical batch is at least {size}, the largest measured: its loss is {rule}"
    if critical["is_unresolved"]:
        until = f"{critical['highest']} x"
        if critical["highest"] == answer["batches"][-1]["factor"]:
            until += " or more"
        text += f"; the error bars leave {lowest} x to {until} open: add seeds or tokens"
    elif answer["seeds"] == 1:
        text += "; a single seed has no error bars"
    edges = ", ".join(f"{row['factor']} x" for row in answer["batches"] if row["is_edge"])
    if edges:
        text += f". The best learning rate of {edges} is at the edge of the grid: widen --lr-grid"
    return text


def cost_lines(study: Study, num_done: int) -> list[str]:
    """The cost of the branches, in lines, before the first one starts."""
    origin, steps = study.origin, [branch.steps for branch in study.branches]
    num_todo, rate = len(steps) - num_done, origin.tokens_per_sec
    batches = counted(len({branch.factor for branch in study.branches}), "batch")
    rates = counted(len({branch.lr_scale for branch in study.branches}), "learning rate")
    shape = f"{batches} x {rates} x {counted(study.num_seeds, 'seed')}"
    if num_done:
        shape += f", of which {num_done} are done"
    kind = "training loss over the last quarter (eval.holdout_fraction is 0)"
    if study.is_held_out:
        kind = "held-out loss"
    total, each = num_todo * study.tokens, f"{study.tokens:,.0f} tokens"
    cost = f"cost: {counted(num_todo, 'branch')}, {total:,.0f} tokens"
    if rate:
        cost += f", about {duration_text(total / rate)} at the run's {rate:,.0f} tokens/s"
    return [
        f"{counted(len(steps), 'branch')} from step {origin.step:,} of {origin.run.path}: {shape}",
        f"each trains {each} in {min(steps):,} to {max(steps):,} steps; the {kind} decides",
        *study.impossible,
        cost,
    ]


def print_answer(answer: Answer, console: Console) -> None:
    rows = answer["batches"]
    lowest = min((abs(row["loss"]) for row in rows if row["losses"]), default=1.0)

    def column(title: str, key: str, form: str, error: str = "", *, scale: float = 1.0, leave_out: int = 0) -> Column:
        cells = []
        for row in rows:
            cells.append("-" if row[key] is None else format(row[key] / scale, form))
            if error and row[error] is not None:
                cells[-1] += f" +- {format(row[error] / scale, form.lstrip('+'))}"
        return Column(title, cells, "right", leave_out)

    within = []
    for row in rows:
        closed = "yes" if row["is_within"] else "no"
        within.append("open" if row["is_open"] else closed)
    columns = [
        Column("batch", [f"{row['factor']} x" for row in rows], "right"),
        column("sequences", "sequences", ",.3g"),
        column("tokens", "tokens", ",.0f", leave_out=1),
        column("steps", "steps", ",.0f", leave_out=2),
        column("best lr", "lr", ".3g"),
        column(f"{answer['loss']} loss", "loss", ".4f", "error"),
        column("above\nthe best", "excess", "+.2%", "excess_error", scale=lowest),
        Column("within", within),
    ]
    title = f"Loss after {answer['tokens']:,} tokens from step {answer['step']:,}"
    title += "; +- one standard error"
    console.print(fitted_table(columns, width=console.width, title=title))
    console.print(answer["sentence"], highlight=False, markup=False)
