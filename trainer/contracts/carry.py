"""Carry: a row read in cells equals the row read whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.contracts.forward import why_no_state
from trainer.contracts.report import NO_STATE, Verdict
from trainer.contracts.subject import CallFailed, NotTestable
from trainer.contracts.trial import CELLS, ROWS, TESTABLE, Trial, judge_samples, run_cells


@dataclass(frozen=True)
class _Cut:
    """A way to cut a row: the lengths of its cells, and the number of rows."""

    words: str
    lengths: list[int]
    rows: int
    is_needed: bool = True
    """The training step cuts rows like this; a model that cannot run the others need not."""


def check_carry(trial: Trial) -> Verdict:
    """Judge carry in the modes of the trial."""
    if not trial.width:
        problem = why_no_state(trial.subject, trial.cell)
        return Verdict("carry", "broken", problem) if problem else Verdict("carry", "not testable here", NO_STATE)
    if not trial.takes_cells:
        text = f"the model takes rows of {trial.cell} tokens and no longer ones, which its cells could be compared with"
        return Verdict("carry", "not testable here", text)
    notes: list[str] = []
    largest = 0.0
    for training in trial.modes:
        with trial.in_mode(training):
            try:
                found = judge_samples(lambda sample: _judge(trial, sample, notes))
            except NotTestable as error:
                return Verdict("carry", "not testable here", f"{error}{trial.mode_note}")
        if all(verdict.status == "broken" for verdict in found):
            verdict = found[0]
            where = "" if len(trial.modes) == 1 else f" (in {'train' if training else 'eval'}())"
            return Verdict("carry", "broken", f"{verdict.text}{where}", verdict.size, verdict.position)
        largest = max(largest, *(verdict.size or 0.0 for verdict in found))
    text = f"cells equal the uncut row to {largest:.1e}"
    return Verdict("carry", "held", "; ".join([text, *dict.fromkeys(notes)]) + trial.mode_note, largest)


def _cuts(trial: Trial) -> Iterator[_Cut]:
    n = trial.cell
    rows = _rows(trial)
    yield _Cut(f"cells of {n} tokens", [n] * CELLS, rows)
    if rows > 1:
        yield _Cut("cells of a single row", [(CELLS - 1) * n, n], 1)
    yield _Cut("ragged cells", [n - 1, n + 2, (CELLS - 2) * n - 1], rows, is_needed=False)
    yield _Cut("cells of one token", [CELLS * n - 2, 1, 1], rows, is_needed=False)


def _rows(trial: Trial) -> int:
    """A single row where rows depend on each other, which is judged elsewhere."""
    return ROWS if trial.facts.get("isolation") == "held" else 1


def _judge(trial: Trial, sample: int, notes: list[str]) -> Verdict:
    """One draw of tokens, all cuts."""
    subject, rows = trial.subject, _rows(trial)
    tokens = trial.tokens(rows, sample=sample)
    whole = subject(tokens, subject.zeros(rows)).logits
    limit = trial.limit(_effect(trial, tokens, whole))
    _require_equal_prefix(trial, tokens, whole, limit)
    largest = 0.0
    for cut in _cuts(trial):
        try:
            cells = run_cells(subject, tokens[: cut.rows], cut.lengths, subject.zeros(cut.rows)).logits
        except CallFailed as error:
            if cut.is_needed:
                raise NotTestable(str(error)) from error
            notes.append(f"{cut.words}: not testable here: {error}")
            continue
        errors = trial.errors(cells, whole[: cut.rows]).amax(0)  # [T]
        size = float(errors.max())
        largest = max(largest, size)
        if size > limit:
            position = int((errors > limit).nonzero()[0])
            why = _explain(trial, tokens, whole, errors, limit, cut)
            text = f"{why}: {cut.words} differ from the uncut row from position {position} on, by {size:.1e} of the "
            return Verdict("carry", "broken", f"{text}logits' spread (rounding: {trial.noise:.0e})", size, position)
    return _compare_none(trial, tokens, whole, limit, notes) or Verdict("carry", "held", "", largest)


def _compare_none(trial: Trial, tokens: Tensor, whole: Tensor, limit: float, notes: list[str]) -> Verdict | None:
    """The row from `None` instead of zeros; a verdict if it differs."""
    try:
        errors = trial.errors(trial.subject(tokens, None).logits, whole).amax(0)  # [T]
    except CallFailed as error:
        notes.append(f"state = None: not testable here: {error}")
        return None
    size = float(errors.max())
    if size <= limit:
        return None
    text = (
        f"state=None and zeros give other logits, by {size:.1e} of their spread. The trainer begins every group with zeros: "
        "a start that None alone has, such as a learned one, is never used and never trained. Take it where a row of the "
        "state is all zeros: torch.where(state.any(-1, keepdim=True), state, start)"
    )
    return Verdict("carry", "broken", text, size, int((errors > limit).nonzero()[0]))


def _effect(trial: Trial, tokens: Tensor, whole: Tensor) -> float:
    """How far the tokens of the first cell move the logits after it: what a lost state would lose."""
    other = tokens.clone()
    other[:, : trial.cell] = trial.others(tokens)[:, : trial.cell]
    moved = trial.subject(other, trial.subject.zeros(len(tokens))).logits
    return float(trial.errors(moved, whole)[:, trial.cell :].max())


def _require_equal_prefix(trial: Trial, tokens: Tensor, whole: Tensor, limit: float) -> None:
    """The first cell starts from the state that the row starts from; if it differs, the state is not why.

    Raises:
        NotTestable: it does.
    """
    first = trial.subject(tokens[:, : trial.cell], trial.subject.zeros(len(tokens))).logits
    size = float(trial.errors(first, whole[:, : trial.cell]).max())
    if size > limit:
        text = (
            f"the first cell, before any cut, differs from the uncut row by {size:.1e} already: results depend on the "
        )
        raise NotTestable(f"{text}length of the row (later tokens, batch statistics, expert capacity)")


def _explain(trial: Trial, tokens: Tensor, whole: Tensor, errors: Tensor, limit: float, cut: _Cut) -> str:
    """What the breach looks like."""
    if cut.words == "cells of one token" or cut.words == "ragged cells":
        return f"cells of {trial.cell} tokens carry the state, {cut.words} do not"
    if cut.rows < len(tokens):
        return "several rows carry the state, a single row does not"
    n, subject, rows = trial.cell, trial.subject, len(tokens)
    zeros = subject.zeros(rows)
    start = None if zeros is None else zeros + 0.25
    state, from_start = (subject.carried(subject(tokens[:, :n], s).state) for s in (subject.zeros(rows), start))
    if state is None or start is None or from_start is None:
        return "no state is returned"
    if not bool(from_start.any()):
        return "the returned state is all zeros: cells after the first start from zero"
    if torch.allclose(from_start.double(), start.double(), rtol=1e-12, atol=0):
        return "the returned state is the incoming one: a cell does not update it"
    second = tokens[:, n : 2 * n]
    given = subject(second, state).logits
    if _is_same(trial, given, subject(second, subject.zeros(rows)).logits, limit):
        return f"cells after the first start from zero: the incoming state is not used{_except(trial, tokens, whole, limit)}"
    unused = _unused(trial, tokens, state)
    if unused:
        text = f"part of the state is missing: {unused} of its {trial.width} numbers change no logit"
        return f"{text}{_except(trial, tokens, whole, limit)}"
    late = _lateness(trial, tokens, whole, state, limit)
    if late:
        return f"the returned state is that after {n - late} of {n} tokens: the last {late} are missing from it"
    return _explain_part(trial, errors)


def _lateness(trial: Trial, tokens: Tensor, whole: Tensor, state: Tensor, limit: float) -> int:
    """How many of the last tokens have to be read again to make the next cell right; 0 if that does not help.

    Exactly that many: after a lost short memory, reading any larger number again helps too.
    """
    n = trial.cell
    helps = []
    for late in range(1, n):
        try:
            again = trial.subject(tokens[:, n - late : 2 * n], state).logits[:, late:]
        except CallFailed:
            return 0
        if _is_same(trial, again, whole[:, n : 2 * n], limit):
            helps.append(late)
    return helps[0] if len(helps) == 1 else 0


def _except(trial: Trial, tokens: Tensor, whole: Tensor, limit: float) -> str:
    """Whether single rows or single tokens do carry."""
    n, subject = trial.cell, trial.subject
    try:
        alone = run_cells(subject, tokens[:1], [n] * CELLS, subject.zeros(1)).logits
        if len(tokens) > 1 and _is_same(trial, alone, whole[:1], limit):
            return " with several rows (a single row carries it)"
        singles = run_cells(subject, tokens[:1, : 2 * n], [1] * (2 * n), subject.zeros(1)).logits
        if _is_same(trial, singles, whole[:1, : 2 * n], limit):
            return " in cells of several tokens (cells of one token carry it)"
    except CallFailed:
        pass
    return ""


def _explain_part(trial: Trial, errors: Tensor) -> str:
    """A state that is there, but not all of it."""
    n = trial.cell
    second = errors[n : 2 * n]
    peak = float(second.max())
    wrong = (second > 0.1 * peak).nonzero().flatten()
    last = int(wrong[-1]) + 1
    if last <= max(n // 2, 1) or float(second[-1]) < 0.1 * peak:
        text = f"the first {last} positions of a cell are wrong, later ones hardly"
        return f"{text}: a short memory, such as a convolution's, is missing from the state"
    return "part of the state is missing or wrong (often the last inputs of a convolution, or positions that restart)"


def _unused(trial: Trial, tokens: Tensor, state: Tensor) -> str:
    """The range of numbers of the state on which no logit of the next cell depends; empty if there is none, or unknown."""
    leaf = state.clone().requires_grad_()
    n = trial.cell
    try:
        logits = trial.subject(tokens[:, n : 2 * n], leaf, with_grad=True).logits
        weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype, device=logits.device).view_as(logits)
        (gradient,) = torch.autograd.grad((logits.nan_to_num(0, 0, 0) * weights).sum(), leaf)
    except (CallFailed, RuntimeError):
        return ""
    idle = (gradient == 0).all(0).nonzero().flatten().tolist()
    if not idle or len(idle) == trial.width:
        return ""
    is_range = idle[-1] - idle[0] + 1 == len(idle)
    return f"numbers {idle[0]} to {idle[-1]}" if is_range else f"{len(idle)}"


def _is_same(trial: Trial, found: Tensor, wanted: Tensor, limit: float) -> bool:
    return bool(trial.errors(found, wanted).max() <= limit)


def check_state_used(trial: Trial) -> Verdict:
    """Whether another incoming state changes the logits."""
    if not trial.width:
        return Verdict("state_used", "not testable here", NO_STATE)
    subject, tokens = trial.subject, trial.tokens(length=trial.cell)
    state = trial.start_state(ROWS)
    with_state = subject(tokens, state).logits
    size = float(trial.errors(with_state, subject(tokens, subject.zeros(ROWS)).logits).max())
    if size > TESTABLE * trial.noise:
        return Verdict("state_used", "held", f"another state moves the logits by {size:.1e} of their spread", size)
    text = "logits do not depend on the incoming state: the ledger carries it for nothing"
    return Verdict("state_used", "warning", text, size)
