"""Rules about recurrent state: lost while needed, not finite, of no use, or harmful with depth."""

from __future__ import annotations

import math

from trainer.tools import limits
from trainer.tools.diagnostics.rule import (
    Knob,
    Outcome,
    finding,
    healthy,
    lower_lr,
    not_measured,
    not_yet,
    rule,
    series,
)
from trainer.tools.runs.load import RunRecord
from trainer.tools.runs.readings import DepthCurve, Number, last_curves, number_text, unused_from
from trainer.wording import counted

COLD_STARTS = "ledger/cold_starts"
# By mode.
FALSE_EVICTIONS = {"lru": "ledger/false_evictions/lru", "stale": "ledger/false_evictions/stale"}
EVICTIONS = {"lru": "ledger/evictions/lru", "stale": "ledger/evictions/stale"}
REFUSED = "ledger/refused_rows"
WIPES = "ledger_wipe_count"


def _false_evictions(run: RunRecord, mode: str, key: str) -> Outcome:
    losses, evictions = series(run, FALSE_EVICTIONS[mode]), series(run, EVICTIONS[mode])
    if not losses.positive:
        return healthy(f"no evicted state was needed again ({mode})")
    share = " of ".join(number_text(each.total) for each in (losses, evictions) if each)
    words = f"{share} evicted states ({mode}) were still needed: their documents continued from "
    words += f"zero, first logged at step {losses.steps[losses.positive[0]]}"
    knob: Knob | None = None
    if run.setting("ledger.wipe_mode", mode).endswith(mode):  # a resume may have changed it
        knob = Knob.scaled(run, key, 2, "twice as many")
    return finding(words, losses.evidence(losses.positive), knob=knob)


@rule("error", needs=[FALSE_EVICTIONS["lru"]])
def false_evictions_lru(run: RunRecord) -> Outcome:
    """States that `lru` evicted and that were still needed."""
    return _false_evictions(run, "lru", "ledger.capacity")


@rule("error", needs=[FALSE_EVICTIONS["stale"]])
def false_evictions_stale(run: RunRecord) -> Outcome:
    """States that were evicted for their age and still needed."""
    return _false_evictions(run, "stale", "ledger.stale_threshold")


@rule("error", needs=[COLD_STARTS])
def cold_starts(run: RunRecord) -> Outcome:
    """Documents that continued without their state, which no other counter explains."""
    cold = series(run, COLD_STARTS)
    if not cold.positive:
        return healthy("every chunk that continues a document found its state")
    # Each of these has a rule of its own. A refused row explains one at most.
    causes = [series(run, key) for key in (*FALSE_EVICTIONS.values(), REFUSED)]
    known = math.fsum(cause.total for cause in causes)
    if cold.total <= known:
        chunks, why = counted(cold.total, "chunk"), " and ".join(each.key for each in causes if each.total)
        return Outcome("explained", f"{chunks} continuing a document found no state, explained by {why}")
    first, chunks = cold.steps[cold.positive[0]], counted(cold.total - known, "chunk")
    words = f"{chunks} continuing a document found no state and began from zero, "
    words += f"first logged at step {first}"
    evidence, wipes = [cold.evidence(cold.positive)], series(run, WIPES)
    knob: Knob | None = None
    if wipes.total:
        words += "; the ledger was wiped"
        evidence.append(wipes.evidence(wipes.positive))
        if run.setting("ledger.wipe_mode", "full") == "full":
            knob = Knob("ledger.wipe_mode", run.setting("ledger.wipe_mode"), "lru")
    elif any(restart.global_step < first for restart in run.restarts):
        words += "; the run was resumed before: does the data set continue where it was saved?"
    else:  # no capacity would help
        words += "; no false eviction explains them: were the chunks before them stored?"
    return finding(words, *evidence, knob=knob)


@rule("error", needs=[REFUSED])
def refused_rows(run: RunRecord) -> Outcome:
    """States that were not finite."""
    refused = series(run, REFUSED)
    if not refused.positive:
        return healthy("every state was finite")
    first = refused.steps[refused.positive[0]]
    words = f"{counted(refused.total, 'state')} held NaN or infinity and became zero, first logged at step {first}"
    return finding(words, refused.evidence(refused.positive), knob=lower_lr(run, first))


# ---- The loss against depth


def _gain_key(name: str, depth: int) -> str:
    """The key of a set's gain at a depth; the held-out documents are ""."""
    return "/".join(filter(None, ("eval", name, "depth", str(depth), "carry_gain")))


def _curves(run: RunRecord) -> dict[str, DepthCurve] | Outcome:
    """The curves of the last evaluation, if there are enough evaluations to judge them."""
    if run.setting("objective.target"):
        return not_measured("a loss of one's own has no scale by which a gain is small")
    number, found = last_curves(run)
    curves = {name: curve for name, curve in found.items() if curve.gains}  # with known errors
    if found and not curves:
        return not_measured("the gain by depth has no error: that takes five held-out documents")
    if number and not found:
        return not_measured("the last evaluation has no gain by depth, or one not finite")
    is_coming = run.setting("eval.depth") and run.setting("eval.every") and not run.evals.steps
    if not number and not is_coming:
        needed = "evaluations with eval.depth, a model with state and documents longer than a cell"
        return not_measured(f"needs eval/depth: {needed}")
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
        gains = ", ".join(f"{gain} at {at:,}" for at, gain in curve.gains[-3:])
        words = f"the model uses no context beyond {depth:,} tokens{f' of {name}' * bool(name)}: carrying gains {gains}"
        # The gradient flows through a row: longer ones teach the model what to keep.
        knob = Knob.scaled(run, "data.seq_len", 2, "twice as long")
        return finding(words, series(run, _gain_key(name, start)).evidence(), knob=knob)
    return healthy("carrying gains " + ", ".join(deepest))


def _is_negative(gain: Number) -> bool:
    return gain.value < -max(limits.FAR_ERRORS * gain.error, limits.WORTHLESS_NATS)


def _risen(curve: DepthCurve) -> tuple[int, int] | None:
    """(depth of the largest gain so far, the first at which it is lost); None: it never is."""
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
    """States that harm, or gain much less, where they are older than any that training made."""
    curves = _curves(run)
    if isinstance(curves, Outcome):
        return curves
    for name, curve in curves.items():
        risen = _risen(curve)
        if risen is None:
            continue
        gains, (best, depth) = dict(curve.gains), risen
        inside = f" in {name}" * bool(name)
        words = f"the gain of carrying falls with depth{inside}: {gains[best]} from {best:,} "
        words += f"tokens on, {gains[depth]} from {depth:,} on"
        if best == depth:
            words = f"carrying raises the loss{inside}: it gains {gains[depth]} from {depth:,} tokens on"
        knob = Knob.scaled(run, "data.seq_len", 2, "twice as long")
        if run.setting("ledger.wipe_mode") == "full":  # no state outlives a wipe
            knob = Knob("ledger.wipe_mode", "full", "lru")
        return finding(words, *(series(run, _gain_key(name, at)).evidence() for at in sorted({*risen})), knob=knob)
    return healthy("the gain of carrying does not fall by half with depth")


RULES = (
    false_evictions_lru, false_evictions_stale, cold_starts, refused_rows, context_unused, loss_rises_with_depth,
)  # fmt: skip
