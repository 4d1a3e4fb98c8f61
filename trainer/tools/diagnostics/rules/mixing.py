"""Rules about the pool of active readers. The thresholds were calibrated on simulated healthy pools; see docs/diagnosis.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.tools.diagnostics.facts import (
    MODALITIES,
    batch_sizes,
    batches_through,
    has_own_pools,
    is_one_pool,
    micro_batches,
    modality_columns,
    ranks,
)
from trainer.tools.diagnostics.outcome import Knob, Outcome, finding, healthy, not_measured, not_yet
from trainer.tools.diagnostics.rules.rule import Rule, unlogged
from trainer.tools.diagnostics.series import Series, aligned, series
from trainer.tools.runs.load import RunRecord
from trainer.wording import counted, number_text

SURPRISE = "stream_mixing/active/pick_surprise_max"
WAIT = "stream_mixing/active/steps_since_pick_max"
REMAINING_MIN = "stream_mixing/active/remaining_min"
REMAINING_MAX = "stream_mixing/active/remaining_max"
FRACTION_MIN = "stream_mixing/active/remaining_fraction_min"
EXHAUSTED = "stream_mixing/refill/exhaust_events"
ENDED_SOURCES = "blend/ended_sources"
MASKED = "stream_mixing/masked_share"

ALPHA = 1e-3  # false alarm probability of a statistical rule, per run
UNEVEN_RATIO = 16.0
UNEVEN_SHARE = 0.05
UNEVEN_ROWS = 5
EVEN_RATIO = 1.5
CHURN_PICKS = 4.0
CHURN_EVENTS = 20
MASKED_ROWS = 5
MASKED_LIMIT = 0.25
HEALTHY_MASKED = 0.1  # of a rank's micro-batches

SEVERAL_POOLS = not_measured("these keys merge the pools of several sources")


def check_stuck_reader(run: RunRecord) -> Outcome:
    """A reader that is passed over more often than its weight explains."""
    surprise = series(run, SURPRISE)
    mode = run.setting("data.mixing.pick_mode")
    if mode == "round_robin":
        return not_measured("round_robin picks readers in turn, so no wait is improbable")
    pools = ranks(run) if has_own_pools(run) else 1
    limit = math.log(max(batches_through(run, surprise.steps[-1]) * pools, 2) / ALPHA)
    hits = surprise.where(lambda value: value > limit)
    peak = number_text(max(surprise.values))
    words = f"the least probable wait has a surprise of {peak} nats, the limit for this number of picks is {limit:.1f}"
    if not hits:
        return healthy(words)
    waits = series(run, WAIT)
    return finding(
        f"a reader is not picked: {words}; first exceeded at step {surprise.steps[hits[0]]}",
        evidence=[surprise.evidence(hits), *([waits.evidence(hits)] if waits.steps == surprise.steps else [])],
        knob=Knob("data.mixing.pick_mode", mode, "round_robin"),
    )


def check_uneven_slices(run: RunRecord) -> Outcome:
    """Slices in one pool with so different numbers of picks that the short ones are rarely picked."""
    if not is_one_pool(run):
        return SEVERAL_POOLS
    least, most, fraction = aligned(*(series(run, key) for key in (REMAINING_MIN, REMAINING_MAX, FRACTION_MIN)))
    ratios = [
        # The reader with the fewest picks left started with at most low / share + 1, the other with at least `high`.
        high / (low / share + 1) if low > 0 and share > 0 else 0.0
        for low, high, share in zip(least.values, most.values, fraction.values, strict=True)
    ]
    hits = [index for index, ratio in enumerate(ratios) if ratio > UNEVEN_RATIO]
    words = (
        f"one slice has at least {number_text(max(ratios))} times as many picks as another, the limit is "
        f"{UNEVEN_RATIO:g} in {UNEVEN_SHARE:.0%} of the rows"
    )
    if len(hits) < max(UNEVEN_ROWS, UNEVEN_SHARE * len(least)):
        return healthy(words if max(ratios) > 1 else "all slices have about the same number of picks")
    waits = series(run, WAIT)
    if waits:
        words += f"; readers of short slices (large batches) waited up to {counted(max(waits.values), 'pick')}"
    sizes = batch_sizes(run)
    is_configured = bool(sizes) and max(sizes) > 2 * min(sizes)
    if is_configured:
        knob = Knob("data.mixing.batch_size_by_modality", f"{min(sizes)} to {max(sizes)}", "within a factor of 2")
    else:
        knob = Knob("data.source", None, "streams of similar size")
    shown = hits[:: max(len(hits) // 6, 1)][:6]
    return finding(
        words,
        evidence=[least.evidence(shown), most.evidence(shown)],
        knob=knob,
        severity="warning" if is_configured else "advice",
    )


def check_closed_pool(run: RunRecord) -> Outcome:
    """Until the first reader is exhausted, weighted picks drain all slices at the same rate.

    In picks, which all ranks of a shared pool count alike. Fractions of cells are of a rank's own slice, which ends before
    the longest one; the least and the largest of them would compare ranks, not readers.
    """
    if not is_one_pool(run):
        return SEVERAL_POOLS
    if has_own_pools(run) and ranks(run) > 1:
        return not_measured("these keys merge the pools of several ranks")
    least, most, ended = aligned(*(series(run, key) for key in (REMAINING_MIN, REMAINING_MAX, EXHAUSTED)))
    closed = next((index for index, count in enumerate(ended.values) if count > 0), len(ended))
    if closed < 2 or ended.steps[0] > 1:
        return not_measured("fewer than two rows before the first slice was exhausted")
    if least.values[0] < 1:
        return not_measured("slices of fewer than two picks")
    shortest, longest = least.values[0], most.values[0] + batches_through(run, ended.steps[0]) - 1
    mode = run.setting("data.mixing.pick_mode")
    if mode != "weighted" and longest <= EVEN_RATIO * shortest:
        return healthy("all slices have about the same number of picks")
    limit = _spread_limit(run, shortest)
    # Which readers have least and most left is not known: their shares differ by this or more.
    spreads = [high / longest - low / shortest for high, low in zip(most.values, least.values, strict=True)][:closed]
    words = (
        f"before the first slice was exhausted, the shares of picks left differed by up to {max(*spreads, 0):.2f}, "
        f"the limit is {limit:.2f}"
    )
    hits = [index for index, spread in enumerate(spreads) if spread > limit]
    if not hits:
        return healthy(words)
    words = f"{words}; first exceeded at step {ended.steps[hits[0]]}"
    is_weighted = mode == "weighted"
    return finding(
        f"{words}, although picks are weighted" if is_weighted else words,
        evidence=[least.evidence(hits), most.evidence(hits)],
        knob=None if is_weighted else Knob("data.mixing.pick_mode", mode, "weighted"),
    )


def _spread_limit(run: RunRecord, picks: float) -> float:
    """c / sqrt(n), where exp(-c^2) summed over all ordered pairs of readers is ALPHA: c = 3 for a pool of 4.

    The difference of the drained shares of two slices is a Brownian bridge of variance 2 / n.
    """
    columns = modality_columns(run)
    readers = sum(column.values[0] for column in columns) if columns else 4.0
    readers = max(readers / ranks(run), 2.0)
    return math.sqrt(math.log(readers * (readers - 1) / ALPHA) / picks)


def check_starved_modality(run: RunRecord) -> Outcome:
    """A modality without an active reader for longer than the shuffled queue of streams explains."""
    ended, *columns = aligned(
        *(_while_all_last(run, each) for each in (series(run, EXHAUSTED), *modality_columns(run)))
    )
    if not columns:
        return unlogged(run, [f"{MODALITIES}<modality>"])
    if len(columns) == 1:
        return healthy("there is only one modality")
    if not ended:
        return not_measured("a source was exhausted before the first row")
    pools = 1 if has_own_pools(run) else ranks(run)
    refills = [events / pools for events in ended.values]
    counts = [column.values for column in columns]
    gaps = [_longest_absence(refills, counts, number) for number in range(len(counts))]
    worst = max(range(len(gaps)), key=lambda number: gaps[number].surprise)
    gap, column = gaps[worst], columns[worst]
    name = column.key.removeprefix(MODALITIES)
    if gap.surprise <= math.log(len(columns) / ALPHA):
        return healthy(f"no modality was absent longer than its share of the streams explains (longest: {name})")
    first, last = column.steps[gap.first], column.steps[gap.last]
    readers = run.setting("data.mixing.num_streams_mixed")
    more = 2 * readers if isinstance(readers, int) else "twice as many; or give the modality its own source and weight"
    return finding(
        f"modality {name} has no active reader from step {first} to {last}, "
        f"while {counted(gap.refills, 'reader')} entered the pool",
        evidence=[column.evidence(range(max(gap.first - 1, 0), gap.last + 1))],
        knob=Knob("data.mixing.num_streams_mixed", readers, more),
    )


def _while_all_last(run: RunRecord, column: Series) -> Series:
    """The rows before a source of the blend is exhausted: its modalities are absent from then on, which `shares` reports."""
    sources = series(run, ENDED_SOURCES)
    stop = sources.steps[sources.positive[0]] if sources.positive else math.inf
    return column.at(index for index, step in enumerate(column.steps) if step < stop)


@dataclass(frozen=True)
class _Absence:
    """A range of rows without a modality: readers that entered the pool meanwhile, and -ln of the probability."""

    first: int
    last: int
    refills: float
    surprise: float


def _longest_absence(refills: Sequence[float], counts: Sequence[Sequence[float]], column: int) -> _Absence:
    """The absence of a modality during which most readers entered the pool.

    Of N readers that entered over the run, x had the modality. In a shuffled queue, the longest stretch without it has g or
    more readers with a probability of at most (x + 1) (1 - g / N)^x (spacings of x points among N).
    """
    sums = [math.fsum(values) for values in counts]
    share = sums[column] / math.fsum(sums) if any(sums) else 0.0
    total = math.fsum(refills) + sum(values[0] for values in counts)
    first, since, longest = 0, 0.0, (0, 0, 0.0)
    for row, present in enumerate(counts[column]):
        if present > 0:
            first, since = row + 1, 0.0
            continue
        since += refills[row] if row > first else 0.0
        if since > longest[2]:
            longest = first, row, since
    entered = share * total
    if longest[2] <= 0:
        return _Absence(0, 0, 0.0, -1.0)
    if entered < 1:
        return _Absence(*longest, surprise=0.0)
    fraction = min(longest[2] / total, 1.0 - 1e-12)
    return _Absence(*longest, surprise=-entered * math.log1p(-fraction) - math.log(entered + 1))


def check_exhaust_churn(run: RunRecord) -> Outcome:
    """Slices so short that readers are replaced all the time."""
    ended = series(run, EXHAUSTED)
    if len(ended) < 2:
        return not_yet("needs 2 rows, has 1")
    events = math.fsum(ended.values[1:])
    picks = batches_through(run, ended.steps[-1]) - batches_through(run, ended.steps[0])
    per_slice = ranks(run) * picks / events if events else math.inf
    words = f"{number_text(events / picks)} readers exhausted per micro-batch on {counted(ranks(run), 'rank')}"
    longest = max(series(run, REMAINING_MAX).values, default=0.0)
    if longest:
        words += f"; R / n is {number_text(ranks(run) / longest)} for the longest slice, {counted(longest, 'pick')}"
    if per_slice > CHURN_PICKS or events < CHURN_EVENTS * ranks(run):
        return healthy(words)
    knob = Knob("data.source", None, "longer streams: merge files")
    size = run.setting("data.mixing.batch_size")
    if isinstance(size, int) and size >= 2:
        knob = Knob("data.mixing.batch_size", size, max(size // 4, 1))
    words = f"a reader lasts {number_text(per_slice)} picks on average: {words}"
    return finding(words, evidence=[ended.evidence(ended.positive)], knob=knob)


def check_masked_ranks(run: RunRecord) -> Outcome:
    """A rank that has nothing to read in many of its micro-batches, while others do."""
    masked = series(run, MASKED)
    recent = masked.at(range(len(masked) // 2, len(masked)))
    if len(recent) < MASKED_ROWS:
        return not_yet(f"needs {2 * MASKED_ROWS - 1} rows, has {len(masked)}")
    steps_per_row = (recent.steps[-1] - recent.steps[0]) // (len(recent) - 1)
    limit = max(_worst_of_healthy_ranks(steps_per_row * micro_batches(run, recent.steps[0]), ranks(run)), MASKED_LIMIT)
    share = recent.total / len(recent)
    words = (
        f"the worst rank had no target in {share:.0%} of its micro-batches since step {recent.steps[0]}, "
        f"the limit for {counted(ranks(run), 'rank')} is {limit:.0%}"
    )
    if share <= limit:
        return healthy(words)
    cells = run.setting("data.max_group_cells")
    if not has_own_pools(run):
        condition = "if train preview shows even ranks" if run.config else "if ranks then have equally much to read"
        knob = Knob("data.mixing.batching_mode", "per_stream", "device_per_stream", condition)
    elif run.setting("data.mixing.repeat", True) is False:
        knob = Knob("data.mixing.repeat", False, True)
    else:
        knob = Knob("data.max_group_cells", cells, "fewer, or longer streams: merge files")
    return finding(words, evidence=[masked.evidence(_recent_hits(masked, limit))], knob=knob)


def _recent_hits(masked: Series, limit: float) -> list[int]:
    """The rows of the second half above a limit."""
    return [index for index in masked.where(lambda value: value > limit) if index >= len(masked) // 2]


def _worst_of_healthy_ranks(batches: int, world_size: int) -> float:
    """The expected share of masked micro-batches on the worst of some ranks that are masked in `HEALTHY_MASKED` of theirs.

    E max of W binomials is the sum of P(max >= k) = 1 - F(k - 1)^W. Beyond 200 batches the excess over their mean is small.
    """
    n = min(max(batches, 1), 200)
    below, excess = 0.0, 0.0
    for k in range(n):
        below += math.comb(n, k) * HEALTHY_MASKED**k * (1 - HEALTHY_MASKED) ** (n - k)
        excess += 1 - min(below, 1.0) ** world_size
    return excess / n


RULES = (
    Rule(
        name="stuck_reader",
        needs=(SURPRISE,),
        uses=(WAIT,),
        threshold="above ln(picks / 0.001): 12 for 200 picks, 21 for a million",
        why="The surprise accumulated since the last pick of a reader is a unit exponential in any pool, so one wait in a "
        "million exceeds ln(1e6). No threshold on waits or spreads themselves holds in general.",
        knob='`data.mixing.pick_mode`: "round_robin"; or repair the data set that is not picked',
        severity="error",
        check=check_stuck_reader,
    ),
    Rule(
        name="uneven_slices",
        needs=(REMAINING_MIN, REMAINING_MAX, FRACTION_MIN),
        uses=(WAIT,),
        threshold=f"one slice has more than {UNEVEN_RATIO:g} times as many picks as another, in {UNEVEN_SHARE:.0%} of the rows",
        why="Picks are weighted by remaining picks, so readers with few picks (those with large batches) wait. Advice if the "
        "configured batch sizes are even: then the streams differ in size.",
        knob="`data.mixing.batch_size_by_modality`: within a factor of 2",
        severity="warning",
        check=check_uneven_slices,
    ),
    Rule(
        name="closed_pool_imbalance",
        needs=(REMAINING_MIN, REMAINING_MAX, EXHAUSTED),
        threshold="before the first slice is exhausted, the shares of picks left differ by more than c / sqrt(n); n is the "
        "number of picks of the shortest slice, c = 3 for a pool of 4 (c grows with the logarithm of the pool size); picks "
        f"that are not weighted are judged if one slice has more than {EVEN_RATIO:g} times the picks of another",
        why="Weighted picks shuffle all remaining batches, so the shares differ like a Brownian bridge. With refill, or "
        "between the pools of several ranks, no such limit holds.",
        knob='`data.mixing.pick_mode`: "weighted"',
        severity="warning",
        check=check_closed_pool,
    ),
    Rule(
        name="starved_modality",
        needs=(EXHAUSTED,),
        uses=(f"{MODALITIES}<modality>",),
        threshold="no active reader of a modality while g of N readers entered the pool, where "
        "(x + 1)(1 - g/N)^x < 0.001 / modalities and x of the N have the modality",
        why="Rare modalities are absent at times. In a shuffled queue, x points leave a gap of g with this probability.",
        knob="`data.mixing.num_streams_mixed`: twice as many; or a source of its own for the modality",
        severity="warning",
        check=check_starved_modality,
    ),
    Rule(
        name="exhaust_churn",
        needs=(EXHAUSTED,),
        uses=(REMAINING_MAX,),
        threshold=f"a reader lasts {CHURN_PICKS:g} picks or fewer on average, over {CHURN_EVENTS} exhausted readers per rank "
        "or more",
        why="R / n readers are exhausted per micro-batch (R ranks, n picks per slice). With only a few picks per slice, most "
        "of the work is opening files and starting groups, and the mix depends on which streams were opened last.",
        knob="longer streams, or `data.mixing.batch_size`: a quarter",
        severity="warning",
        check=check_exhaust_churn,
    ),
    Rule(
        name="masked_ranks",
        needs=(MASKED,),
        threshold=f"over the second half of the rows, the worst rank had no target in more than {MASKED_LIMIT:.0%} of its "
        f"micro-batches, and in more than the worst of as many ranks has that are each masked in {HEALTHY_MASKED:.0%}",
        why="With a shared pool, a rank waits while others read the rest of a stream: briefly, unless streams have fewer "
        "groups than there are ranks. A row holds the worst rank of its steps alone, which grows with the number of ranks.",
        knob='`data.mixing.batching_mode`: "device_per_stream", if `train preview` shows even ranks; a smaller '
        "`data.max_group_cells`; or longer streams",
        severity="warning",
        check=check_masked_ranks,
    ),
)
