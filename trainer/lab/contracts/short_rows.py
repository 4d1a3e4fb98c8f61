"""Short rows name the cause where the soak does not hold, or cannot be run.

Carry: a row read in cells equals the row read whole. Leaks: other rows (isolation), later tokens
(causality), documents before a reset (resets).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainer.lab.contracts.subject import NotTestable
from trainer.lab.contracts.trial import ROWS, Trial, Verdict, relative, untestable

LEAST_NOISE = 1e-3  # of the logits' spread: rounding that hides too much on a short row


def find_causes(trial: Trial) -> dict[str, Verdict]:
    """The verdicts on isolation, causality, carry and resets. Raises CallFailed: a forward fails."""
    if trial.noise > LEAST_NOISE:
        why = f"one rounding moves the logits by {trial.noise:.1e} of their spread"
        return {check: untestable(check, why) for check in ("isolation", "causality", "carry", "resets")}
    found = {"isolation": _judge_isolation(trial), "causality": _judge_causality(trial)}
    try:
        found["carry"] = _judge_carry(trial)
    except NotTestable as error:
        found["carry"] = untestable("carry", error)
    if trial.takes_resets:
        found["resets"] = _judge_resets(trial)
    return found


def _judge_isolation(trial: Trial) -> Verdict:
    """Change the other row: a row's logits and state must not change."""
    subject, tokens, state = trial.subject, trial.tokens(), trial.start_state()
    before, others, largest = subject(tokens, state), trial.others(tokens), torch.zeros(trial.length)
    for row in range(ROWS):  # rows may come first or last where something runs out
        changed = others.clone()
        changed[row] = tokens[row]
        after = subject(changed, state)
        errors = trial.errors(after.logits, before.logits)[row]
        if after.state is not None and before.state is not None:
            own, other = after.state[row].double(), before.state[row].double()
            errors[-1] = errors[-1].maximum(relative(own, other, float(other.square().mean().sqrt()) or 1.0))
        largest = largest.maximum(errors.cpu())
    text = "changing the other rows moves the logits or the state of a row by {1:.1e}, from position {0} on"
    return _verdict(trial, "isolation", largest, text)


def _judge_causality(trial: Trial) -> Verdict:
    """Change the tokens of the last half of a row: logits before it must not change."""
    subject, tokens, half = trial.subject, trial.tokens(1), trial.length // 2
    changed = tokens.clone()
    changed[:, half:] = trial.others(tokens)[:, half:]
    before, after = (subject(each, subject.zeros(1)).logits for each in (tokens, changed))
    text = f"changing the tokens from position {half} on moves the logits at position {{}} by {{:.1e}}"
    return _verdict(trial, "causality", trial.errors(after, before)[0, :half], text)


def _judge_carry(trial: Trial) -> Verdict:
    """Raises NotTestable: results depend on the length of a row."""
    subject, n, tokens = trial.subject, trial.cell, trial.tokens()
    whole = subject(tokens, subject.zeros(ROWS)).logits
    state, pieces = subject.zeros(ROWS), []
    for piece in torch.split(tokens, n, dim=1):
        result = subject(piece, state)
        pieces.append(result.logits)
        state = subject.carried(result.state)
    errors = trial.errors(torch.cat(pieces, dim=1), whole).amax(0)  # [T]
    # The first cell starts where the row starts: if it differs, the state is not why.
    if (size := float(errors[:n].max())) > math.sqrt(trial.noise):
        text = f"the first cell, before any cut, differs from the uncut row by {size:.1e} already"
        causes = "the length of the row (later tokens, batch statistics, expert capacity)"
        raise NotTestable(f"{text}: results depend on {causes}")
    text = f"cells of {n} tokens differ from the uncut row from position {{}} on"
    text += f", by {{:.1e}} of the logits' spread (rounding: {trial.noise:.0e})"
    return _verdict(trial, "carry", errors, text)


def _judge_resets(trial: Trial) -> Verdict:
    """Change the tokens before a reset: logits after it must not change."""
    subject, tokens, at = trial.subject, trial.tokens(), trial.length // 3 + 1
    resets = torch.zeros(ROWS, trial.length, dtype=torch.bool)
    resets[:, at] = True
    changed = tokens.clone()
    changed[:, :at] = trial.others(tokens)[:, :at]
    before = subject(tokens, trial.start_state(), resets).logits
    after = subject(changed, subject.zeros(ROWS), resets).logits
    text = f"the document before the reset at position {at} moves the logits {{}} positions after it by {{:.1e}}"
    return _verdict(trial, "resets", trial.errors(after, before).amax(0)[at:], text)


def _verdict(trial: Trial, check: str, errors: Tensor, text: str) -> Verdict:
    """Of errors [T]; broken above half way, in orders of magnitude, from rounding to the spread of
    the logits. `text` is filled with the first position that is wrong, and the largest error."""
    size, limit = float(errors.max()), math.sqrt(trial.noise)
    if size <= limit:
        return Verdict(check, "held", f"on short rows, to {size:.1e}", size)
    first = int((errors > limit).nonzero()[0])
    return Verdict(check, "broken", text.format(first, size), size, first)
