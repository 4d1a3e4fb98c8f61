"""The answer of the branches of a checkpoint: the largest batch whose loss after equal tokens is that of the best batch.

As data, as a sentence, as a table, and as a picture (extra `report`: plotly).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console

from trainer.tools.branching.run_branches import BranchResult
from trainer.tools.branching.study import Branch, Study
from trainer.tools.fitted_table import Column, fitted_table
from trainer.tools.pictures import save_picture
from trainer.tools.runs.noise_scale import NoiseScale, noise_scale_of
from trainer.wording import counted, duration_text, number_text

ERRORS_WIDE = 2.0  # half-width of an error bar, in standard errors
Losses = Mapping[int, float]
"""Of a batch at its best learning rate, by seed; empty: no branch of it ended with a loss."""


@dataclass(frozen=True)
class Compared:
    """A batch against the reference.

    Args:
        excess: mean loss above the reference's.
        error: standard error of `excess`; None with a single seed.
        allowed: the larger of the tolerance and the error bar.
    """

    excess: float
    error: float | None
    allowed: float

    @property
    def is_within(self) -> bool:
        """Whether the excess is allowed."""
        return self.excess <= self.allowed


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
    compared: Mapping[Fraction, Compared]
    largest: Fraction
    next_larger: Fraction | None
    is_unresolved: bool


def standard_error(losses: Losses) -> float | None:
    """Of the mean over seeds; None with a single one."""
    return stdev(losses.values()) / math.sqrt(len(losses)) if len(losses) > 1 else None


def decide(measured: Mapping[Fraction, Losses], *, tolerance: float) -> Verdict | None:
    """Compare every batch with the one of the lowest mean loss; None if no batch has a loss.

    Differences are taken seed by seed, since branches of one seed read the same data. A batch without a loss is not within.

    Args:
        tolerance: relative to the loss of the reference.
    """
    means = {factor: fmean(losses.values()) for factor, losses in sorted(measured.items()) if losses}
    if not means:
        return None
    reference = min(means, key=lambda factor: means[factor])
    tolerated = tolerance * abs(means[reference])
    compared = {}
    for factor in means:
        differences = {seed: loss - measured[reference][seed] for seed, loss in measured[factor].items()}
        error = standard_error(differences)
        allowed = max(tolerated, ERRORS_WIDE * (error or 0.0))
        compared[factor] = Compared(fmean(differences.values()), error, allowed)
    upward = [factor for factor in sorted(measured) if factor >= reference]
    outside = (factor for factor in upward if factor not in compared or not compared[factor].is_within)
    next_larger = next(outside, None)
    chain = [factor for factor in upward if next_larger is None or factor < next_larger]
    is_unresolved = any(compared[factor].excess > tolerated for factor in chain)
    return Verdict(reference, compared, chain[-1], next_larger, is_unresolved)


@dataclass(frozen=True)
class BatchRow:
    """One batch.

    Args:
        best: a branch of its best learning rate; None: no rate gave a loss with every seed.
        is_edge: that rate is the lowest or highest of a grid of several: a better one may lie outside.
        tokens: that a branch trained on, averaged over seeds.
        compared: None without a loss.
    """

    branch: Branch
    sequences: float
    step_tokens: float
    best: Branch | None
    is_edge: bool
    losses: Losses
    tokens: float | None
    compared: Compared | None

    @property
    def factor(self) -> Fraction:
        """Of today's batch."""
        return self.branch.batch.factor

    @property
    def mean(self) -> float:
        """Loss over seeds."""
        return fmean(self.losses.values())

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        compared, best = self.compared, self.best
        return {
            "factor": str(self.factor),
            "sequences": self.sequences,
            "tokens": self.step_tokens,
            "micro_batches": self.branch.batch.micro_batches,
            "row_share": str(self.branch.batch.row_share),
            "steps": self.branch.steps,
            "trained_tokens": self.tokens,
            "lr": best and best.lr,
            "lr_scale": best and best.lr_scale,
            "is_edge": self.is_edge,
            "losses": {str(seed): loss for seed, loss in self.losses.items()},
            "loss": self.mean if self.losses else None,
            "error": standard_error(self.losses),
            "excess": compared and compared.excess,
            "excess_error": compared and compared.error,
            "allowed": compared and compared.allowed,
            "is_within": compared is not None and compared.is_within,
        }


@dataclass(frozen=True)
class Answer:
    """All that a call says at its end."""

    study: Study
    tolerance: float
    rows: Mapping[Fraction, BatchRow]
    verdict: Verdict | None
    noise: NoiseScale | None

    def to_json(self) -> dict[str, Any]:
        """For programs: numbers unrounded, factors as text."""
        study, verdict, critical = self.study, self.verdict, None
        if verdict is not None:
            largest = self.rows[verdict.largest]
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
            "tolerance": self.tolerance,
            "seeds": study.num_seeds,
            "impossible": list(study.impossible),
            "tokens_per_sequence": study.origin.tokens_per_step / study.origin.sequences_per_step,
            "batches": [row.to_json() for row in self.rows.values()],
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
    measured = {n: {branch.seed: loss for branch, loss in best.items()} for n, best in chosen.items()}
    verdict = decide(measured, tolerance=tolerance)
    rows = {}
    for factor, branches in by_batch.items():
        best, scales = list(chosen[factor]), sorted({branch.lr_scale for branch in branches})
        rows[factor] = BatchRow(
            branch=branches[0],
            sequences=float(factor) * study.origin.sequences_per_step,
            step_tokens=float(factor) * study.origin.tokens_per_step,
            best=best[0] if best else None,
            is_edge=bool(best) and len(scales) > 1 and best[0].lr_scale in (scales[0], scales[-1]),
            losses=measured[factor],
            tokens=fmean(results[branch].tokens for branch in best) if best else None,
            compared=None if verdict is None else verdict.compared.get(factor),
        )
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
    largest = answer.rows[verdict.largest]
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
    if edges := ", ".join(f"{row.factor} x" for row in answer.rows.values() if row.is_edge):
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
        predicted = (
            f"about {took} of training at the run's {rate:,.0f} tokens/s; starting each process takes longer still"
        )
    at_once = f", {num_slots} at once" if num_slots > 1 else ""
    return [
        f"{counted(len(steps), 'branch')} from step {origin.step:,} of {origin.run.path}: {shape}{done}",
        f"each trains {study.tokens:,.0f} tokens in {min(steps):,} to {max(steps):,} steps; the {kind} decides",
        *study.impossible,
        f"cost: {counted(num_todo, 'branch')}{at_once}, {total:,.0f} tokens, {predicted}",
    ]


