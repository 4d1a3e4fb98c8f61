"""The checks on short rows, each of which names a cause.

Carry: a row read in cells equals the row read whole, in logits and in gradients. Leaks: later tokens
(causality), other rows (isolation), documents before a reset (resets).
"""

from __future__ import annotations

import inspect
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.lab.contracts.subject import CallFailed, NotTestable, Result, Subject, gradients, norm, ratio
from trainer.lab.contracts.trial import CELLS, NO_STATE, ROWS, TESTABLE, Trial, Verdict, relative, run_cells, untestable

ALLOWED = 8.0  # errors of the cut row, over those of the uncut row at this precision
STATE_DRAWS = 8  # one draw of a discrete state may be the zeros that it is compared with
RETURNS_NONE = (
    "forward takes a state and returns none, so every cell starts from zero: return "
    "ModelOutput(..., state=...), or set state_width = 0 on a model without a state"
)
LEARNED_START = (
    "The trainer begins every group with zeros: a start that None alone has, such as a learned one, "
    "is never used and never trained (docs/contracts.md)"
)


class _Cut(NamedTuple):
    """A way to cut a row."""

    words: str
    lengths: list[int]  # of the cells
    rows: int
    is_needed: bool = True  # as in the training step; a model need not run the others


def check_carry(trial: Trial) -> Verdict:
    model = trial.subject.model
    if not trial.width:
        # `carry_flat` found no state in what forward returned.
        is_lost = hasattr(model, "state_layout")
        if is_lost and "state" in inspect.signature(model.forward).parameters:
            return Verdict("carry", "broken", RETURNS_NONE)
        why = getattr(model, "why_stateless", "") or NO_STATE
        # A context that grows needs no state, and without an argument there is none.
        if "grows with every token" in why or "takes no state" in why:
            why = f"{NO_STATE}: {why}"
        return untestable("carry", why)
    if not trial.takes_cells:
        text = f"the model takes rows of {trial.cell} tokens and no longer ones"
        return untestable("carry", f"{text}, which its cells could be compared with")
    return trial.judge("carry", _judge)


def _judge(trial: Trial, sample: int) -> Verdict:
    subject, n, rows = trial.subject, trial.cell, ROWS
    if trial.facts.get("isolation") != "held":
        rows = 1  # rows depend on each other, which is judged elsewhere
    tokens = trial.tokens(rows, sample=sample)
    whole = subject(tokens, subject.zeros(rows)).logits
    # What a lost state would lose: how far the tokens of the first cell move the logits after it.
    effect = trial.errors(_with_other_start(trial, tokens), whole)[:, n:].max()
    limit = trial.limit(float(effect))
    # The first cell starts where the row starts: if it differs, the state is not why.
    size = float(trial.errors(subject(tokens[:, :n], subject.zeros(rows)).logits, whole[:, :n]).max())
    if size > limit:
        text = f"the first cell, before any cut, differs from the uncut row by {size:.1e} already"
        causes = "the length of the row (later tokens, batch statistics, expert capacity)"
        raise NotTestable(f"{text}: results depend on {causes}")
    cuts = [
        _Cut(f"cells of {n} tokens", [n] * CELLS, rows),
        _Cut("cells of a single row", [(CELLS - 1) * n, n], 1),
        _Cut("ragged cells", [n - 1, n + 2, (CELLS - 2) * n - 1], rows, is_needed=False),
        _Cut("cells of one token", [CELLS * n - 2, 1, 1], rows, is_needed=False),
    ]
    largest, notes = 0.0, []
    for cut in cuts:
        start = subject.zeros(cut.rows)
        try:
            cells = run_cells(subject, tokens[: cut.rows], cut.lengths, start)
        except CallFailed as error:
            if cut.is_needed:
                raise NotTestable(str(error)) from error
            notes.append(f"; {cut.words}: not testable here: {error}")
            continue
        errors = trial.errors(cells, whole[: cut.rows]).amax(0)  # [T]
        size = float(errors.max())
        largest = max(largest, size)
        if size > limit:
            position = first_above(errors, limit)
            text = f"{cut.words} differ from the uncut row from position {position} on"
            text += f", by {size:.1e} of the logits' spread (rounding: {trial.noise:.0e})"
            return Verdict("carry", "broken", text, size, position)
    try:
        errors = trial.errors(subject(tokens, None).logits, whole).amax(0)  # [T]
    except CallFailed as error:
        errors = torch.zeros(1)  # a model need not take None
        notes.append(f"; state = None: not testable here: {error}")
    size = float(errors.max())
    if size > limit:
        text = f"state=None and zeros give other logits, by {size:.1e} of their spread. {LEARNED_START}"
        return Verdict("carry", "broken", text, size, first_above(errors, limit))
    text = f"cells equal the uncut row to {largest:.1e}{''.join(notes)}"
    return Verdict("carry", "held", text, largest)


