"""The answer of the branches: the largest batch that is as good as the best after equal tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import takewhile
from statistics import fmean
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from trainer.metrics.noise_scale.estimate import t_quantile
from trainer.tools.branching.study import Branch, Study
from trainer.tools.runs.noise_scale import noise_scale_of
from trainer.wording import counted, number_text

# Normal quantile of an error bar: 96.4 %, of which comparing with the luckiest takes up to 3 %.
BAR_QUANTILE = 2.1
Losses = Mapping[int, float]  # of a batch at its best learning rate, by seed; empty: none
Answer = dict[str, Any]  # the content of cbs.json: numbers unrounded, factors as text


@dataclass(frozen=True)
class Verdict:
    """The critical batch, from the losses of the branches."""

    reference: Fraction  # the batch with the lowest loss
    excess: Mapping[Fraction, float]  # mean loss above that of the reference, of batches with a loss
    error_bar: float | None  # of an excess; None with a single seed or batch
    tolerated: float  # excess
    largest: Fraction  # up to which every batch from the reference on is within
    next_larger: Fraction | None  # the smallest that is not; None: the largest measured is within
    lowest: Fraction  # `largest`, as far as the error bars leave it open
    highest: Fraction


def error_bar_of(measured: Mapping[Fraction, Losses]) -> float | None:
    """Error bar of the difference between the mean losses of two batches.

    None with a single seed or batch. Branches of one seed read the same data, so what its losses
    share is no error. The variance is that of the residuals of batches plus seeds (a randomized
    block design), pooled over all batches; the bar uses Student's t with their degrees of freedom.
    """
    losses = np.array([[each[seed] for seed in sorted(each)] for each in measured.values()])
    freedom = (losses.shape[0] - 1) * (losses.shape[1] - 1)
    if freedom == 0:
        return None
    # Rows are batches, columns seeds: with both means taken out, what is left is chance.
    residuals = losses - losses.mean(0) - losses.mean(1, keepdims=True) + losses.mean()
    error = math.sqrt(2.0 * float(np.square(residuals).sum()) / freedom / losses.shape[1])
    return error * t_quantile(BAR_QUANTILE, freedom)


def decide(measured: Mapping[Fraction, Losses], *, tolerance: float) -> Verdict | None:
    """Compare every batch with the one of the lowest mean loss; None if no batch has a loss.
    `measured`: all batches with a loss have the same seeds; one without is not within. `tolerance`:
    relative to the loss of the reference."""
    found = {factor: losses for factor, losses in sorted(measured.items()) if losses}
    if not found:
        return None
    means = {factor: fmean(losses.values()) for factor, losses in found.items()}
    reference = min(means, key=lambda factor: means[factor])
    excess = {factor: mean - means[reference] for factor, mean in means.items()}
    tolerated, bar = tolerance * abs(means[reference]), error_bar_of(found)
    upward = [factor for factor in sorted(measured) if factor >= reference]

    def within(limit: float) -> list[Fraction]:
        return list(takewhile(lambda each: each == reference or excess.get(each, math.inf) <= limit, upward))

    chain, width = within(tolerated), bar or 0.0
    return Verdict(
        reference,
        excess,
        bar,
        tolerated,
        largest=chain[-1],
        next_larger=next(iter(upward[len(chain) :]), None),
        lowest=within(tolerated - width)[-1],
        highest=within(tolerated + width)[-1],
    )


def make_answer(study: Study, results: Mapping[Branch, float | None], *, tolerance: float) -> Answer:
    """From the losses of all branches."""
    by_batch: dict[Fraction, list[Branch]] = {}
    for branch in study.branches:
        by_batch.setdefault(branch.factor, []).append(branch)
    chosen = {factor: _best_rate(branches, results) for factor, branches in by_batch.items()}
    measured = {n: {each.seed: loss for each, loss in best.items()} for n, best in chosen.items()}
    verdict, origin = decide(measured, tolerance=tolerance), study.origin
    rows = {factor: _row(study, each, chosen[factor], verdict) for factor, each in by_batch.items()}
    noise = noise_scale_of(origin.run, by=origin.step)
    answer: Answer = {
        "run": str(origin.run.path),
        "step": origin.step,
        **study.common,
        "loss": "held-out" if study.is_held_out else "training",
        "tolerance": tolerance,
        "seeds": study.num_seeds,
        "batches": list(rows.values()),
        "critical": None,
        "noise_scale": noise and asdict(noise),
        "sentence": f"At step {origin.step:,} no branch ended with a finite loss: try a smaller --lr-grid.",
    }
    if verdict is None:
        return answer
    answer["critical"] = {
        **{key: rows[verdict.largest][key] for key in ("factor", "sequences", "tokens")},
        "reference": str(verdict.reference),
        "next_larger": verdict.next_larger and str(verdict.next_larger),
        "lowest": str(verdict.lowest),
        "highest": str(verdict.highest),
    }
    scale = "of the run was not logged by then (gns.enabled)"
    if noise is not None:
        scale = f"({noise.where}) is {noise.number}"
        if noise.is_known:
            scale += " sequences"
    answer["sentence"] = f"At step {origin.step:,} {_finding(answer)}. The noise scale {scale}."
    return answer


def _row(
    study: Study, branches: Sequence[Branch], best: Mapping[Branch, float], verdict: Verdict | None
) -> dict[str, Any]:
    """A batch and what its best branches came to; None where no branch of it ended with a loss."""
    factor, origin = branches[0].factor, study.origin
    row: dict[str, Any] = {"factor": str(factor)}
    row["sequences"] = float(factor) * origin.sequences_per_step
    row["tokens"] = float(factor) * origin.tokens_per_step
    row |= {"steps": branches[0].steps, "losses": {str(each.seed): loss for each, loss in best.items()}}
    row |= {"lr": None, "loss": None, "excess": None, "error_bar": None, "is_within": False, "is_edge": False}
    if best and verdict is not None:
        first, scales = next(iter(best)), sorted({branch.lr_scale for branch in branches})
        row |= {"lr": first.lr, "loss": fmean(best.values()), "excess": verdict.excess[factor]}
        row["is_within"] = row["excess"] <= verdict.tolerated
        # The best rate is the lowest or highest of a grid of several: a better one may lie outside.
        row["is_edge"] = len(scales) > 1 and first.lr_scale in (scales[0], scales[-1])
        if factor != verdict.reference:  # whose difference to itself has no error
            row["error_bar"] = verdict.error_bar
    return row


def _best_rate(branches: Sequence[Branch], results: Mapping[Branch, float | None]) -> dict[Branch, float]:
    """The branches of the learning rate with the lowest mean loss, and their losses.

    A rate without a loss of every seed does not count.
    """
    by_rate: dict[float, dict[Branch, float]] = {}
    # The learning rate is chosen for each batch alone: one for all would favour one batch.
    for branch in branches:
        loss = results[branch]
        if loss is not None:
            by_rate.setdefault(branch.lr_scale, {})[branch] = loss
    seeds = len({branch.seed for branch in branches})
    whole = [losses for losses in by_rate.values() if len(losses) == seeds]
    return min(whole, key=lambda losses: fmean(losses.values()), default={})


def _finding(answer: Answer) -> str:
    critical = answer["critical"]
    name = f"{number_text(critical['sequences'], 3)} sequences"
    size = f"{name} ({critical['tokens']:,.0f} tokens, {critical['factor']} x today's)"
    rule = f"within {answer['tolerance']:.2%} of the lowest, that of {critical['reference']} x"
    larger, lowest = critical["next_larger"], critical["lowest"]
    text = f"the critical batch is {size}: its loss is {rule}, that of {larger} x is not"
    if larger is None:
        text = f"the critical batch is at least {size}, the largest measured: its loss is {rule}"
    if lowest != critical["highest"]:
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


def cost_line(study: Study, num_done: int) -> str:
    """The cost of the branches, before the first one starts."""
    origin, total = study.origin, len(study.branches)
    steps = [branch.steps for branch in study.branches]
    batches = counted(len({branch.factor for branch in study.branches}), "batch")
    rates = counted(len({branch.lr_scale for branch in study.branches}), "learning rate")
    shape = f"{batches} x {rates} x {counted(study.num_seeds, 'seed')}"
    each = f"{study.tokens:,.0f} tokens ({min(steps):,} to {max(steps):,} steps)"
    cost = f"{(total - num_done) * study.tokens:,.0f} tokens to train; the run has trained {origin.tokens_seen:,}"
    return f"{total} branches ({shape}, {num_done} done) of {each} from step {origin.step:,}: {cost}"


def print_answer(answer: Answer, console: Console) -> None:
    rows = answer["batches"]
    lowest = min((abs(row["loss"]) for row in rows if row["losses"]), default=1.0)

    def cell(value: float | None, form: str, scale: float) -> str:
        return "-" if value is None else format(value / scale, form)

    def column(key: str, form: str, scale: float = 1.0) -> list[str]:
        return [cell(row[key], form, scale) for row in rows]

    columns = {
        "batch": [f"{row['factor']} x" for row in rows],
        "sequences": column("sequences", ",.3g"),
        "best lr": column("lr", ".3g"),
        f"{answer['loss']} loss": column("loss", ".4f"),
        "above\nthe best": column("excess", "+.2%", lowest),
        "+-": column("error_bar", ".2%", lowest),
        "within": [("no", "yes")[row["is_within"]] for row in rows],
    }
    title = f"Loss after {answer['tokens']:,} tokens from step {answer['step']:,}"
    table = Table(title=title, title_justify="left")
    for heading in columns:
        table.add_column(heading, justify="right", overflow="fold")
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    console.print(table)
    console.print(answer["sentence"], highlight=False, markup=False)
