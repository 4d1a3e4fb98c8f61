"""The gradient through a cut, and under activation checkpointing."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.contracts.report import NO_STATE, Verdict
from trainer.contracts.subject import CallFailed, NotTestable, Subject, one_line
from trainer.contracts.trial import Trial

REMEDY = (
    "Remove what detaches the state inside forward (detach(), .data, torch.no_grad(), a backward of its own that skips it): "
    "the trainer itself detaches it between cells"
)


def check_gradient(trial: Trial) -> Verdict:
    """The last cell's gradient with respect to parameters and incoming state, against the uncut row's."""
    if not trial.width:
        return Verdict("gradient", "not testable here", NO_STATE)
    with trial.in_mode(trial.modes[0]):
        try:
            return _judge(trial)
        except NotTestable as error:
            return Verdict("gradient", "not testable here", str(error))


def _judge(trial: Trial) -> Verdict:
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
        with subject.perturbed(math.sqrt(_eps(trial))):
            moved = _gradients(trial, subject(tokens, start, with_grad=True).logits[:, n:], targets, start)
        noise = max(_distance(moved, whole) * math.sqrt(_eps(trial)), noise)
    if size > math.sqrt(noise):
        text = (
            f"the gradient through a cut differs from the uncut row's by {size:.1e} of its norm (rounding: {noise:.0e})"
        )
        return Verdict("gradient", "broken", f"{text}{_words(cut, whole)}", size)
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


def _eps(trial: Trial) -> float:
    return float(torch.finfo(trial.subject.dtype).eps)


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


def _words(cut: list[Tensor], whole: list[Tensor]) -> str:
    """What arrives at the first state, and the usual cause."""
    ours, theirs = (float(each[0].double().norm()) for each in (cut, whole))
    if theirs == 0.0:
        text = "none reaches the incoming state at all"
    elif ours == 0.0:
        text = "none reaches the state before the cut"
    else:
        text = f"of the gradient of the first state, {ours / theirs:.0%} of the norm arrives"
    return f": {text}. {REMEDY}"


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
