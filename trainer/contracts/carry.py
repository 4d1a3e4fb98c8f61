"""Carry: a row read in cells equals the row read whole, in its logits, at the precision of training, and in its gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.contracts.forward import why_no_state
from trainer.contracts.report import NO_STATE, Verdict
from trainer.contracts.subject import CallFailed, NotTestable, Subject, one_line
from trainer.contracts.trial import CELLS, ROWS, TESTABLE, Trial, judge_samples, run_cells

ALLOWED = 8.0
"""Errors of the cut row, in units of those that the uncut row has at this precision."""
REMEDY = (
    "Remove what detaches the state inside forward (detach(), .data, torch.no_grad(), a backward of its own that skips it): "
    "the trainer itself detaches it between cells"
)


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
            why = _explain(trial, tokens, limit, cut)
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


def _explain(trial: Trial, tokens: Tensor, limit: float, cut: _Cut) -> str:
    """What the breach looks like, as far as one more call shows it."""
    if cut.words in ("cells of one token", "ragged cells"):
        return f"cells of {trial.cell} tokens carry the state, {cut.words} do not"
    if cut.rows < len(tokens):
        return "several rows carry the state, a single row does not"
    n, subject, rows = trial.cell, trial.subject, len(tokens)
    zeros = subject.zeros(rows)
    assert zeros is not None
    start = zeros + 0.25
    state, from_start = (subject.carried(subject(tokens[:, :n], s).state) for s in (zeros, start))
    if state is None or from_start is None:
        return "no state is returned"
    if not bool(from_start.any()):
        return "the returned state is all zeros: cells after the first start from zero"
    if torch.allclose(from_start.double(), start.double(), rtol=1e-12, atol=0):
        return "the returned state is the incoming one: a cell does not update it"
    second = tokens[:, n : 2 * n]
    if float(trial.errors(subject(second, state).logits, subject(second, zeros).logits).max()) <= limit:
        return "cells after the first start from zero: the incoming state is not used"
    if unused := _unused(trial, tokens, state):
        return f"part of the state is missing: {unused} of its {trial.width} numbers change no logit"
    return "part of the state is missing or wrong"


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
        return _judge_rounding(trial, subject, tokens, exact, whole.logits, effect, check, name)
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
    rounding = ALLOWED * _eps(subject.autocast or subject.dtype)
    if float(moved[:, :at].max()) > max(0.5 * float(moved[:, at:].max()), rounding):
        return f"later tokens move the logits in {name}"
    rows = other.clone()
    rows[0] = tokens[0]
    moved = trial.errors(subject(rows, subject.zeros(ROWS)).logits, whole)
    if trial.facts.get("isolation") == "held" and float(moved[0].max()) > max(0.5 * float(moved[1:].max()), rounding):
        return f"other rows move the logits of row 0 in {name}"
    return ""


def _judge_rounding(
    trial: Trial, subject: Subject, tokens: Tensor, exact: Tensor, whole: Tensor, effect: float, check: str, name: str
) -> Verdict:
    n = trial.cell
    own = float(trial.errors(whole, exact)[:, n:].square().mean().sqrt())
    rounding = max(own, _rounding_of_states(trial, subject, tokens), _eps(subject.autocast or subject.dtype) / 8)
    cells = run_cells(subject, tokens, [n] * CELLS, subject.zeros(ROWS)).logits
    errors = trial.errors(cells, exact)
    size = float(errors[:, n:].square().mean().sqrt())
    if size > ALLOWED * rounding:
        position = int((errors.amax(0) > ALLOWED * rounding).nonzero()[0]) if (errors > ALLOWED * rounding).any() else n
        text = (
            f"in {name} cells differ from the exact row by {size:.1e} of the logits' spread, the uncut row by {own:.1e}"
        )
        return Verdict(check, "broken", text, size, position)
    if effect < ALLOWED * rounding:
        text = f"rounding in {name} ({rounding:.0e}) hides what a lost state would change ({effect:.0e})"
        return Verdict(check, "not testable here", text, size)
    text = f"in {name} cells are as exact as the uncut row ({size:.1e}, {own:.1e})"
    return Verdict(check, "held", text, size)


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


def check_gradient(trial: Trial) -> Verdict:
    """The last cell's gradient with respect to parameters and incoming state, against the uncut row's."""
    if not trial.width:
        return Verdict("gradient", "not testable here", NO_STATE)
    with trial.in_mode(trial.modes[0]):
        try:
            return _judge_gradient(trial)
        except NotTestable as error:
            return Verdict("gradient", "not testable here", str(error))


def _judge_gradient(trial: Trial) -> Verdict:
    subject = trial.subject
    n = trial.cell
    tokens, state = trial.tokens(length=2 * n), trial.start_state()
    assert state is not None
    targets = trial.tokens(length=n, sample=77).to(subject.device)
    start = state.clone().requires_grad_()
    alone = _with_detached_state(trial, tokens, state, targets)
    if alone is not None:
        return alone
    try:
        whole = _gradients(trial, subject(tokens, start, with_grad=True).logits[:, n:], targets, start)
        first = subject(tokens[:, :n], start, with_grad=True)
        if first.state is not None and not first.state.requires_grad:
            text = "the returned state is detached: no gradient can flow from one cell into the last one. The ledger detaches "
            return Verdict("gradient", "warning", f"{text}it anyway; with train.tbptt_cells > 1 it matters")
        second = subject(tokens[:, n:], first.state, with_grad=True)
        cut = _gradients(trial, second.logits, targets, start)
    except CallFailed as error:
        text = f"backward through the incoming state fails ({error}). Training that detaches states runs; with "
        return Verdict("gradient", "warning", f"{text}train.tbptt_cells > 1 it does not")
    size = _distance(cut, whole)
    noise = trial.noise
    if size > math.sqrt(noise):  # the gradient may be worse conditioned than the logits
        with subject.perturbed(math.sqrt(_eps(trial.subject.dtype))):
            moved = _gradients(trial, subject(tokens, start, with_grad=True).logits[:, n:], targets, start)
        noise = max(_distance(moved, whole) * math.sqrt(_eps(trial.subject.dtype)), noise)
    if size > math.sqrt(noise):
        text = (
            f"the gradient through a cut differs from the uncut row's by {size:.1e} of its norm (rounding: {noise:.0e})"
        )
        return Verdict("gradient", "broken", f"{text}. {REMEDY}", size)
    return Verdict("gradient", "held", f"the gradient through a cut equals the uncut row's to {size:.1e}", size)


def _with_detached_state(trial: Trial, tokens: Tensor, state: Tensor, targets: Tensor) -> Verdict | None:
    """The last cell as the training step runs it; a verdict if its gradient fails."""
    subject, n = trial.subject, trial.cell
    carried = subject.carried(subject(tokens[:, :n], state).state)
    try:
        logits = subject(tokens[:, n:], carried, with_grad=True).logits
        found = _gradients(trial, logits, targets)
    except CallFailed as error:
        return Verdict("gradient", "broken", f"backward of a cell that continues a group fails: {error}")
    if not all(each.isfinite().all() for each in found):
        return Verdict("gradient", "broken", "the gradient of a cell that continues a group is not finite")
    return None


def _eps(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps)


def _gradients(
    trial: Trial, logits: Tensor, targets: Tensor, *leaves: Tensor, of: nn.Module | None = None
) -> list[Tensor]:
    """Gradients of the cross-entropy with respect to the leaves and then to all trained parameters; zeros where unused.

    Raises:
        CallFailed: backward raises.
        NotTestable: nothing is trained.
    """
    parameters = [p for p in (of or trial.subject.model).parameters() if p.requires_grad]
    if not parameters or not logits.requires_grad:
        raise NotTestable("no parameter is trained")
    loss = F.cross_entropy(logits.flatten(0, 1).double(), targets.flatten())
    wanted = [*leaves, *parameters]
    try:
        found = torch.autograd.grad(loss, wanted, allow_unused=True)
    except Exception as error:  # autograd functions of the user's own may raise anything
        raise CallFailed(f"backward: {one_line(error)}") from error
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, wanted, strict=True)]


def _distance(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The larger of the relative distances of the leaf's gradient (first) and of all parameters' together."""
    parts = [(found[:1], wanted[:1]), (found[1:], wanted[1:])]
    sizes = []
    for ours, theirs in parts:
        norm = math.sqrt(sum(float(each.double().square().sum()) for each in theirs))
        gap = math.sqrt(sum(float((a.double() - b.double()).square().sum()) for a, b in zip(ours, theirs, strict=True)))
        sizes.append(gap / norm if norm else (0.0 if gap == 0.0 else math.inf))
    return math.inf if any(math.isnan(size) for size in sizes) else max(sizes)


