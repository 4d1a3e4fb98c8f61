"""Rules about recurrent state: lost while it was needed, or kept in more room than it needs."""

from __future__ import annotations

import math
from functools import partial
from statistics import median

from trainer.diagnostics.facts import micro_batches, ranks, readers_of_a_rank, state_bytes
from trainer.diagnostics.outcome import Knob, Outcome, explained, finding, healthy, not_applicable, not_measured
from trainer.diagnostics.rules.rule import Rule
from trainer.diagnostics.series import Series, aligned, count_of, number, series
from trainer.runs.load import Run

COLD_STARTS = "ledger/cold_starts"
FALSE_EVICTIONS = {mode: f"ledger/false_evictions/{mode}" for mode in ("lru", "stale")}
EVICTIONS = {mode: f"ledger/evictions/{mode}" for mode in ("lru", "stale")}
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


def check_false_evictions(run: Run, *, mode: str) -> Outcome:
    """Any group that went on after it had been evicted."""
    losses = series(run, FALSE_EVICTIONS[mode])
    if not losses:
        return not_measured(losses.key)
    hits = losses.where(lambda value: value > 0)
    if not hits:
        return healthy(f"no group went on after {mode} had dropped its state")
    evictions = series(run, EVICTIONS[mode])
    share = f" of {number(evictions.total)} evictions" if evictions else ""
    return finding(
        f"{number(losses.total)} groups{share} went on after {mode} had dropped their state, "
        f"the first by step {losses.steps[hits[0]]}",
        evidence=[losses.evidence(hits)],
        knob=_capacity_knob(run) if mode == "lru" else _stale_knob(run),
    )


def _capacity_knob(run: Run) -> Knob:
    capacity = _capacity(run)
    return Knob("ledger.capacity", capacity, 2 * capacity if capacity else "twice as many")


def _capacity(run: Run) -> int | None:
    """Places of a rank's ledger: the config's, or else what live groups and fill give on one rank."""
    configured = run.setting("ledger.capacity")
    if isinstance(configured, int):
        return configured
    _, (live, fill) = aligned(series(run, LIVE), series(run, FILL))
    sizes = [groups / share for groups, share in zip(live, fill, strict=True) if share > 0]
    return round(median(sizes) / ranks(run)) if sizes else None


def _stale_knob(run: Run) -> Knob:
    """A threshold of 2 K n picks is safe (K readers, n picks a slice), in steps."""
    current = run.setting("ledger.stale_threshold")
    readers = readers_of_a_rank(run)
    longest = max(series(run, "stream_mixing/active/remaining_max").values, default=0.0)
    if not readers or not longest:
        return Knob("ledger.stale_threshold", current, 4 * current if current else "four times as long")
    safe = math.ceil(2 * readers * (longest + 1) / micro_batches(run))
    return Knob("ledger.stale_threshold", current, max(safe, 2 * current) if current else safe)


def check_cold_starts(run: Run) -> Outcome:
    """Cells that found no state, beyond those that false evictions and refused rows account for."""
    cold = series(run, COLD_STARTS)
    if not cold:
        return not_measured(cold.key)
    if not cold.total:
        return healthy("every cell that continues a group found its state")
    causes = [series(run, key) for key in (*FALSE_EVICTIONS.values(), REFUSED)]
    known = math.fsum(column.total for column in causes)
    if cold.total <= known:
        names = " and ".join(column.key for column in causes if column.total)
        return explained(f"{count_of(cold.total, 'cell')} started cold, as many as {names} account for")
    hits = cold.where(lambda value: value > 0)
    wipes = series(run, WIPES)
    first = cold.steps[hits[0]]
    sentence = f"{count_of(cold.total - known, 'cell')} that continue a group found no state, the first by step {first}"
    if wipes.total:
        knob = Knob("ledger.wipe_mode", run.setting("ledger.wipe_mode"), "lru")
        wiped = wipes.where(lambda value: value > 0)
        sentence += f"; the ledger was wiped {count_of(wipes.total, 'time')}"
        return finding(sentence, evidence=[cold.evidence(hits), wipes.evidence(wiped)], knob=knob)
    knob = _capacity_knob(run)
    if any(restart.global_step < first for restart in run.restarts):
        knob = Knob("checkpoint.resume", run.setting("checkpoint.resume"), "a checkpoint that holds the ledger")
    return finding(sentence, evidence=[cold.evidence(hits)], knob=knob)


def check_thrash(run: Run) -> Outcome:
    """A full ledger in which a state lives shorter than a reader may have to wait."""
    evictions, live, fill = series(run, EVICTIONS["lru"]), series(run, LIVE), series(run, FILL)
    if not evictions or not live or not fill:
        return not_measured(EVICTIONS["lru"], LIVE, FILL)
    lives = _lives(evictions, live, fill)
    if not lives:
        return healthy("the ledger was never full and evicting at once")
    life = median(lives.values())
    waits = series(run, WAIT)
    wait = max(waits.values) / micro_batches(run) if waits else SHORT_LIFE_STEPS
    words = f"a state lives {number(life)} steps when the ledger is full, the longest wait is {number(wait)} steps"
    if life >= wait:
        return healthy(words)
    if series(run, FALSE_EVICTIONS["lru"]).total:
        return explained(f"{words}; ledger/false_evictions/lru counts what it cost")
    shown = [index for index, step in enumerate(evictions.steps) if step in lives]
    evidence = [evictions.evidence(shown), *([waits.evidence(_peak(waits))] if waits else [])]
    return finding(words, evidence=evidence, knob=_capacity_knob(run))


