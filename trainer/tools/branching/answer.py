"""The answer of the branches of a checkpoint: a row per batch, the verdict, and the noise scale beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from statistics import fmean
from typing import Any

from trainer.tools.branching.results import BranchResult
from trainer.tools.branching.study import Branch, Study
from trainer.tools.branching.verdict import Compared, Measured, Verdict, decide
from trainer.tools.runs.noise_scale import NoiseScale, noise_scale_of
from trainer.wording import counted, number_text


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

    @property
    def tokens_per_sequence(self) -> float:
        """Target tokens, on average."""
        origin = self.study.origin
        return origin.tokens_per_step / origin.sequences_per_step


def make_answer(study: Study, results: Mapping[str, BranchResult], *, tolerance: float) -> Answer:
    """From the results of all branches, by name."""
    by_batch: dict[Fraction, list[Branch]] = {}
    for branch in study.branches:
        by_batch.setdefault(branch.batch.factor, []).append(branch)
    chosen = {factor: _best_rate(branches, results) for factor, branches in by_batch.items()}
    measured = [
        Measured(factor, {branch.seed: loss for branch, loss in best.items()}) for factor, best in chosen.items()
    ]
    verdict = decide(measured, tolerance=tolerance)
    compared = {each.factor: each for each in verdict.compared} if verdict is not None else {}
    rows = []
    for each in measured:
        branches, best = by_batch[each.factor], list(chosen[each.factor])
        scales = sorted({branch.lr_scale for branch in branches})
        scale = best[0].lr_scale if best else None
        rows.append(
            BatchRow(
                branch=branches[0],
                sequences=float(each.factor) * study.origin.sequences_per_step,
                step_tokens=float(each.factor) * study.origin.tokens_per_step,
                lr=best[0].lr if best else None,
                lr_scale=scale,
                is_edge=len(scales) > 1 and scale in (scales[0], scales[-1]),
                measured=each,
                tokens=fmean(results[branch.name].tokens for branch in best) if best else None,
                compared=compared.get(each.factor),
            )
        )
    return Answer(study, tolerance, rows, verdict, noise_scale_of(study.origin.run, by=study.origin.step))


def _best_rate(branches: Sequence[Branch], results: Mapping[str, BranchResult]) -> dict[Branch, float]:
    """The branches of the learning rate with the lowest mean loss, and their losses; a rate without a loss of every seed does
    not count."""
    by_rate: dict[float, dict[Branch, float]] = {}
    for branch in branches:
        loss = results[branch.name].loss
        if loss is not None:
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
    size = (
        f"{number_text(largest.sequences, 3)} sequences ({largest.step_tokens:,.0f} tokens, {largest.factor} x today's)"
    )
    best = f"the lowest, that of {verdict.reference} x"
    rule = f"within {answer.tolerance:.2%}" + (" or the error bars" if _num_seeds(study) > 1 else "")
    if verdict.next_larger is None:
        text = f"the critical batch is at least {size}, the largest measured: its loss is {rule} of {best}"
    elif verdict.largest == min(row.factor for row in answer.rows):
        text = (
            f"the critical batch is below {_size_of(answer, verdict.next_larger)}: only the smallest batch measured, "
        )
        text += f"{size}, is {rule} of {best}"
    else:
        text = f"the critical batch is {size}: its loss is {rule} of {best}, that of {verdict.next_larger} x is not"
    if verdict.is_unresolved:
        text += "; the error bars, not the tolerance, decided: more seeds or tokens may lower it"
    if verdict.beyond:
        text += f"; {', '.join(map(str, verdict.beyond))} x again within it is noise"
    edges = ", ".join(f"{row.factor} x" for row in answer.rows if row.is_edge)
    if edges:
        text += f". The best learning rate of {edges} is at the edge of the grid: widen --lr-grid"
    return f"At step {study.origin.step:,} {text}. {noise_sentence(answer)}"


def noise_sentence(answer: Answer) -> str:
    """The noise scale of the same checkpoint."""
    noise = answer.noise
    if noise is None:
        return "The run logged no noise scale by then (gns.enabled)."
    if not noise.is_known:
        return f"The noise scale ({noise.where}) is not known yet: it has neither a lower nor an upper bound."
    found = [_in_both(answer, "", noise.value)] if noise.value is not None else []
    found += [_in_both(answer, "at least ", noise.low)]
    found += [_in_both(answer, "at most ", noise.high)] if noise.high is not None else []
    return f"The noise scale ({noise.where}) is {', '.join(found)}."


def _in_both(answer: Answer, before: str, value: float) -> str:
    return f"{before}{number_text(value, 3)} sequences ({value * answer.tokens_per_sequence:,.0f} tokens)"


def _size_of(answer: Answer, factor: Fraction) -> str:
    return f"{number_text(answer.row(factor).sequences, 3)} sequences ({factor} x today's)"


def _num_seeds(study: Study) -> int:
    return len({branch.seed for branch in study.branches})


def to_json(answer: Answer) -> dict[str, Any]:
    """For programs: numbers unrounded, factors as text."""
    study, verdict = answer.study, answer.verdict
    return {
        "run": str(study.origin.run.path),
        "step": study.origin.step,
        **study.common,
        "lr_in_force": study.origin.lr,
        "lr_rule": study.lr_rule,
        "tolerance": answer.tolerance,
        "seeds": _num_seeds(study),
        "impossible": list(study.impossible),
        "tokens_per_sequence": answer.tokens_per_sequence,
        "batches": [_row_json(row) for row in answer.rows],
        "reference": None if verdict is None else str(verdict.reference),
        "critical": None if verdict is None else _critical_json(answer, verdict),
        "noise_scale": None if answer.noise is None else asdict(answer.noise),
        "sentence": sentence(answer),
    }


def _critical_json(answer: Answer, verdict: Verdict) -> dict[str, Any]:
    largest = answer.row(verdict.largest)
    return {
        "factor": str(verdict.largest),
        "sequences": largest.sequences,
        "tokens": largest.step_tokens,
        "next_larger": None if verdict.next_larger is None else str(verdict.next_larger),
        "is_unresolved": verdict.is_unresolved,
    }


def _row_json(row: BatchRow) -> dict[str, Any]:
    compared = row.compared
    return {
        "factor": str(row.factor),
        "sequences": row.sequences,
        "tokens": row.step_tokens,
        "micro_batches": row.branch.batch.micro_batches,
        "row_share": str(row.branch.batch.row_share),
        "steps": row.branch.steps,
        "trained_tokens": row.tokens,
        "lr": row.lr,
        "lr_scale": row.lr_scale,
        "is_edge": row.is_edge,
        "losses": {str(seed): loss for seed, loss in row.measured.losses.items()},
        "loss": row.measured.mean if row.measured.losses else None,
        "error": row.measured.error if row.measured.losses else None,
        "excess": None if compared is None else compared.excess,
        "excess_error": None if compared is None else compared.error,
        "allowed": None if compared is None else compared.allowed,
        "is_within": compared is not None and compared.is_within,
    }


def cost_lines(study: Study, num_done: int, num_slots: int) -> list[str]:
    """What is to come, before it starts."""
    origin, num_todo = study.origin, len(study.branches) - num_done
    batches = len({branch.batch.factor for branch in study.branches})
    rates = len({branch.lr_scale for branch in study.branches})
    seeds = _num_seeds(study)
    shape = f"{counted(batches, 'batch')} x {counted(rates, 'learning rate')} x {counted(seeds, 'seed')}"
    done = f", of which {num_done} are done" if num_done else ""
    kind = "held-out loss" if study.is_held_out else "training loss over the last quarter (eval.holdout_fraction is 0)"
    steps = [branch.steps for branch in study.branches]
    lines = [
        f"{counted(len(steps), 'branch')} from step {origin.step:,} of {origin.run.path}: {shape}{done}",
        f"each trains {study.tokens:,.0f} tokens ({study.tokens_note}) in {min(steps):,} to {max(steps):,} steps; "
        f"what counts is the {kind}",
        f"learning rate: {number_text(origin.lr)} in force, constant, times factor^{_exponent_text(study)} ({study.lr_rule}), "
        f"times {', '.join(number_text(scale) for scale in sorted({b.lr_scale for b in study.branches}))}",
        *study.impossible,
    ]
    total = num_todo * study.tokens
    rate = origin.tokens_per_sec
    predicted = "unknown time (the run logged no tokens_per_sec)"
    if rate:
        predicted = (
            f"about {_duration(total / rate / num_slots)} at the run's {rate:,.0f} tokens/s, plus the start of each"
        )
    at_once = f", {num_slots} at once" if num_slots > 1 else ""
    lines.append(f"cost: {counted(num_todo, 'branch')}{at_once}, {total:,.0f} tokens, {predicted}")
    return lines


def _exponent_text(study: Study) -> str:
    return {"none": "0", "sqrt": "0.5", "linear": "1"}[study.lr_rule]


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
