"""Rules about the loss against depth: unused context, and states never trained that long."""

from __future__ import annotations

import math

from trainer.tools import limits
from trainer.tools.diagnostics.rule import Knob, Outcome, finding, healthy, not_measured, not_yet, rule, series
from trainer.tools.runs.depth_curve import DepthCurve, Number, last_curves, unused_from
from trainer.tools.runs.load import RunRecord

NEEDED = "needs eval/depth: eval.depth, a model with state and documents longer than a cell"


def _gain_key(name: str, depth: int) -> str:
    """The key of a set's gain at a depth; the held-out documents are ""."""
    return "/".join(filter(None, ("eval", name, "depth", str(depth), "carry_gain")))


def _curves(run: RunRecord) -> dict[str, DepthCurve] | Outcome:
    """The curves of the last evaluation, if there are enough evaluations to judge them."""
    number, found = last_curves(run)
    curves = {name: curve for name, curve in found.items() if curve.gains}  # with known errors
    if not curves:
        return not_measured(NEEDED)
    if number < limits.MIN_EVALUATIONS:
        return not_yet(f"needs {limits.MIN_EVALUATIONS} evaluations, has {number}")
    return curves


@rule("advice")
def context_unused(run: RunRecord) -> Outcome:
    """Context beyond some depth that does not lower the loss."""
    curves = _curves(run)
    if isinstance(curves, Outcome):
        return curves
    deepest = []
    for name, curve in curves.items():
        start, gain = curve.gains[-1]
        deepest.append(f"{gain} at {start:,}")
        depth = unused_from(curve.gains, limits.WORTHLESS_NATS)
        # A gain below 0 is left to `loss_rises_with_depth`.
        if depth is None or any(at >= depth and _is_negative(gain) for at, gain in curve.gains):
            continue
        of = f" of {name}" if name else ""
        gains = ", ".join(f"{gain} at {at:,}" for at, gain in curve.gains[-3:])
        words = f"the model uses no context beyond {depth:,} tokens{of}: carrying gains {gains}"
        knob = _longer_rows(run)
        return finding(words, series(run, _gain_key(name, start)).evidence(), knob=knob)
    return healthy("carrying gains " + ", ".join(deepest))


def _longer_rows(run: RunRecord) -> Knob:
    """The gradient flows through a row: longer ones teach the model what to keep."""
    tokens = run.setting("data.seq_len")
    if not isinstance(tokens, int):
        return Knob("data.seq_len", None, "twice as long")
    return Knob("data.seq_len", tokens, 2 * tokens)


def _is_negative(gain: Number) -> bool:
    return gain.value < -max(limits.FAR_ERRORS * gain.error, limits.WORTHLESS_NATS)


def _risen(curve: DepthCurve) -> tuple[int, int] | None:
    """(depth of the largest gain, the depth from which on it is lost)."""
    best, peak = curve.gains[0]
    for start, gain in curve.gains:
        error = limits.FAR_ERRORS * math.hypot(peak.error, gain.error)
        least = max(error, limits.LOST_GAIN * peak.value, limits.WORTHLESS_NATS)
        if peak.value - gain.value > least or _is_negative(gain):
            return best, start
        if gain.value > peak.value:
            best, peak = start, gain
    return None


@rule("warning")
def loss_rises_with_depth(run: RunRecord) -> Outcome:
    """States that harm where they are older than any that training made."""
    curves = _curves(run)
    if isinstance(curves, Outcome):
        return curves
    for name, curve in curves.items():
        risen = _risen(curve)
        if risen is None:
            continue
        gains, (best, depth) = dict(curve.gains), risen
        inside = f" in {name}" if name else ""
        words = f"the loss rises with depth{inside}: carrying gains {gains[best]} from {best:,} "
        words += f"tokens on, {gains[depth]} from {depth:,} on; states were never trained that long"
        knob = _longer_rows(run)
        if run.setting("ledger.wipe_mode") == "full":  # no state outlives a wipe
            knob = Knob("ledger.wipe_mode", "full", "lru")
        return finding(words, *(series(run, _gain_key(name, at)).evidence() for at in risen), knob=knob)
    return healthy("the gain of carrying does not fall with depth")


RULES = (context_unused, loss_rises_with_depth)