def _lives(evictions: Series, live: Series, fill: Series) -> dict[int, float]:
    """Step -> steps that a state survives, at each row whose ledger is full and evicts."""
    steps, (counts, groups, fills) = aligned(evictions, live, fill)
    return {
        step: held * max(step - before, 1) / count
        for before, step, count, held, share in zip([0, *steps], steps, counts, groups, fills, strict=False)
        if count > 0 and share >= FULL
    }


def _peak(column: Series) -> list[int]:
    return [max(range(len(column)), key=column.values.__getitem__)]


def check_oversize(run: Run) -> Outcome:
    """Memory that is set aside for states and was never needed."""
    fill = series(run, FILL)
    if not fill:
        return not_measured(FILL)
    capacity, width = _capacity(run), state_bytes(run)
    if capacity is None or width is None:
        return not_applicable("the size of a state is unknown: no resolved config, or a model of one's own")
    if fill.steps[-1] < OVERSIZE_STEPS:
        return not_applicable(f"fewer than {OVERSIZE_STEPS} steps")
    peak = max(fill.values)
    spare = capacity * (1 - peak) * width
    device = max(series(run, "gpu/total_gb").values, default=0.0) * 1e9
    limit = OVERSIZE_DEVICE_SHARE * device or OVERSIZE_BYTES
    words = f"at most {peak:.1%} of {capacity:,} places were used; the rest takes {spare / 1e9:.2g} GB a rank"
    if peak >= OVERSIZE_FILL or spare <= limit:
        return healthy(words)
    enough = 2 ** math.ceil(math.log2(max(2 * peak * capacity, 1)))
    return finding(words, evidence=[fill.evidence(_peak(fill))], knob=Knob("ledger.capacity", capacity, enough))


def check_refused_rows(run: Run) -> Outcome:
    """States that were not finite."""
    refused = series(run, REFUSED)
    if not refused:
        return not_measured(REFUSED)
    hits = refused.where(lambda value: value > 0)
    if not hits:
        return healthy("every state was finite")
    lr = run.setting("optimizer.lr")
    return finding(
        f"{count_of(refused.total, 'state')} not stored for not being finite, the first by step {refused.steps[hits[0]]}",
        evidence=[refused.evidence(hits)],
        knob=Knob("optimizer.lr", lr, lr / 2 if isinstance(lr, float) else "half of it"),
    )


RULES = (
    *(
        Rule(
            name=f"false_evictions_{mode}",
            looks_at=(FALSE_EVICTIONS[mode],),
            threshold="above 0",
            why="The ledger counts only groups that went on after their state was dropped: each is a cell that began wrong.",
            knob=knob,
            severity="error",
            check=partial(check_false_evictions, mode=mode),
        )
        for mode, knob in (
            ("lru", "`ledger.capacity`: twice as large"),
            (
                "stale",
                "`ledger.stale_threshold`: 2 K n steps (K readers, n picks a slice, over the micro-batches a step)",
            ),
        )
    ),
    Rule(
        name="cold_starts",
        looks_at=(COLD_STARTS, *FALSE_EVICTIONS.values(), REFUSED, WIPES),
        threshold="more than false evictions and refused rows account for",
        why="False evictions do not see wipes and resumes without the ledger; cold starts are counted whatever the cause.",
        knob="`ledger.wipe_mode`, the checkpoint, or `ledger.capacity`, by what happened before",
        severity="error",
        check=check_cold_starts,
    ),
    Rule(
        name="ledger_thrash",
        looks_at=(EVICTIONS["lru"], LIVE, FILL, WAIT),
        threshold=f"fill at least {FULL}, and live groups over evictions a step below the longest wait for a pick "
        f"({SHORT_LIFE_STEPS:g} steps where waits are not logged)",
        why="LRU drops the oldest, so a state survives live groups / evictions a step; a reader that waits longer has lost it.",
        knob="`ledger.capacity`: twice as large",
        severity="warning",
        check=check_thrash,
    ),
    Rule(
        name="ledger_oversize",
        looks_at=(FILL, "gpu/total_gb"),
        threshold=f"never more than {OVERSIZE_FILL:.0%} used in {OVERSIZE_STEPS} steps or more, and the unused places take "
        f"more than {OVERSIZE_DEVICE_SHARE:.0%} of the device (1 GB where its memory is unknown)",
        why="The capacity is allocated at once. A quarter leaves room for a fourfold surprise; small ledgers cost nothing.",
        knob="`ledger.capacity`: the power of two above twice the most that was used",
        severity="warning",
        check=check_oversize,
    ),
    Rule(
        name="refused_rows",
        looks_at=(REFUSED,),
        threshold="above 0",
        why="A state that is not finite comes from a recurrence that overflowed.",
        knob="`optimizer.lr`: half",
        severity="error",
        check=check_refused_rows,
    ),
)
