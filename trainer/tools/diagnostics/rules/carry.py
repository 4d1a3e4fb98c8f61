"""Rules about the worth of carried states: worth nothing, or too old for the weights that read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from trainer.metrics.catalog.lookup import ERROR_SUFFIX
from trainer.tools.diagnostics.facts import lower_lr
from trainer.tools.diagnostics.outcome import Knob, Outcome, explained, finding, healthy, not_yet
from trainer.tools.diagnostics.rules.rule import Rule
from trainer.tools.diagnostics.series import Series, aligned, series
from trainer.tools.runs.load import RunRecord
from trainer.wording import number_text

GAIN = "ledger/carry_gain"
GAP = "ledger/stale_gap"
AGE = "ledger/state_age"
DRIFT = "ledger/state_drift"
COLD_STARTS = "ledger/cold_starts"

MIN_PROBES = 4
NEAR_ERRORS = 2.0
FAR_ERRORS = 4.0
WORTHLESS_NATS = 0.005
STALE_SHARE = 0.1
STALE_NATS = 0.001


@dataclass(frozen=True)
class Late:
    """The mean of a probed key over the second half of a run.

    Attributes:
        error: its standard error: that of the probes' own errors, or that of their scatter if it is larger. The errors of
            single probes cannot know how much one stream differs from the next.
        shown: the probes.
    """

    mean: float
    error: float
    shown: Series

    def __str__(self) -> str:
        return f"{self.mean:.4f} +- {self.error:.4f}"


def late(run: RunRecord, *keys: str) -> list[Late] | None:
    """The means of some keys over the second half of a run; None with fewer than `MIN_PROBES` probes there."""
    columns = aligned(*(series(run, key) for base in keys for key in (base, base + ERROR_SUFFIX)))
    finite = [
        index
        for index, row in enumerate(zip(*(column.values for column in columns), strict=True))
        if all(math.isfinite(value) for value in row)
    ]
    columns = [column.at(finite).since(run.steps[-1] // 2 + 1) for column in columns]
    if len(columns[0]) < MIN_PROBES:
        return None
    return [_pooled(*columns[2 * index : 2 * index + 2]) for index in range(len(keys))]


def _pooled(values: Series, errors: Series) -> Late:
    count = len(values)
    own = math.sqrt(math.fsum(error**2 for error in errors.values)) / count
    return Late(fmean(values.values), max(own, stdev(values.values) / math.sqrt(count)), values)


def check_gain(run: RunRecord) -> Outcome:
    """What cells gain by starting from their stored state instead of zero."""
    found = late(run, GAIN)
    if found is None:
        return _too_few(run)
    (gain,) = found
    words = f"over the last {len(gain.shown)} probes the stored state lowers a cell's loss by {gain} nats per token"
    if gain.mean < -max(FAR_ERRORS * gain.error, STALE_NATS):
        return finding(
            f"{words}: cells do better from a state of zero",
            evidence=[gain.shown.evidence()],
            knob=lower_lr(run),
            severity="warning",
        )
    is_none = gain.mean <= NEAR_ERRORS * gain.error and gain.mean + FAR_ERRORS * gain.error <= WORTHLESS_NATS
    if not is_none:
        return healthy(words)
    cells = run.setting("data.max_group_cells")
    return finding(
        f"{words}, which is nothing: the model does not use what is carried, and the ledger is overhead",
        evidence=[gain.shown.evidence()],
        knob=Knob("data.max_group_cells", cells, 1),
    )


def check_gap(run: RunRecord) -> Outcome:
    """What the age of stored states changes in the loss of the cells that start from them."""
    found = late(run, GAP, GAIN)
    if found is None:
        return _too_few(run)
    gap, gain = found
    size = abs(gap.mean)
    side = "below" if gap.mean < 0 else "above"
    words = (
        f"the loss from stored states is {size:.4f} +- {gap.error:.4f} nats per token {side} that from fresh ones, and "
        f"carrying gains {gain}"
    )
    if size <= max(FAR_ERRORS * gap.error, STALE_SHARE * gain.mean, STALE_NATS):
        return healthy(words)
    if series(run, COLD_STARTS).since(gap.shown.steps[0]).total:
        return explained(f"{words}; ledger/cold_starts counts lost states, which also differ from fresh ones")
    effect = "training looks better than inference will be" if gap.mean < 0 else "their age costs loss"
    return finding(
        f"states are stale{_background(run, gap.shown)}: {words}; {effect}",
        evidence=[gap.shown.evidence(), gain.shown.evidence()],
        knob=_fresher(run),
    )


def _background(run: RunRecord, shown: Series) -> str:
    """How old the states are, and how far off, where that is logged."""
    age, drift = (series(run, key).since(shown.steps[0]).values for key in (AGE, DRIFT))
    return f" ({number_text(fmean(age))} steps old, {fmean(drift):.0%} off)" if age and drift else ""


def _fresher(run: RunRecord) -> Knob:
    """Fewer streams in flight make states younger; with one only a smaller step of the weights does."""
    streams = run.setting("data.mixing.num_streams_mixed")
    if isinstance(streams, int) and streams > 1:
        return Knob("data.mixing.num_streams_mixed", streams, streams // 2)
    return lower_lr(run)


def _too_few(run: RunRecord) -> Outcome:
    remedy = "lower ledger.probe_every" if run.config else "probe more often"
    return not_yet(f"needs {MIN_PROBES} probes in the second half of the run; {remedy}")


def _first_probe(run: RunRecord) -> str:
    """When the first probe is due, for a run of a model with state that has not reached it."""
    every = run.setting("ledger.probe_every", 0)
    if not every or not run.environment.get("state_width") or (run.steps and run.steps[-1] >= every):
        return ""
    return f"needs {MIN_PROBES} probes in the second half of the run; the first is at step {every} (ledger.probe_every)"


def _needs(keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(key for base in keys for key in (base, base + ERROR_SUFFIX))


PROBES = "a model with state is probed every ledger.probe_every steps"
RULES = (
    Rule(
        name="carry_worthless",
        needs=_needs([GAIN]),
        hint=PROBES,
        due=_first_probe,
        threshold=f"over the second half of the run ({MIN_PROBES} probes or more) the mean gain is at most {NEAR_ERRORS:g} of "
        f"its standard errors, and with {FAR_ERRORS:g} still at most {WORTHLESS_NATS:g} nats; a warning if it is negative by "
        f"more than {FAR_ERRORS:g} and {STALE_NATS:g} nats",
        why="A gain within its error of 0 may also be one that the probes are too few to see: the upper bound excludes a gain "
        "that would matter. It costs memory and time but does no harm, hence advice.",
        knob="`data.max_group_cells`: 1; or a model that uses its state. `optimizer.lr`: half, if the gain is negative",
        severity="advice",
        check=check_gain,
    ),
    Rule(
        name="stale_states",
        needs=_needs([GAP, GAIN]),
        hint=PROBES,
        due=_first_probe,
        uses=(AGE, DRIFT, COLD_STARTS),
        threshold=f"over the second half of the run ({MIN_PROBES} probes or more) the mean gap, of either sign, is beyond "
        f"{FAR_ERRORS:g} standard errors, {STALE_SHARE:g} of the gain and {STALE_NATS:g} nats",
        why="Stored states were made by older weights. A gap means that cells are trained on states that inference never has; "
        "against the gain it says how much of what carrying seems to be worth is due to that.",
        knob="`data.mixing.num_streams_mixed`: half; or `optimizer.lr`: lower, `ledger.burn_in`, or a smaller "
        "`data.max_group_cells`",
        severity="warning",
        check=check_gap,
    ),
)
