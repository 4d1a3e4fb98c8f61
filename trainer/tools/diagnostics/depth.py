"""Rules about the loss against depth: context that is not used, and states that were never trained that long."""

from __future__ import annotations

import math

from trainer.tools import limits
from trainer.tools.diagnostics.rule import (
    Evidence,
    Knob,
    Outcome,
    finding,
    healthy,
    not_measured,
    not_yet,
    rule,
    series,
)
from trainer.tools.runs.depth_curve import DepthCurve, Number, curves_of, unused_from
from trainer.tools.runs.load import RunRecord

KEYS = "eval/depth/<bucket>/carry_gain"
NEEDED = "needs eval/depth: eval.depth, a model with state and documents longer than a cell"


def last_curves(run: RunRecord) -> tuple[int, dict[str, DepthCurve]]:
    """(number of evaluations, the curve of each set in the last one, of enough documents to know its errors)."""
    number, found = all_last_curves(run)
    return number, {name: curve for name, curve in found.items() if curve.gains}


def all_last_curves(run: RunRecord) -> tuple[int, dict[str, DepthCurve]]:
    """The same of however few documents."""
    columns = [series(run, key) for key in run.keys if "depth/" in key and key.startswith("eval/")]
    last = max((column.steps[-1] for column in columns if column), default=0)
    found = curves_of({column.key: column.values[-1] for column in columns if column and column.steps[-1] == last})
    known = {name: curve for name, curve in found.items() if _is_finite(curve)}
    return max(map(len, columns), default=0), known


def _is_finite(curve: DepthCurve) -> bool:
    gains = [point.gain.value for point in curve.points if point.gain]
    return bool(gains) and all(map(math.isfinite, gains))


def _evidence(run: RunRecord, name: str, *depths: int) -> list[Evidence]:
    """The gains of a set (the held-out documents: "") at these depths."""
    front = f"eval/{name}/depth" if name else "eval/depth"
    return [series(run, f"{front}/{depth}/carry_gain").evidence() for depth in depths]


def _unmeasured(number: int, curves: dict[str, DepthCurve]) -> Outcome | None:
    if not curves:
        return not_measured(NEEDED)
    if number < limits.MIN_EVALUATIONS:
        return not_yet(f"needs {limits.MIN_EVALUATIONS} evaluations, has {number}")
    return None


@rule("advice", uses=[KEYS])
def context_unused(run: RunRecord) -> Outcome:
    """From some depth on, two errors above the gain of carrying are below {limits.WORTHLESS_NATS:g} nats per token in every
    bucket.

    The gain is the loss from a state reset at each cell minus the carried one, of the last of {limits.MIN_EVALUATIONS}
    evaluations or more; below 0, it is left to `loss_rises_with_depth`.
    Change: `train.tbptt_cells`: 2, so that the model learns what to keep; or shorter documents
    """
    number, curves = last_curves(run)
    outcome = _unmeasured(number, curves)
    if outcome is not None:
        return outcome
    for name, curve in curves.items():
        depth = unused_from(curve.gains, limits.WORTHLESS_NATS)
        if depth is None or any(start >= depth and _is_negative(gain) for start, gain in curve.gains):
            continue
        of = f" of {name}" if name else ""
        gains = ", ".join(f"{gain} at {start:,}" for start, gain in curve.gains[-3:])
        words = f"the model uses no context beyond {depth:,} tokens{of}: carrying gains {gains}"
        knob = Knob("train.tbptt_cells", run.setting("train.tbptt_cells"), 2, "to learn what to keep")
        return finding(words, *_evidence(run, name, curve.gains[-1][0]), knob=knob)
    deepest = [curve.gains[-1] for curve in curves.values()]
    return healthy("carrying gains " + ", ".join(f"{gain} at {start:,}" for start, gain in deepest))


def _is_negative(gain: Number) -> bool:
    return gain.value < -max(limits.FAR_ERRORS * gain.error, limits.WORTHLESS_NATS)


def _risen(curve: DepthCurve) -> tuple[int, int] | None:
    """(depth of the largest gain, the depth from which on it is lost)."""
    gains = curve.gains
    best = 0
    for index, (start, gain) in enumerate(gains):
        peak = gains[best][1]
        fall, error = peak.value - gain.value, math.hypot(peak.error, gain.error)
        is_lost = fall > max(limits.FAR_ERRORS * error, limits.LOST_GAIN * peak.value, limits.WORTHLESS_NATS)
        if is_lost or _is_negative(gain):
            return gains[best][0], start
        if gain.value > peak.value:
            best = index
    return None


@rule("warning", uses=[KEYS])
def loss_rises_with_depth(run: RunRecord) -> Outcome:
    """The gain of carrying falls with depth by {limits.LOST_GAIN:.0%} and {limits.FAR_ERRORS:g} errors, or below 0 by as many.

    Of the same targets, those with a state reset at each cell lose less: the states at that depth are none that training has
    made. How hard the text is at a depth cancels in the gain.
    Change: `ledger.wipe_mode`: `lru`, if it is `full`; otherwise `train.tbptt_cells`: 2
    """
    number, curves = last_curves(run)
    outcome = _unmeasured(number, curves)
    if outcome is not None:
        return outcome
    for name, curve in curves.items():
        risen = _risen(curve)
        if risen is None:
            continue
        gains, (best, depth) = dict(curve.gains), risen
        inside = f" in {name}" if name else ""
        words = f"the loss rises with depth{inside}: carrying gains {gains[best]} from {best:,} tokens on, "
        words += f"{gains[depth]} from {depth:,} on; states were never trained that long"
        mode = run.setting("ledger.wipe_mode")
        knob = Knob("train.tbptt_cells", run.setting("train.tbptt_cells"), 2)
        if mode == "full":  # no state outlives a wipe, so none can be long
            knob = Knob("ledger.wipe_mode", mode, "lru")
        return finding(words, *_evidence(run, name, best, depth), knob=knob)
    return healthy("the gain of carrying does not fall with depth")


RULES = (context_unused, loss_rises_with_depth)