def _with_other_start(trial: Trial, tokens: Tensor) -> Tensor:
    other = tokens.clone()
    other[:, : trial.cell] = trial.others(tokens)[:, : trial.cell]
    return trial.subject(other, trial.subject.zeros(len(tokens))).logits


def check_state_used(trial: Trial) -> Verdict:
    """Whether another incoming state changes the logits."""
    if not trial.width:
        return untestable("state_used", NO_STATE)
    subject, size = trial.subject, 0.0
    for sample in range(STATE_DRAWS):  # one that counts is enough
        tokens = trial.tokens(length=trial.cell, sample=sample)
        with_state = subject(tokens, trial.start_state(ROWS, sample=sample)).logits
        size = float(trial.errors(with_state, subject(tokens, subject.zeros(ROWS)).logits).max())
        if size > TESTABLE * trial.noise:
            text = f"another state moves the logits by {size:.1e} of their spread"
            return Verdict("state_used", "held", text, size)
    text = "logits do not depend on the incoming state: the ledger carries it for nothing"
    return Verdict("state_used", "warning", text, size)


def check_precision(trial: Trial, subject: Subject, check: str, name: str) -> Verdict:
    """Carry of `subject`, the model at the lower precision `name`.

    An honest cut row is as far from the exact result, the trial's, as the uncut row is; how far
    that is, is measured, not assumed. States are rounded to the dtype in which the model returns
    them, which counts as rounding too.
    """
    if not trial.width:
        return untestable(check, NO_STATE)
    subject.is_pure, subject.training = trial.subject.is_pure, trial.modes[0]
    tokens, n, eps = trial.tokens(), trial.cell, torch.finfo(subject.autocast or subject.dtype).eps
    with trial.in_mode(trial.modes[0]):
        exact = trial.subject(tokens, trial.subject.zeros(ROWS)).logits
        effect = _rms(trial.errors(_with_other_start(trial, tokens), exact)[:, n:])
    try:
        whole = subject(tokens, subject.zeros(ROWS)).logits
        if not torch.isfinite(whole[exact.isfinite()]).all():
            return Verdict(check, "broken", f"the logits are not finite in {name}")
        own = _rms(trial.errors(whole, exact)[:, n:])
        allowed = ALLOWED * max(own, _rounding_of_states(trial, subject, tokens), eps / 8)
        cells = run_cells(subject, tokens, [n] * CELLS, subject.zeros(ROWS))
        errors = trial.errors(cells, exact)
    except (CallFailed, NotTestable) as error:
        return untestable(check, f"in {name} {error}")
    size = _rms(errors[:, n:])
    if size > allowed:
        text = f"in {name} cells differ from the exact row by {size:.1e} of the logits' spread"
        position = next(iter((errors.amax(0) > allowed).nonzero()), n)
        return Verdict(check, "broken", f"{text}, the uncut row by {own:.1e}", size, int(position))
    if effect < allowed:
        text = f"rounding in {name} ({allowed / ALLOWED:.0e}) hides what a lost state would change ({effect:.0e})"
        return untestable(check, text)
    text = f"in {name} cells are as exact as the uncut row ({size:.1e}, {own:.1e})"
    return Verdict(check, "held", text, size)


def _rms(errors: Tensor) -> float:
    return float(errors.square().mean().sqrt())


