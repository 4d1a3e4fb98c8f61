"""Rules about recurrent state: lost while still needed, or given more memory than needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median

from trainer.metrics.catalog.lookup import keys_under
from trainer.tools.diagnostics.facts import lower_lr, micro_batches, pools, readers_of_a_rank, state_bytes
from trainer.tools.diagnostics.outcome import Knob, Outcome, explained, finding, healthy, not_measured, not_yet
from trainer.tools.diagnostics.rules.rule import Rule
from trainer.tools.diagnostics.series import Series, aligned, series
from trainer.tools.runs.load import RunRecord
from trainer.tools.waits import wait_bound
from trainer.wording import counted, number_text

COLD_STARTS = "ledger/cold_starts"
# By mode.
FALSE_EVICTIONS = {key.rpartition("/")[2]: key for key in keys_under("ledger/false_evictions/")}
EVICTIONS = {key.rpartition("/")[2]: key for key in keys_under("ledger/evictions/")}
REFUSED = "ledger/refused_rows"
WIPES = "ledger_wipe_count"
LIVE = "ledger/live_groups"
FILL = "ledger/fill_fraction"
WAIT = "stream_mixing/active/steps_since_pick_max"

FULL = 0.99
SHORT_LIFE_STEPS = 10.0
OVERSIZE_FILL = 0.25
OVERSIZE_BYTES = 1e9
OVERSIZE_DEVICE_SHARE = 0.05
OVERSIZE_STEPS = 100


def check_false_evictions(run: RunRecord, *, mode: str) -> Outcome:
    """Groups that continued after their state had been evicted."""
    losses = series(run, FALSE_EVICTIONS[mode])
    if not losses.positive:
        return healthy(f"no group continued after its state was evicted ({mode})")
    evictions = series(run, EVICTIONS[mode])
    share = f" of {counted(evictions.total, 'eviction')}" if evictions else ""
    return finding(
        f"{counted(losses.total, 'group')}{share} continued after their state was evicted ({mode}), "
        f"first logged at step {losses.steps[losses.positive[0]]}",
        evidence=[losses.evidence(losses.positive)],
        knob=REMEDIES[mode][1](run),
    )


def _larger_capacity(run: RunRecord) -> Knob:
    capacity = _capacity(run)
    return Knob("ledger.capacity", capacity, 2 * capacity if capacity else "twice as many")


def _capacity(run: RunRecord) -> int | None:
    """Rows of the ledger of one rank: as configured, else estimated from the number of live groups, which is a sum over ranks,
    and the fill; None where neither is known."""
    configured = run.setting("ledger.capacity")
    if isinstance(configured, int):
        return configured
    if run.world_size is None:
        return None
    live, fill = aligned(series(run, LIVE), series(run, FILL))
    sizes = [groups / share for groups, share in zip(live.values, fill.values, strict=True) if share > 0]
    return round(median(sizes) / run.world_size) if sizes else None


def _longer_threshold(run: RunRecord) -> Knob:
    """Beyond the longest wait that any order of picks makes likely, as `train preview` proposes it."""
    current = run.setting("ledger.stale_threshold")
    safe = _safe_threshold(run)
    if safe is None:
        return Knob("ledger.stale_threshold", current, 4 * current if current else "four times as long")
    return Knob("ledger.stale_threshold", current, safe if not current or safe > current else 2 * current)


def _safe_threshold(run: RunRecord) -> int | None:
    """`wait_bound` of the pool that waits longest; None if the record does not tell.

    The preview knows every slice; a record only the longest that a logged row saw. It stands for all slices of all pools.
    """
    readers = round(readers_of_a_rank(run) or 0)
    longest = max(series(run, "stream_mixing/active/remaining_max").values, default=0.0)
    found = pools(run, readers)
    if not readers or not longest or found is None:
        return None
    slices = [round(longest) + 1] * readers
    return max(wait_bound(slices, count, share, micro_batches(run)) for share, count in found)


def check_cold_starts(run: RunRecord) -> Outcome:
    """Cells that found no state, beyond those explained by false evictions and refused rows."""
    cold = series(run, COLD_STARTS)
    if not cold.total:
        return healthy("every cell that continues a group found its state")
    causes = [series(run, key) for key in (*FALSE_EVICTIONS.values(), REFUSED)]
    known = math.fsum(cause.total for cause in causes)
    if cold.total <= known:
        names = " and ".join(cause.key for cause in causes if cause.total)
        return explained(f"{counted(cold.total, 'cell')} started from zero state, explained by {names}")
    first = cold.steps[cold.positive[0]]
    unexplained = counted(cold.total - known, "cell")
    sentence = f"{unexplained} that continue a group found no state, first logged at step {first}"
    evidence = [cold.evidence(cold.positive)]
    wipes = series(run, WIPES)
    knob: Knob | None
    if wipes.total:
        sentence += f"; the ledger was wiped {counted(wipes.total, 'time')}"
        evidence.append(wipes.evidence(wipes.positive))
        knob = Knob("ledger.wipe_mode", run.setting("ledger.wipe_mode"), "lru")
    elif any(restart.global_step < first for restart in run.restarts):
        knob = Knob("checkpoint.resume", run.setting("checkpoint.resume"), "a checkpoint that includes the ledger")
    elif any(series(run, key).total for key in (*EVICTIONS.values(), *FALSE_EVICTIONS.values())):
        knob = _larger_capacity(run)
    else:
        # Nothing was evicted, so no capacity would help: the data set continues groups that it has not begun.
        knob, sentence = None, f"{sentence}; nothing was evicted: their first cells were never stored"
    return finding(sentence, evidence=evidence, knob=knob)


def check_thrash(run: RunRecord) -> Outcome:
    """A full ledger whose states live for less time than a reader may wait for its next pick."""
    evictions, live, fill = series(run, EVICTIONS["lru"]), series(run, LIVE), series(run, FILL)
    lives = _lives(evictions, live, fill)
    if not lives:
        return healthy("the ledger never had to evict while full")
    life = median(lives.values())
    waits = series(run, WAIT)
    wait = max(waits.values) / micro_batches(run) if waits else SHORT_LIFE_STEPS
    words = (
        f"a state lives for {number_text(life)} steps in the full ledger, the longest wait is {number_text(wait)} steps"
    )
    if life >= wait:
        return healthy(words)
    if series(run, FALSE_EVICTIONS["lru"]).total:
        return explained(f"{words}; ledger/false_evictions/lru counts the lost states")
    shown = [index for index, step in enumerate(evictions.steps) if step in lives]
    evidence = [evictions.evidence(shown), *([waits.evidence(waits.largest())] if waits else [])]
    return finding(words, evidence=evidence, knob=_larger_capacity(run))


def _lives(*columns: Series) -> dict[int, float]:
    """Lifetime of a state in steps, for each row in which the ledger is full and evicts: evictions, live groups, fill."""
    evictions, live, fill = aligned(*columns)
    return {
        step: held * max(step - before, 1) / count
        for before, step, count, held, share in zip(
            [0, *evictions.steps], evictions.steps, evictions.values, live.values, fill.values, strict=False
        )
        if count > 0 and share >= FULL
    }


def check_oversize(run: RunRecord) -> Outcome:
    """Memory that is allocated for states and never used."""
    fill = series(run, FILL)
    capacity, width = _capacity(run), state_bytes(run)
    if capacity is None or width is None:
        return not_measured("how large a state is was not recorded")
    if fill.steps[-1] < OVERSIZE_STEPS:
        return not_yet(f"needs {OVERSIZE_STEPS} steps, has {fill.steps[-1]}")
    peak = max(fill.values)
    spare = capacity * (1 - peak) * width
    device = max(series(run, "gpu/total_gb").values, default=0.0) * 1e9
    limit = OVERSIZE_DEVICE_SHARE * device or OVERSIZE_BYTES
    words = f"at most {peak:.1%} of {capacity:,} rows were used; the rest takes {spare / 1e9:.2g} GB per rank"
    if peak >= OVERSIZE_FILL or spare <= limit:
        return healthy(words)
    enough = 2 ** math.ceil(math.log2(max(2 * peak * capacity, 1)))
    return finding(words, evidence=[fill.evidence(fill.largest())], knob=Knob("ledger.capacity", capacity, enough))


def check_refused_rows(run: RunRecord) -> Outcome:
    """States that were not finite."""
    refused = series(run, REFUSED)
    if not refused.positive:
        return healthy("every state was finite")
    first = refused.steps[refused.positive[0]]
    return finding(
        f"{counted(refused.total, 'state')} not stored because of NaN or infinity, first logged at step {first}",
        evidence=[refused.evidence(refused.positive)],
        knob=lower_lr(run),
    )


# What to change after false evictions, by mode: in words, and for a run. A mode of the catalog without one fails the import:
# `cold_starts` leaves the cells that a mode's counter explains to that mode's rule.
REMEDIES: Mapping[str, tuple[str, Callable[[RunRecord], Knob]]] = {
    "lru": ("`ledger.capacity`: twice as large", _larger_capacity),
    "stale": (
        "`ledger.stale_threshold`: the bound of `train preview`, which is 2 K n (K readers, n picks per slice) divided by the "
        "source's micro-batches per step, or with one reader its wait for a pick; the longest slice logged stands for all",
        _longer_threshold,
    ),
}


def _false_evictions_rule(mode: str) -> Rule:
    return Rule(
        name=f"false_evictions_{mode}",
        needs=(FALSE_EVICTIONS[mode],),
        threshold="above 0",
        why="The counter includes only groups that continued after their state was evicted: each is a cell that started from "
        "the wrong state.",
        knob=REMEDIES[mode][0],
        severity="error",
        check=partial(check_false_evictions, mode=mode),
    )


RULES = (
    *map(_false_evictions_rule, FALSE_EVICTIONS),
    Rule(
        name="cold_starts",
        needs=(COLD_STARTS,),
        uses=(*FALSE_EVICTIONS.values(), REFUSED, WIPES, *EVICTIONS.values()),
        threshold="more cold starts than false evictions and refused rows explain",
        why="Wipes, and resuming without the ledger, are not counted as false evictions; cold starts count every cause.",
        knob="`ledger.wipe_mode`, the checkpoint, or `ledger.capacity`, depending on what happened before; none "
        "if nothing was wiped, resumed or evicted",
        severity="error",
        check=check_cold_starts,
    ),
    Rule(
        name="ledger_thrash",
        needs=(EVICTIONS["lru"], LIVE, FILL),
        uses=(WAIT,),
        threshold=f"fill of {FULL} or more, and live groups divided by evictions per step below the longest wait for a pick "
        f"({SHORT_LIFE_STEPS:g} steps if waits are not logged)",
        why="LRU evicts the oldest state, so a state lives for live groups / evictions steps; a reader that waits longer has "
        "lost its state.",
        knob="`ledger.capacity`: twice as large",
        severity="warning",
        check=check_thrash,
    ),
    Rule(
        name="ledger_oversize",
        needs=(FILL,),
        uses=("gpu/total_gb",),
        threshold=f"at most {OVERSIZE_FILL:.0%} used over {OVERSIZE_STEPS} steps or more, and the unused rows take more than "
        f"{OVERSIZE_DEVICE_SHARE:.0%} of device memory (1 GB if its size is unknown)",
        why="The whole capacity is allocated at startup. A quarter leaves room for a fourfold increase; small ledgers cost "
        "nothing.",
        knob="`ledger.capacity`: the power of two above twice the peak use",
        severity="warning",
        check=check_oversize,
    ),
    Rule(
        name="refused_rows",
        needs=(REFUSED,),
        threshold="above 0",
        why="A state that is not finite comes from a recurrence that overflowed.",
        knob="`optimizer.lr`: half",
        severity="error",
        check=check_refused_rows,
    ),
)
