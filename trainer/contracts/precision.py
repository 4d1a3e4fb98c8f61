"""The second judge: the same rows at the precision of training, against the exact result."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.contracts.report import Verdict
from trainer.contracts.subject import CallFailed, NotTestable, Subject
from trainer.contracts.trial import CELLS, ROWS, Trial, run_cells

ALLOWED = 8.0
"""Errors of the cut row, in units of those that the uncut row has at this precision."""


def check_precision(trial: Trial, subject: Subject, *, check: str, name: str) -> Verdict:
    """Carry, causality and isolation at a lower precision.

    An honest cut row is as far from the exact result as the uncut row is; how far that is, is measured, not assumed. States
    are rounded to the dtype in which the model returns them, which counts as rounding too.

    Args:
        trial: the exact one.
        subject: the model at the lower precision.
        check, name: of the verdict, and of the precision in its text.
    """
    subject.is_pure, subject.training = trial.subject.is_pure, trial.modes[0]
    tokens = trial.tokens()
    exact, effect = _exact(trial, tokens)
    try:
        whole = subject(tokens, subject.zeros(ROWS))
        if not torch.isfinite(whole.logits[exact.isfinite()]).all():
            return Verdict(check, "broken", f"the logits are not finite in {name}")
        leak = "" if check == "carry" else _leaks(trial, subject, tokens, whole.logits, name)
        if leak:
            return Verdict(check, "broken", leak)
        if not trial.width:
            return Verdict(check, "held", f"causal, and rows are isolated, in {name} too")
        return _judge_carry(trial, subject, tokens, exact, whole.logits, effect, check, name)
    except CallFailed as error:
        return Verdict(check, "not testable here", f"in {name} {error}")
    except NotTestable as error:
        return Verdict(check, "not testable here", str(error))


def _exact(trial: Trial, tokens: Tensor) -> tuple[Tensor, float]:
    """The exact logits of the uncut row, and how far the first cell's tokens move those after it."""
    if "exact" not in trial.facts:
        other = tokens.clone()
        other[:, : trial.cell] = trial.others(tokens)[:, : trial.cell]
        with trial.in_mode(trial.modes[0]):
            exact, moved = (trial.subject(each, trial.subject.zeros(ROWS)).logits for each in (tokens, other))
        effect = trial.errors(moved, exact)[:, trial.cell :]
        trial.facts["exact"] = exact, float(effect.square().mean().sqrt()) if trial.width else 0.0
    found: tuple[Tensor, float] = trial.facts["exact"]
    return found


def _leaks(trial: Trial, subject: Subject, tokens: Tensor, whole: Tensor, name: str) -> str:
    """Later tokens or other rows that move logits; in calls of one shape, honest models give the same bits."""
    at = trial.length // 2
    other = trial.others(tokens)
    later = tokens.clone()
    later[:, at:] = other[:, at:]
    moved = trial.errors(subject(later, subject.zeros(ROWS)).logits, whole)
    rounding = ALLOWED * _eps(subject)
    if float(moved[:, :at].max()) > max(0.5 * float(moved[:, at:].max()), rounding):
        return f"later tokens move the logits in {name}"
    rows = other.clone()
    rows[0] = tokens[0]
    moved = trial.errors(subject(rows, subject.zeros(ROWS)).logits, whole)
    if trial.facts.get("isolation") == "held" and float(moved[0].max()) > max(0.5 * float(moved[1:].max()), rounding):
        return f"other rows move the logits of row 0 in {name}"
    return ""


def _judge_carry(
    trial: Trial, subject: Subject, tokens: Tensor, exact: Tensor, whole: Tensor, effect: float, check: str, name: str
) -> Verdict:
    n = trial.cell
    own = float(trial.errors(whole, exact)[:, n:].square().mean().sqrt())
    rounding = max(own, _rounding_of_states(trial, subject, tokens), _eps(subject) / 8)
    cells = run_cells(subject, tokens, [n] * CELLS, subject.zeros(ROWS)).logits
    errors = trial.errors(cells, exact)
    size = float(errors[:, n:].square().mean().sqrt())
    if size > ALLOWED * rounding:
        position = int((errors.amax(0) > ALLOWED * rounding).nonzero()[0]) if (errors > ALLOWED * rounding).any() else n
        text = (
            f"in {name} cells differ from the exact row by {size:.1e} of the logits' spread, the uncut row by {own:.1e}"
        )
        if check == "carry":
            text += _words_of_rounding(subject, tokens[:, :n], tokens[:, n : 2 * n])
        return Verdict(check, "broken", text, size, position)
    if effect < ALLOWED * rounding:
        text = f"rounding in {name} ({rounding:.0e}) hides what a lost state would change ({effect:.0e})"
        return Verdict(check, "not testable here", text, size)
    text = f"in {name} cells are as exact as the uncut row ({size:.1e}, {own:.1e})"
    return Verdict(check, "held", text, size)


def _words_of_rounding(subject: Subject, first: Tensor, second: Tensor) -> str:
    """Which dtype the state is rounded to, on the way in or out: rounding it once more changes not one bit."""
    state = subject.carried(subject(first, subject.zeros(ROWS)).state)
    assert state is not None
    given = subject(second, state).logits
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
        if torch.equal(subject(second, state.to(dtype).to(state.dtype)).logits, given):
            return f": the state is rounded to {name}, which loses what the recurrence has added up; keep it in float32"
    return ""


def _rounding_of_states(trial: Trial, subject: Subject, tokens: Tensor) -> float:
    """How far logits move if the exact incoming state is rounded to the dtype of the returned one."""
    n, exact = trial.cell, trial.subject
    with trial.in_mode(trial.modes[0]):
        state = exact.carried(exact(tokens[:, :n], exact.zeros(ROWS)).state)
        returned = subject(tokens[:, :n], subject.zeros(ROWS)).state
        if state is None or returned is None or not returned.is_floating_point():
            return 0.0
        second = tokens[:, n : 2 * n]
        rounded = state.to(returned.dtype).to(subject.ledger_dtype).to(state.dtype)
        moved = trial.errors(exact(second, rounded).logits, exact(second, state).logits)
    return float(moved.square().mean().sqrt())


def _eps(subject: Subject) -> float:
    return float(torch.finfo(subject.autocast or subject.dtype).eps)