def _rounding_of_states(trial: Trial, subject: Subject, tokens: Tensor) -> float:
    """How far logits move if the exact state is rounded to the dtype of the returned one."""
    n, exact = trial.cell, trial.subject
    with trial.in_mode(trial.modes[0]):
        state = exact.carried(exact(tokens[:, :n], exact.zeros(ROWS)).state)
        returned = subject(tokens[:, :n], subject.zeros(ROWS)).state
        # Counters are not rounded.
        if state is None or returned is None or not returned.is_floating_point():
            return 0.0
        second = tokens[:, n : 2 * n]
        rounded = state.to(returned.dtype).to(subject.ledger_dtype).to(state.dtype)
        return _rms(trial.errors(exact(second, rounded).logits, exact(second, state).logits))


def check_gradient(trial: Trial) -> Verdict:
    """The last cell's gradient of parameters and incoming state, against the uncut row's."""
    if not trial.width:
        return untestable("gradient", NO_STATE)
    with trial.in_mode(trial.modes[0]):
        return _judge_gradient(trial)


def _judge_gradient(trial: Trial) -> Verdict:
    subject, n = trial.subject, trial.cell
    tokens, state = trial.tokens(length=2 * n), trial.start_state()
    assert state is not None
    targets = trial.tokens(length=n, sample=77).to(subject.device)
    start = state.clone().requires_grad_()

    def of_whole() -> list[Tensor]:
        logits = subject(tokens, start, with_grad=True).logits
        return _gradients(trial, logits[:, n:], targets, start)

    try:  # the last cell as the training step runs it
        carried = subject.carried(subject(tokens[:, :n], state).state)
        logits = subject(tokens[:, n:], carried, with_grad=True).logits
        found = _gradients(trial, logits, targets)
    except CallFailed as error:
        text = f"backward of a cell that continues a group fails: {error}"
        return Verdict("gradient", "broken", text)
    if not all(each.isfinite().all() for each in found):
        text = "the gradient of a cell that continues a group is not finite"
        return Verdict("gradient", "broken", text)
    through = "which matters in a loop that trains through it"
    try:
        whole = of_whole()
        first = subject(tokens[:, :n], start, with_grad=True)
        logits = subject(tokens[:, n:], first.state, with_grad=True).logits
        cut = _gradients(trial, logits, targets, start)
    except CallFailed as error:
        text = f"backward through the incoming state fails, {through} ({error})"
        return Verdict("gradient", "warning", text)
    size, noise = _distance(cut, whole, trial.noise), trial.noise
    if size > math.sqrt(noise):  # the gradient may be worse conditioned than the logits
        step = math.sqrt(torch.finfo(subject.dtype).eps)
        with subject.perturbed(step):
            noise = max(_distance(of_whole(), whole, trial.noise) * step, noise)
    if size <= math.sqrt(noise):
        text = f"the gradient through a cut equals the uncut row's to {size:.1e}"
        return Verdict("gradient", "held", text, size)
    if first.state is not None and not first.state.requires_grad:
        text = f"the returned state is detached, {through}"
        return Verdict("gradient", "warning", text)
    text = f"the gradient through a cut differs from the uncut row's by {size:.1e} of its norm"
    text += f" (rounding: {noise:.0e})"
    if trial.facts.get("purity") != "broken":  # where forward differs under a graph, purity says so
        text += ": remove what detaches the state inside forward (detach(), .data, torch.no_grad())"
    return Verdict("gradient", "broken", text, size)


def _gradients(
    trial: Trial, logits: Tensor, targets: Tensor, *leaves: Tensor, of: nn.Module | None = None
) -> list[Tensor]:
    """Gradients of the cross-entropy: of the leaves, then of all trained parameters; zeros where
    unused. Raises CallFailed: backward raises; NotTestable: nothing is trained."""
    parameters = [p for p in (of or trial.subject.model).parameters() if p.requires_grad]
    if not parameters or not logits.requires_grad:
        raise NotTestable("no parameter is trained")
    loss = F.cross_entropy(logits.flatten(0, 1).double(), targets.flatten())
    return gradients(loss, [*leaves, *parameters])


