"""Leaks: later tokens (causality), other rows (isolation), documents before a reset (resets)."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.lab.contracts.subject import CallFailed, NotTestable, Result
from trainer.lab.contracts.trial import ROWS, Trial, Verdict, relative, untestable


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
