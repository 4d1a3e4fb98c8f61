"""Rules about recurrent state: lost while needed, too much memory, worthless or stale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, stdev

from trainer.metrics.catalog.lookup import ERROR_SUFFIX, keys_under
from trainer.tools import limits
from trainer.tools.diagnostics.rule import (
    Knob,
    Outcome,
    Series,
    aligned,
    explained,
    finding,
    has_full_rows,
    healthy,
    lower_lr,
    not_measured,
    not_yet,
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
FILL = "ledger/fill_fraction"  # share of the capacity, on the fullest rank
GAIN = ("ledger/carry_gain", f"ledger/carry_gain{ERROR_SUFFIX}")
GAP = ("ledger/stale_gap", f"ledger/stale_gap{ERROR_SUFFIX}")
PROBES = "a model with state is probed every ledger.probe_every steps"


def _twice(run: RunRecord, key: str) -> Knob:
    current = run.setting(key)
    if not isinstance(current, int):
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


@rule("warning", needs=[FILL])
def ledger_oversize(run: RunRecord) -> Outcome:
    """A ledger that takes much memory and is hardly used."""
    fill, capacity, width = series(run, FILL), run.setting("ledger.capacity"), run.environment.get("state_width")
    if not isinstance(capacity, int) or not width:
        return not_measured("how large a state is was not recorded")
    if fill.steps[-1] < limits.OVERSIZE_STEPS:
        return not_yet(f"needs {limits.OVERSIZE_STEPS} steps, has {fill.steps[-1]}")
    device = max(series(run, "gpu/total_gb").values, default=0.0) * 1e9
    row_bytes = width * (2 if run.setting("ledger.dtype") == "bfloat16" else 4)
    judged = limits.ledger_oversize(capacity, max(fill.values) * capacity, row_bytes, device)
    if not judged.is_beyond:
        return healthy(judged.words)
    knob = Knob("ledger.capacity", capacity, judged.better)
    return finding(judged.words, fill.evidence(fill.largest()), knob=knob)


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


@dataclass(frozen=True)
class _Late:
    """The mean of a probed key over the second half of a run, and its standard error: that of the
    probes' own errors, or that of their scatter if it is larger, as the error of a probe cannot
    know how streams differ."""

    mean: float
    error: float
    shown: Series

    def __str__(self) -> str:
        return f"{self.mean:.4f} +- {self.error:.4f}"


def _late(run: RunRecord, *keys: tuple[str, str]) -> list[_Late] | Outcome:
    """The means of some keys over the second half of a run, if it has enough probes there."""
    columns = aligned(*(series(run, key) for pair in keys for key in pair))
    rows = zip(*(column.values for column in columns), strict=True)
    finite = [index for index, row in enumerate(rows) if all(map(math.isfinite, row))]
    columns = [column.at(finite).since(run.steps[-1] // 2 + 1) for column in columns]
    count = len(columns[0])
    if count < limits.MIN_PROBES:
        remedy = "lower ledger.probe_every" if run.config else "probe more often"
        return not_yet(f"needs {limits.MIN_PROBES} probes in the second half of the run; {remedy}")
    found = []
    for values, errors in zip(columns[::2], columns[1::2], strict=True):
        own = math.sqrt(math.fsum(error**2 for error in errors.values)) / count
        scatter = stdev(values.values) / math.sqrt(count)
        found.append(_Late(fmean(values.values), max(own, scatter), values))
    return found


@rule("advice", needs=GAIN, hint=PROBES)
def carry_worthless(run: RunRecord) -> Outcome:
    """Carried states that do not lower the loss."""
    found = _late(run, GAIN)
    if isinstance(found, Outcome):
        return found
    (gain,) = found
    words = f"the state carried from the chunk before lowers the loss by {gain} nats per token "
    words += f"({len(gain.shown)} probes)"
    if gain.mean < -max(limits.FAR_ERRORS * gain.error, limits.STALE_NATS):
        words += ": chunks do better from a state of zero"
        return finding(words, gain.shown.evidence(), knob=lower_lr(run), severity="warning")
    may_be_zero = gain.mean <= limits.NEAR_ERRORS * gain.error
    # The upper bound excludes a gain that the probes are too few to see.
    if not may_be_zero or gain.mean + limits.FAR_ERRORS * gain.error > limits.WORTHLESS_NATS:
        return healthy(words)
    words += ", which is nothing: the model does not use its state, and the ledger is overhead"
    return finding(words, gain.shown.evidence(), knob=Knob.of(run, "data.max_group_cells", 1))


@rule("warning", needs=(*GAP, *GAIN), hint=PROBES)
def stale_states(run: RunRecord) -> Outcome:
    """Carried states whose effect on the loss differs from that of fresh ones."""
    found = _late(run, GAP, GAIN)
    if isinstance(found, Outcome):
        return found
    gap, gain = found
    size, first, side, effect = abs(gap.mean), gap.shown.steps[0], "above", "their age costs loss"
    if gap.mean < 0:
        side, effect = "below", "training looks better than inference will be"
    words = f"carried states, made with older weights, put the loss {size:.4f} +- {gap.error:.4f} "
    words += f"nats per token {side} that of fresh ones (carrying a state lowers it by {gain})"
    if size <= max(limits.FAR_ERRORS * gap.error, limits.STALE_SHARE * gain.mean, limits.STALE_NATS):
        return healthy(words)
    if series(run, COLD_STARTS).since(first).total:
        lost = "ledger/cold_starts counts lost states, which also differ from fresh ones"
        return explained(f"{words}; {lost}")
    # Fewer streams in flight make states younger; otherwise only smaller steps help.
    knob, streams = lower_lr(run), run.setting("data.mixing.num_streams_mixed")
    if isinstance(streams, int) and streams > 1 and not has_full_rows(run):
        knob = Knob("data.mixing.num_streams_mixed", streams, streams // 2)
    return finding(f"states are stale: {words}; {effect}", gap.shown.evidence(), gain.shown.evidence(), knob=knob)


RULES = (
    false_evictions_lru, false_evictions_stale, cold_starts, ledger_oversize, refused_rows,
    carry_worthless, stale_states,
)  # fmt: skip