def _distance(found: list[Tensor], wanted: list[Tensor], noise: float) -> float:
    """The larger of the relative distances of the leaf's gradient (first) and of all others'.

    A leaf's gradient that is 0 but for rounding, as a counter's, is compared with the others'.
    """
    gaps = [a.double() - b.double() for a, b in zip(found, wanted, strict=True)]
    leaf, parameters = norm(wanted[:1]), norm(wanted[1:])
    if leaf <= math.sqrt(noise) * parameters:
        leaf = parameters
    sizes = ratio(norm(gaps[:1]), leaf), ratio(norm(gaps[1:]), parameters)
    return math.inf if any(map(math.isnan, sizes)) else max(sizes)


def check_checkpointing(trial: Trial) -> Verdict:
    """Gradient of a forward that runs twice, as under activation checkpointing, against one.

    `torch.utils.checkpoint` would import the compiler, which takes longer than all checks. This is
    what it does to the model: the same forward twice on the same object with the same random
    numbers, the second one with the graph that counts.
    """
    subject = trial.subject
    tokens, state = trial.tokens(length=trial.cell), trial.start_state()
    targets = trial.tokens(length=trial.cell, sample=77).to(subject.device)

    def of_last(calls: int) -> list[Tensor]:
        model = subject.fresh()
        for _ in range(calls):
            logits = subject(tokens, state, with_grad=True, on=model).logits
        return [logits.new_zeros(()), *_gradients(trial, logits, targets, of=model)]

    with trial.in_mode(True):
        try:
            plain = of_last(1)
        except (NotTestable, CallFailed) as error:
            return untestable("checkpointing", error)
        try:
            size = _distance(of_last(2), plain, trial.noise)
        except CallFailed as error:
            return Verdict("checkpointing", "broken", f"recomputing the forward fails: {error}")
    if size > math.sqrt(trial.noise):
        text = f"recomputing the forward changes the gradient by {size:.1e} of its norm"
        return Verdict("checkpointing", "broken", text, size)
    text = f"recomputation gives the same gradient, to {size:.1e}"
    return Verdict("checkpointing", "held", text, size)


def check_resets(trial: Trial) -> Verdict:
    """The second document of a row must not see the first, through a state or through attention."""
    if not trial.takes_resets:
        return untestable("resets", "forward takes no resets")
    return trial.judge("resets", _judge_resets)


