"""What must not leak: later tokens (causality), other rows (isolation), documents before a reset (resets)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainer.contracts.subject import CallFailed, NotTestable, Result
from trainer.contracts.trial import ROWS, Trial, Verdict, relative, untestable

DISCRETE = (
    "rows are coupled, but by a discrete choice alone, such as an expert's capacity: a small change of the other rows changes "
    "nothing. Expected of experts that drop tokens; a capacity that drops none avoids it"
)


def check_causality(trial: Trial) -> Verdict:
    """Change the tokens from a position on: logits before it must not change."""
    return trial.judge("causality", _judge_causality)


def check_isolation(trial: Trial) -> Verdict:
    """Change the other rows, and permute rows: a row's logits and state must not change."""
    return trial.judge("isolation", _judge_isolation)


def check_resets(trial: Trial) -> Verdict:
    """With a reset inside a row, the second document must not see the first, through a state or through attention."""
    return (
        trial.judge("resets", _judge_resets) if trial.takes_resets else untestable("resets", "forward takes no resets")
    )


def _judge_causality(trial: Trial, sample: int) -> Verdict:
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
            first = int((earlier > limit).nonzero()[0])
            text = f"changing the tokens from position {position} on moves the logits at position {first} by {size:.1e}"
            return Verdict("causality", "broken", text, size, first)
    return Verdict("causality", "held", f"changed tokens move no earlier logits (at most {largest:.1e})", largest)


def _judge_isolation(trial: Trial, sample: int) -> Verdict:
    subject, tokens = trial.subject, trial.tokens(sample=sample)
    state = trial.start_state(ROWS, sample=sample)
    before = subject(tokens, state)
    largest = 0.0
    for row in (0, ROWS - 1):  # rows may come first or last where something runs out
        verdict, limit = _judge_others(trial, sample, tokens, state, before, row)
        if verdict.status != "held":
            return verdict
        largest = max(largest, verdict.size or 0.0)
    order = torch.tensor([(row + 1) % ROWS for row in range(ROWS)])
    moved = subject(tokens[order], None if state is None else state[order.to(state.device)])
    wanted = Result(before.logits[order], None if before.state is None else before.state[order.to(before.state.device)])
    for row in range(ROWS):
        size, position = _deviation(trial, moved, wanted, limit, row=row)
        if size > limit:
            if _is_discrete(trial, tokens, state, before, limit, row):
                return untestable("isolation", DISCRETE)
            text = f"the same rows in another order give other results, by {size:.1e} from position {position} on"
            return Verdict("isolation", "broken", text, size, position)
        largest = max(largest, size)
    text = f"other rows, and the order of rows, change nothing (at most {largest:.1e})"
    return Verdict("isolation", "held", text, largest)


def _judge_others(
    trial: Trial, sample: int, tokens: Tensor, state: Tensor | None, before: Result, row: int
) -> tuple[Verdict, float]:
    """Change all rows but one, and look at that one. Returns the limit too."""
    others = [each for each in range(ROWS) if each != row]
    changed = trial.others(tokens, sample=sample)
    changed[row] = tokens[row]
    other_state = trial.start_state(ROWS, sample=sample + 100)
    if state is not None and other_state is not None:
        other_state[row] = state[row]
    after = trial.subject(changed, other_state)
    errors = trial.errors(after.logits, before.logits)
    if float(errors.max()) == 0.0:
        raise NotTestable("the logits do not depend on the tokens")
    limit = trial.limit(float(errors.max()))
    size, position = _deviation(trial, after, before, limit, row=row)
    if size <= limit:
        return Verdict("isolation", "held", "", size), limit
    # What changed tokens do to their own row, the state being the same.
    own = float(trial.errors(trial.subject(changed, state).logits, before.logits)[others].amax(1).min())
    if own > limit and _is_discrete(trial, tokens, state, before, limit, row):
        return untestable("isolation", DISCRETE), limit
    text = (
        f"changing the other rows moves the logits or the state of row {row} by {size:.1e}, from position {position} on"
    )
    return Verdict("isolation", "broken", text, size, position), limit