def print_answer(answer: Answer, console: Console) -> None:
    """Table and sentence."""
    rows, study = answer.rows.values(), answer.study
    scale = 1.0 if answer.verdict is None else abs(answer.rows[answer.verdict.reference].mean)

    def above(row: BatchRow) -> str:
        if row.compared is None:
            return "-"
        return _with_error(row.compared.excess / scale, row.compared.error and row.compared.error / scale, "+.2%")

    columns = [
        Column("batch", [f"{row.factor} x" for row in rows], "right"),
        Column("sequences", [number_text(row.sequences, 3) for row in rows], "right"),
        Column("tokens", [f"{row.step_tokens:,.0f}" for row in rows], "right", leave_out=1),
        Column("steps", [f"{row.branch.steps:,}" for row in rows], "right", leave_out=2),
        Column("best lr", [number_text(row.best.lr, 3) if row.best else "-" for row in rows], "right"),
        Column(
            "held-out loss" if study.is_held_out else "training loss",
            [_with_error(row.mean, standard_error(row.losses), ".4f") if row.losses else "not finite" for row in rows],
            "right",
        ),
        Column("above\nthe best", [above(row) for row in rows], "right"),
        Column("within", ["yes" if row.compared and row.compared.is_within else "no" for row in rows]),
    ]
    title = f"Loss after {study.tokens:,.0f} tokens from step {study.origin.step:,}; +- one standard error"
    console.print(
        fitted_table(columns, width=console.width, hint="; --json has all", title=title, title_justify="left")
    )
    console.print(sentence(answer), highlight=False, markup=False)


def _with_error(value: float, error: float | None, form: str) -> str:
    return f"{value:{form}}" + ("" if error is None else f" +- {error:{form.lstrip('+')}}")


def draw(answer: Answer, out: Path) -> None:
    """Write the picture: loss against batch with error bars, what is within, and the noise scale's interval.

    Raises:
        UserError: the file cannot be written, or plotly is not installed.
    """
    rows = [row for row in answer.rows.values() if row.losses]
    xs = [row.sequences for row in rows]
    bars = [ERRORS_WIDE * (standard_error(row.losses) or 0.0) for row in rows]
    name = f"best learning rate, {ERRORS_WIDE:g} standard errors"
    trace = {"x": xs, "y": [row.mean for row in rows], "error_y": {"array": bars}, "mode": "lines+markers"}
    shapes: list[dict[str, Any]] = []
    if answer.verdict is not None:
        best = answer.rows[answer.verdict.reference].mean
        words = f"within {answer.tolerance:.2%} of the lowest"
        shapes.append(_area(words, "green", xref="paper", x0=0, x1=1, y0=best, y1=best + answer.tolerance * abs(best)))
        shapes.append(_vertical("largest batch within", "green", answer.rows[answer.verdict.largest].sequences))
    noise = answer.noise
    if noise is not None:
        high = 1.2 * max([noise.low, *xs]) if noise.high is None else noise.high
        words = f"{noise.key}: {'lower bound, no upper one' if noise.high is None else 'bounds'}"
        shapes.append(_area(words, "orange", yref="paper", x0=noise.low, x1=high, y0=0, y1=1))
        if noise.value is not None:
            shapes.append(_vertical(noise.key, "orange", noise.value))
    kind = "held-out loss" if answer.study.is_held_out else "training loss"
    ticks = {"type": "log", "tickvals": xs, "ticktext": [number_text(x, 3) for x in xs]}
    layout = {
        "xaxis": {"title": {"text": "batch, sequences"}, **ticks},
        "yaxis": {"title": {"text": f"{kind} after {answer.study.tokens:,.0f} tokens"}},
        "legend": {"orientation": "v"},
        "shapes": shapes,
    }
    title = f"{answer.study.origin.run.name}, branches from step {answer.study.origin.step:,}"
    save_picture([{**trace, "name": name, "showlegend": True}], layout, out, title=title)


def _area(name: str, color: str, **ends: Any) -> dict[str, Any]:
    look = {"fillcolor": color, "opacity": 0.15, "line": {"width": 0}, "layer": "below"}
    return {"type": "rect", "name": name, "showlegend": True, **look, **ends}


def _vertical(name: str, color: str, at: float) -> dict[str, Any]:
    ends = {"yref": "paper", "x0": at, "x1": at, "y0": 0, "y1": 1}
    return {"type": "line", "name": name, "showlegend": True, "line": {"color": color, "dash": "dash"}, **ends}