def judge_causality(trial: Trial, sample: int) -> Verdict:
    """Change the tokens from a position on: logits before it must not change."""
    # One row: what other rows do to it is judged under isolation.
    subject, tokens = trial.subject, trial.tokens(1, sample=sample)
    state = trial.start_state(1, sample=sample)
    before = subject(tokens, state).logits
    largest = 0.0
    for position in dict.fromkeys((trial.length - 1, trial.length // 2)):
        changed = tokens.clone()
        changed[:, position:] = trial.others(tokens, sample=sample)[:, position:]
        errors = trial.errors(subject(changed, state).logits, before)
        limit = trial.limit(float(errors[:, position:].max()))
        earlier = errors[:, :position].amax(0)
        size = float(earlier.max())
        largest = max(largest, size)
        if size > limit:
            first = first_above(earlier, limit)
            text = f"changing the tokens from position {position} on moves the logits at position {first} by {size:.1e}"
            return Verdict("causality", "broken", text, size, first)
    text = f"changed tokens move no earlier logits (at most {largest:.1e})"
    return Verdict("causality", "held", text, largest)


def judge_isolation(trial: Trial, sample: int) -> Verdict:
    """Change the other rows, and permute rows: a row's logits and state must not change."""
    subject, tokens = trial.subject, trial.tokens(sample=sample)
    state = trial.start_state(ROWS, sample=sample)
    before = subject(tokens, state)
    largest = 0.0
    for row in (0, ROWS - 1):  # rows may come first or last where something runs out
        changed = trial.others(tokens, sample=sample)
        changed[row] = tokens[row]
        other_state = trial.start_state(ROWS, sample=sample + 100)
        if state is not None and other_state is not None:
            other_state[row] = state[row]
        after = subject(changed, other_state)
        effect = float(trial.errors(after.logits, before.logits).max())
        if effect == 0.0:  # the rows are indistinguishable
            raise NotTestable("the logits do not depend on the tokens")
        limit = trial.limit(effect)
        size, position = _deviation(trial, after, before, limit, row=row)
        if size > limit:
            text = f"changing the other rows moves the logits or the state of row {row} by {size:.1e}"
            return Verdict("isolation", "broken", f"{text}, from position {position} on", size, position)
        largest = max(largest, size)
    order = [*range(1, ROWS), 0]
    moved = subject(tokens[order], ordered(state, order))
    wanted = Result(before.logits[order], ordered(before.state, order))
    for row in range(ROWS):
        size, position = _deviation(trial, moved, wanted, limit, row=row)
        if size > limit:
            text = f"the same rows in another order give other results, by {size:.1e} from position {position} on"
            return Verdict("isolation", "broken", text, size, position)
        largest = max(largest, size)
    text = f"other rows, and the order of rows, change nothing (at most {largest:.1e})"
    return Verdict("isolation", "held", text, largest)


def ordered(state: Tensor | None, order: list[int]) -> Tensor | None:
    return None if state is None else state[order]


def first_above(errors: Tensor, limit: float) -> int:
    """The first place of errors [T] that is above the limit, which one is."""
    return int((errors > limit).nonzero()[0])


def _deviation(trial: Trial, found: Result, wanted: Result, limit: float, *, row: int) -> tuple[float, int]:
    """Largest error of a row's logits or state, and its first place (of the state: the last)."""
    errors = trial.errors(found.logits, wanted.logits)[row]
    size, position = float(errors.max()), trial.length - 1
    if size > limit:
        position = first_above(errors, limit)
    if found.state is not None and wanted.state is not None:
        own, other = found.state[row].double(), wanted.state[row].double()
        unit = float(other.square().mean().sqrt()) or 1.0
        size = max(size, float(relative(own, other, unit)))
    return size, position


def _judge_resets(trial: Trial, sample: int) -> Verdict:
    subject, tokens = trial.subject, trial.tokens(sample=sample)
    state = trial.start_state(ROWS, sample=sample)
    at = [trial.length // 3 + 1 + row for row in range(ROWS)]  # one reset a row, each elsewhere
    resets = torch.zeros(ROWS, trial.length, dtype=torch.bool)
    changed, others = tokens.clone(), trial.others(tokens, sample=sample)
    for row, position in enumerate(at):
        resets[row, position] = True
        changed[row, :position] = others[row, :position]
    joined = subject(tokens, state, resets).logits
    unmarked = subject(tokens, state).logits
    after = subject(changed, trial.start_state(ROWS, sample=sample + 100), resets).logits
    # How far the first document moves the second without a reset.
    across = trial.errors(subject(changed, state).logits, unmarked)
    limit = trial.limit(max(float(across[row, position:].max()) for row, position in enumerate(at)))
    # Before the reset nothing may change: resets that are False are no resets.
    moved = trial.errors(joined, unmarked)
    largest = max(float(moved[row, :position].max()) for row, position in enumerate(at))
    if largest > limit:
        text = f"a reset changes the logits before it, by {largest:.1e}"
        return Verdict("resets", "broken", text, largest)
    for row, position in enumerate(at):
        leak = trial.errors(after, joined)[row, position:]
        size = float(leak.max())
        if size > limit:
            first = first_above(leak, limit)
            text = f"the document before the reset at position {position} moves the logits {first} positions after it"
            return Verdict("resets", "broken", f"{text} by {size:.1e}", size, position + first)
        largest = max(largest, size)
    last = at[-1]
    try:  # the last row's two documents, each run alone
        alone = [
            subject(tokens[-1:, :last], ordered(state, [ROWS - 1])).logits,
            subject(tokens[-1:, last:], subject.zeros(1)).logits,
        ]
    except CallFailed as error:
        text = f"nothing crosses the reset (at most {largest:.1e}); the documents alone: {error}"
        return Verdict("resets", "held", text, largest)
    errors = trial.errors(torch.cat(alone, dim=1), joined[-1:])[0]
    size = float(errors.max())
    if size > limit:
        text = f"a row with a reset at position {last} differs from its two documents run alone, by {size:.1e}"
        return Verdict("resets", "broken", text, size, first_above(errors, limit))
    largest = max(largest, size)
    text = f"documents of a row equal the same run alone, to {largest:.1e}"
    return Verdict("resets", "held", text, largest)