def _deviation(trial: Trial, found: Result, wanted: Result, limit: float, *, row: int) -> tuple[float, int]:
    """Largest error of a row's logits or state, and the first wrong position (that of the state is the last)."""
    errors = trial.errors(found.logits, wanted.logits)[row]
    size = float(errors.max())
    position = int((errors > limit).nonzero()[0]) if size > limit else trial.length - 1
    if found.state is not None and wanted.state is not None:
        states = found.state.double(), wanted.state.double()
        unit = float(states[1][row].square().mean().sqrt()) or 1.0
        size = max(size, float(relative(states[0][row], states[1][row], unit)))
    return size, position


def _is_discrete(trial: Trial, tokens: Tensor, state: Tensor | None, before: Result, limit: float, row: int) -> bool:
    """Whether a small change of the other rows' embeddings and states leaves a row alone: then only a choice couples them."""
    step = 1e-3 * limit if limit < 1e-3 else 1e-6
    step = max(step, 1e4 * trial.noise)
    subject = trial.subject
    model = subject.model if subject.is_pure else subject.fresh()
    hooked = 0

    def nudge(module: nn.Module, given: Any, embedded: Tensor) -> Tensor:
        nonlocal hooked
        if embedded.dim() != 3 or embedded.shape[0] != ROWS:
            return embedded
        hooked += 1
        change = step * embedded.detach().std() * torch.randn_like(embedded)
        change[row] = 0.0
        return embedded + change

    if state is not None:
        change = step * state.std() * torch.randn_like(state)
        change[row] = 0.0
        state = state + change
    handles = [m.register_forward_hook(nudge) for m in model.modules() if isinstance(m, nn.Embedding)]
    try:
        after = subject(tokens, state, on=model)
    except CallFailed:
        return False
    finally:
        for handle in handles:
            handle.remove()
    errors = trial.errors(after.logits, before.logits)
    moved_own = float(errors.max())
    moved, _ = _deviation(trial, after, before, limit, row=row)
    return bool(hooked) and moved_own > 10 * trial.noise and moved <= max(1e-4 * moved_own, trial.noise)


def _judge_resets(trial: Trial, sample: int) -> Verdict:
    subject, tokens = trial.subject, trial.tokens(sample=sample)
    state = trial.start_state(ROWS, sample=sample)
    at = [trial.length // 3 + 1 + row for row in range(ROWS)]  # one reset a row, each at another position
    resets = torch.zeros(ROWS, trial.length, dtype=torch.bool)
    for row, position in enumerate(at):
        resets[row, position] = True
    joined = subject(tokens, state, resets).logits
    unmarked = subject(tokens, state).logits
    changed = tokens.clone()
    for row, position in enumerate(at):
        changed[row, :position] = trial.others(tokens, sample=sample)[row, :position]
    after = subject(changed, trial.start_state(ROWS, sample=sample + 100), resets).logits
    # How far the first document moves the second without a reset.
    across = trial.errors(subject(changed, state).logits, unmarked)
    limit = trial.limit(max(float(across[row, position:].max()) for row, position in enumerate(at)))
    # Before the reset nothing may change: resets that are False are no resets.
    largest = max(float(trial.errors(joined, unmarked)[row, :position].max()) for row, position in enumerate(at))
    if largest > limit:
        return Verdict("resets", "broken", f"a reset changes the logits before it, by {largest:.1e}", largest)
    for row, position in enumerate(at):
        leak = trial.errors(after, joined)[row, position:]
        size = float(leak.max())
        if size > limit:
            first = int((leak > limit).nonzero()[0])
            text = (
                f"the document before the reset at position {position} moves the logits {first} positions after it by "
            )
            return Verdict("resets", "broken", f"{text}{size:.1e}", size, position + first)
        largest = max(largest, size)
    # The last row's two documents, each run alone.
    given = None if state is None else state[-1:]
    try:
        alone = [subject(tokens[-1:, : at[-1]], given), subject(tokens[-1:, at[-1] :], subject.zeros(1))]
    except CallFailed as error:
        text = f"nothing crosses the reset (at most {largest:.1e}); the documents alone: {error}"
        return Verdict("resets", "held", text, largest)
    errors = trial.errors(torch.cat([each.logits for each in alone], dim=1), joined[-1:])[0]
    size = float(errors.max())
    if size > limit:
        text = f"a row with a reset at position {at[-1]} differs from its two documents run alone, by {size:.1e}"
        return Verdict("resets", "broken", text, size, int((errors > limit).nonzero()[0]))
    largest = max(largest, size)
    return Verdict("resets", "held", f"documents of a row equal the same run alone, to {largest:.1e}", largest)
