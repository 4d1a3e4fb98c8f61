"""Rules about recurrent state: lost while needed, too much memory, not finite."""

from __future__ import annotations

import math

from trainer.metrics.catalog.lookup import keys_under
from trainer.tools.diagnostics.rule import (
    Knob,
    Outcome,
    explained,
    finding,
    healthy,
    lower_lr,
    rule,
    series,
)
from trainer.tools.runs.load import RunRecord
from trainer.wording import counted, number_text

COLD_STARTS = "ledger/cold_starts"
# By mode.
FALSE_EVICTIONS = {key.rpartition("/")[2]: key for key in keys_under("ledger/false_evictions/")}
EVICTIONS = {key.rpartition("/")[2]: key for key in keys_under("ledger/evictions/")}
REFUSED = "ledger/refused_rows"
WIPES = "ledger_wipe_count"


def _twice(run: RunRecord, key: str) -> Knob:
    current = run.setting(key)
    if not isinstance(current, int) or not current:
        return Knob(key, None, "twice as many")
    return Knob(key, current, max(2 * current, 2))


def _false_evictions(run: RunRecord, mode: str, key: str) -> Outcome:
    losses, evictions = series(run, FALSE_EVICTIONS[mode]), series(run, EVICTIONS[mode])
    if not losses.positive:
        return healthy(f"no evicted state was needed again ({mode})")
    share = number_text(losses.total)
    if evictions:
        share += f" of {number_text(evictions.total)}"
    words = f"{share} evicted states ({mode}) were still needed: their documents continued from "
    words += f"zero, first logged at step {losses.steps[losses.positive[0]]}"
    return finding(words, losses.evidence(losses.positive), knob=_twice(run, key))


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
    if not cold.total:
        return healthy("every chunk that continues a document found its state")
    # Each of these is counted by a rule of its own, when its group continues.
    causes = [series(run, key) for key in (*FALSE_EVICTIONS.values(), REFUSED)]
    known = math.fsum(cause.total for cause in causes)
    if cold.total <= known:
        why = " and ".join(cause.key for cause in causes if cause.total)
        chunks = counted(cold.total, "chunk")
        return explained(f"{chunks} that continue a document found no state, explained by {why}")
    first, chunks = cold.steps[cold.positive[0]], counted(cold.total - known, "chunk")
    words = f"{chunks} that continue a document found no state and began from zero, "
    words += f"first logged at step {first}"
    evidence, wipes = [cold.evidence(cold.positive)], series(run, WIPES)
    knob: Knob | None = None
    if wipes.total:
        words += f"; the ledger was wiped {counted(wipes.total, 'time')}"
        evidence.append(wipes.evidence(wipes.positive))
        knob = Knob.of(run, "ledger.wipe_mode", "lru")
    elif any(restart.global_step < first for restart in run.restarts):
        knob = Knob.of(run, "checkpoint.resume", "a checkpoint that includes the ledger")
    elif any(series(run, key).total for key in (*EVICTIONS.values(), *FALSE_EVICTIONS.values())):
        knob = _twice(run, "ledger.capacity")
    else:  # no capacity would help: the data set continues groups that it has not begun
        words += "; nothing was evicted: the chunks before them were never stored"
    return finding(words, *evidence, knob=knob)


@rule("error", needs=[REFUSED])
def refused_rows(run: RunRecord) -> Outcome:
    """States that were not finite."""
    refused = series(run, REFUSED)
    if not refused.positive:
        return healthy("every state was finite")
    first = refused.steps[refused.positive[0]]
    words = f"{counted(refused.total, 'state')} held NaN or infinity and became zero, "
    words += f"first logged at step {first}"
    return finding(words, refused.evidence(refused.positive), knob=lower_lr(run))


RULES = (false_evictions_lru, false_evictions_stale, cold_starts, refused_rows)