def check_checkpointing(trial: Trial) -> Verdict:
    """Gradient of a forward that runs a second time, as activation checkpointing runs it, against the plain one.

    `torch.utils.checkpoint` itself would import the compiler, which takes longer than all checks. What it does to the model is
    this: the same forward twice on the same object with the same random numbers, the second one with the graph that counts.
    """
    subject: Subject = trial.subject
    tokens, state = trial.tokens(length=trial.cell), trial.start_state()
    targets = trial.tokens(length=trial.cell, sample=77).to(subject.device)
    with trial.in_mode(True):
        try:
            model = subject.fresh()
            plain = _gradients(trial, subject(tokens, state, with_grad=True, on=model).logits, targets, of=model)
        except (NotTestable, CallFailed) as error:
            return Verdict("checkpointing", "not testable here", str(error))
        try:
            recomputed = _recomputed(trial, subject.fresh(), tokens, state, targets)
        except CallFailed as error:
            return Verdict("checkpointing", "broken", f"recomputing the forward fails: {error}")
    size = _distance([plain[0].new_zeros(()), *recomputed], [plain[0].new_zeros(()), *plain])
    if size > math.sqrt(trial.noise):
        text = f"recomputing the forward changes the gradient by {size:.1e} of its norm: the second run of the "
        return Verdict(
            "checkpointing", "broken", f"{text}same forward differs, as if a hidden state had advanced", size
        )
    return Verdict("checkpointing", "held", f"recomputation gives the same gradient, to {size:.1e}", size)


def _recomputed(trial: Trial, model: nn.Module, tokens: Tensor, state: Tensor | None, targets: Tensor) -> list[Tensor]:
    trial.subject(tokens, state, with_grad=True, on=model)
    logits = trial.subject(tokens, state, with_grad=True, on=model).logits
    return _gradients(trial, logits, targets, of=model)
