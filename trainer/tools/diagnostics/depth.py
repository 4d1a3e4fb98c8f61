"""Rules about the loss against depth: context that is not used, and states that were never trained that long."""

from __future__ import annotations

import math

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

MIN_EVALUATIONS = 3
WORTHLESS_NATS = 0.005
FAR_ERRORS = 4.0
LOST_SHARE = 0.5
KEYS = "eval/depth/<bucket>/carry_gain"
NEEDED = "needs eval/depth: eval.depth, a model with state and documents longer than a cell"


def last_curves(run: RunRecord) -> tuple[int, dict[str, DepthCurve]]:
    """(number of evaluations, the curve of each set in the last one)."""
    columns = [series(run, key) for key in run.keys if "depth/" in key and key.startswith("eval/")]
    last = max((column.steps[-1] for column in columns if column), default=0)
    found = curves_of({column.key: column.values[-1] for column in columns if column and column.steps[-1] == last})
    curves = {name: curve for name, curve in found.items() if all(math.isfinite(gain.value) for _, gain in curve.gains)}
    return max(map(len, columns), default=0), {name: curve for name, curve in curves.items() if curve.gains}


def _key(name: str, depth: int) -> str:
    return f"eval/{f'{name}/' if name else ''}depth/{depth}/carry_gain"


def _evidence(run: RunRecord, name: str, *depths: int) -> list[Evidence]:
    return [series(run, _key(name, depth)).evidence() for depth in depths]


def _unmeasured(number: int, curves: dict[str, DepthCurve]) -> Outcome | None:
    if not curves:
        return not_measured(NEEDED)
    return not_yet(f"needs {MIN_EVALUATIONS} evaluations, has {number}") if number < MIN_EVALUATIONS else None


@rule("advice", uses=[KEYS])
def context_unused(run: RunRecord) -> Outcome:
    """From some depth on, two errors above the gain of carrying are below {WORTHLESS_NATS:g} nats per token in every bucket.

    The gain is the loss from a state reset at each cell minus the carried one, of the last of {MIN_EVALUATIONS} evaluations or
    more; below 0, it is left to `loss_rises_with_depth`.
    Change: `train.tbptt_cells`: 2, so that the model learns what to keep; or shorter documents
    """
    number, curves = last_curves(run)
    if (outcome := _unmeasured(number, curves)) is not None:
        return outcome
    for name, curve in curves.items():
        depth = unused_from(curve.gains, WORTHLESS_NATS)
        if depth is not None and not any(start >= depth and _is_negative(gain) for start, gain in curve.gains):
            words = f"the model uses no context beyond {depth:,} tokens{f' of {name}' if name else ''}: carrying gains "
            words += ", ".join(f"{gain} at {start:,}" for start, gain in curve.gains[-3:])
            knob = Knob("train.tbptt_cells", run.setting("train.tbptt_cells"), 2, "to learn what to keep")
            return finding(words, *_evidence(run, name, curve.gains[-1][0]), knob=knob)
    return healthy(
        "carrying gains " + ", ".join(f"{each.gains[-1][1]} at {each.gains[-1][0]:,}" for each in curves.values())
    )


def _is_negative(gain: Number) -> bool:
    return gain.value < -max(FAR_ERRORS * gain.error, WORTHLESS_NATS)


def _risen(curve: DepthCurve) -> tuple[int, int] | None:
    """(depth of the largest gain, the depth from which on it is lost)."""
    gains = curve.gains
    best = 0
    for index, (start, gain) in enumerate(gains):
        peak = gains[best][1]
        fall, error = peak.value - gain.value, math.hypot(peak.error, gain.error)
        is_lost = fall > max(FAR_ERRORS * error, LOST_SHARE * peak.value, WORTHLESS_NATS)
        if is_lost or _is_negative(gain):
            return gains[best][0], start
        if gain.value > peak.value:
            best = index
    return None


@rule("warning", uses=[KEYS])
def loss_rises_with_depth(run: RunRecord) -> Outcome:
    """The gain of carrying falls with depth by {LOST_SHARE:.0%} and {FAR_ERRORS:g} errors, or below 0 by as many.

    Of the same targets, those with a state reset at each cell lose less: the states at that depth are none that training has
    made. How hard the text is at a depth cancels in the gain.
    Change: `ledger.wipe_mode`: `lru`, if it is `full`; otherwise `train.tbptt_cells`: 2
    """
    number, curves = last_curves(run)
    if (outcome := _unmeasured(number, curves)) is not None:
        return outcome
    for name, curve in curves.items():
        if (found := _risen(curve)) is not None:
            gains = dict(curve.gains)
            best, depth = found
            words = (
                f"the loss rises with depth{f' in {name}' if name else ''}: carrying gains {gains[best]} from {best:,} "
            )
            words += f"tokens on, {gains[depth]} from {depth:,} on; states were never trained that long"
            mode = run.setting("ledger.wipe_mode")
            knob = Knob("train.tbptt_cells", run.setting("train.tbptt_cells"), 2)
            if mode == "full":
                knob = Knob("ledger.wipe_mode", mode, "lru")
            return finding(words, *_evidence(run, name, best, depth), knob=knob)
    return healthy("the gain of carrying does not fall with depth")


RULES = (context_unused, loss_rises_with_depth)
