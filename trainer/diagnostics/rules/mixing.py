"""Rules about the pool of active readers. What healthy pools do was simulated; see docs/diagnosis.md."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainer.diagnostics.facts import (
    MODALITIES,
    batch_sizes,
    has_own_pools,
    is_one_pool,
    micro_batches,
    modality_columns,
    picks_between,
    ranks,
)
from trainer.diagnostics.outcome import Evidence, Knob, Outcome, finding, healthy, not_applicable, not_measured
from trainer.diagnostics.rules.rule import Rule
from trainer.diagnostics.series import aligned, count_of, number, series
from trainer.runs.load import Run

SURPRISE = "stream_mixing/active/pick_surprise_max"
WAIT = "stream_mixing/active/steps_since_pick_max"
REMAINING_MIN = "stream_mixing/active/remaining_min"
REMAINING_MAX = "stream_mixing/active/remaining_max"
FRACTION_MIN = "stream_mixing/active/remaining_fraction_min"
FRACTION_MAX = "stream_mixing/active/remaining_fraction_max"
EXHAUSTED = "stream_mixing/refill/exhaust_events"

ALPHA = 1e-3  # chance of a false alarm that a statistical rule allows itself in a run
UNEVEN_RATIO = 16.0
UNEVEN_SHARE = 0.05
UNEVEN_ROWS = 5
LANE_SLACK = 0.05
CHURN_PICKS = 4.0
CHURN_EVENTS = 20


def check_stuck_reader(run: Run) -> Outcome:
    """A reader that is passed over more often than its weight explains."""
    surprise = series(run, SURPRISE)
    if not surprise:
        return not_measured(SURPRISE)
    if run.setting("data.mixing.pick_mode") == "round_robin":
        return not_applicable("round_robin takes readers in turn: nothing is improbable")
    pools = ranks(run) if has_own_pools(run) else 1
    limit = math.log(max(surprise.steps[-1] * micro_batches(run) * pools, 2) / ALPHA)
    hits = surprise.where(lambda value: value > limit)
    peak = max(surprise.values)
    words = f"the most improbable wait has {number(peak)} nats, the limit for this many picks is {limit:.1f}"
    if not hits:
        return healthy(words)
    waits = series(run, WAIT)
    mode = run.setting("data.mixing.pick_mode")
    return finding(
        f"a reader is not picked: {words}; passed first by step {surprise.steps[hits[0]]}",
        evidence=[surprise.evidence(hits), *([waits.evidence(hits)] if waits.steps == surprise.steps else [])],
        knob=Knob("data.mixing.pick_mode", mode, "round_robin"),
    )


def check_uneven_slices(run: Run) -> Outcome:
    """Readers of one pool whose slices differ so much in picks that the short ones hardly ever come up."""
    columns = [series(run, key) for key in (REMAINING_MIN, REMAINING_MAX, FRACTION_MIN)]
    if not all(columns):
        return not_measured(REMAINING_MIN, REMAINING_MAX, FRACTION_MIN)
    if not is_one_pool(run):
        return not_applicable("the pools of several sources are merged in these keys")
    steps, (least, most, fraction) = aligned(*columns)
    ratios = [
        # The reader with least left began with at most least / fraction + 1 picks, the other with at least `most`.
        high / (low / share + 1) if low > 0 and share > 0 else 0.0
        for low, high, share in zip(least, most, fraction, strict=True)
    ]
    hits = [index for index, ratio in enumerate(ratios) if ratio > UNEVEN_RATIO]
    words = f"one slice has at least {number(max(ratios))} times the picks of another"
    if len(hits) < max(UNEVEN_ROWS, UNEVEN_SHARE * len(steps)):
        return healthy(words if max(ratios) > 1 else "slices are about as long as each other")
    waits = series(run, WAIT)
    sizes = batch_sizes(run)
    is_configured = bool(sizes) and max(sizes) > 2 * min(sizes)
    longest = f"; readers of short ones (large batches) waited up to {number(max(waits.values))} picks" if waits else ""
    if is_configured:
        knob = Knob("data.mixing.batch_size_by_modality", f"{min(sizes)} to {max(sizes)}", "within a factor of 2")
    else:
        knob = Knob("data.source", None, "streams of similar size")
    return finding(
        words + longest,
        evidence=[
            Evidence(column.key, tuple(steps[i] for i in shown), tuple(values[i] for i in shown))
            for shown in [hits[:: max(len(hits) // 6, 1)][:6]]
            for column, values in ((columns[0], least), (columns[1], most))
        ],
        knob=knob,
        severity="warning" if is_configured else "advice",
    )


def check_closed_pool(run: Run) -> Outcome:
    """Before the first reader has ended, weighted picks keep what is left of all slices together."""
    keys = (REMAINING_MIN, FRACTION_MIN, FRACTION_MAX, EXHAUSTED)
    columns = [series(run, key) for key in keys]
    if not all(columns):
        return not_measured(*keys)
    if not is_one_pool(run):
        return not_applicable("the pools of several sources are merged in these keys")
    steps, (least, low, high, ended) = aligned(*columns)
    closed = next((index for index, count in enumerate(ended) if count > 0), len(steps))
    if closed < 2 or steps[0] > 1:
        return not_applicable("no two rows before the first slice ended")
    picks = max(least[:closed])
    if picks < 1:
        return not_applicable("slices of less than two picks")
    width = _spread_limit(run, picks)
    spreads = [top - bottom for top, bottom in zip(high[:closed], low[:closed], strict=True)]
    peak = max(spreads)
    words = (
        f"what is left of the slices differs by up to {peak:.2f} before the first has ended, the limit is {width:.2f}"
    )
    if peak <= width:
        return healthy(words)
    hits = [index for index, spread in enumerate(spreads) if spread > width]
    mode = run.setting("data.mixing.pick_mode")
    suggestion = "weighted" if mode != "weighted" else "weighted, with readers that report what they have left"
    return finding(
        f"{words}; passed first by step {steps[hits[0]]}",
        evidence=[columns[1].evidence(hits), columns[2].evidence(hits)],
        knob=Knob("data.mixing.pick_mode", mode, suggestion),
    )


def _spread_limit(run: Run, picks: float) -> float:
    """c / sqrt(n), with c = 3 for a pool of 4: exp(-c^2) for each ordered pair of readers adds up to ALPHA.

    What two slices have drained differs like a Brownian bridge of variance 2 / n; c grows with the logarithm of the pool.
    Lanes that end early let cells and picks drift apart a little, for which there is a slack.
    """
    columns = modality_columns(run)
    readers = sum(column.values[0] for column in columns) if columns else 4.0
    readers = max(readers / (1 if has_own_pools(run) else ranks(run)), 2.0)
    return math.sqrt(math.log(readers * (readers - 1) / ALPHA) / picks) + LANE_SLACK


def check_starved_modality(run: Run) -> Outcome:
    """A modality that no active reader has, for longer than the shuffled queue of streams explains."""
    columns = modality_columns(run)
    ended = series(run, EXHAUSTED)
    if not columns or not ended:
        return not_measured(f"{MODALITIES}<modality>", EXHAUSTED)
    if len(columns) == 1:
        return healthy("there is one modality")
    steps, (events, *counts) = aligned(ended, *columns)
    pools = 1 if has_own_pools(run) else ranks(run)
    refills = [event / pools for event in events]
    worst = max(
        (_longest_absence(steps, refills, counts, index) for index in range(len(counts))), key=lambda gap: gap.surprise
    )
    name = columns[worst.column].key.removeprefix(MODALITIES)
    limit = math.log(len(columns) / ALPHA)
    if worst.surprise <= limit:
        return healthy(f"no modality was away longer than its share of the streams explains ({name} the longest)")
    first, last = steps[worst.first], steps[worst.last]
    return finding(
        f"no active reader has modality {name} from step {first} to {last}, while {number(worst.refills)} readers came in",
        evidence=[columns[worst.column].evidence(range(max(worst.first - 1, 0), worst.last + 1))],
        knob=Knob("data.mixing.num_streams_mixed", run.setting("data.mixing.num_streams_mixed"), _more_readers(run)),
    )


def _more_readers(run: Run) -> int | str:
    readers = run.setting("data.mixing.num_streams_mixed")
    return 2 * readers if isinstance(readers, int) else "twice as many; or a source of its own with a weight"


class _Absence:
    """A stretch of rows without a modality, and how improbable it is."""

    def __init__(self, column: int, first: int, last: int, refills: float, surprise: float) -> None:
        self.column, self.first, self.last, self.refills, self.surprise = column, first, last, refills, surprise


def _longest_absence(
    steps: Sequence[int], refills: Sequence[float], counts: Sequence[Sequence[float]], column: int
) -> _Absence:
    """The stretch without this modality that saw most refills.

    Of N readers that came in over the run, x had the modality. In a shuffled queue the longest stretch of g that have not
    is at least that long with a chance of at most (x + 1) (1 - g / N)^x (spacings of x points among N).
    """
    share = _mean_share(counts, column)
    total = math.fsum(refills) + sum(values[0] for values in counts)
    first, since, best = 0, 0.0, _Absence(column, 0, 0, 0.0, -1.0)
    for row, present in enumerate(counts[column]):
        if present > 0:
            first, since = row + 1, 0.0
            continue
        since += refills[row] if row > first else 0.0
        if since > best.refills:
            best = _Absence(column, first, row, since, 0.0)
    entered = share * total
    if entered < 1 or best.refills <= 0:
        return best
    chance = min(best.refills / total, 1.0 - 1e-12)
    best.surprise = -entered * math.log1p(-chance) - math.log(entered + 1)
    return best


def _mean_share(counts: Sequence[Sequence[float]], column: int) -> float:
    total = math.fsum(math.fsum(values) for values in counts)
    return math.fsum(counts[column]) / total if total else 0.0


def check_exhaust_churn(run: Run) -> Outcome:
    """Slices so short that readers are replaced all the time."""
    ended = series(run, EXHAUSTED)
    if not ended:
        return not_measured(EXHAUSTED)
    if len(ended) < 2:
        return not_applicable("one row only")
    events = math.fsum(ended.values[1:])
    picks = picks_between(run, ended.steps[0], ended.steps[-1])
    rate, per_slice = events / picks, ranks(run) * picks / events if events else math.inf
    longest = max(series(run, REMAINING_MAX).values, default=0.0)
    expected = (
        f"; R/n is {number(ranks(run) / longest)} with the longest slice, {count_of(longest, 'pick')}"
        if longest
        else ""
    )
    words = f"{number(rate)} readers end per micro-batch over {count_of(ranks(run), 'rank')}{expected}"
    if per_slice > CHURN_PICKS or events < CHURN_EVENTS * ranks(run):
        return healthy(words)
    size = run.setting("data.mixing.batch_size")
    return finding(
        f"a reader lasts {number(per_slice)} picks on average: {words}",
        evidence=[ended.evidence(ended.where(lambda value: value > 0))],
        knob=_churn_knob(size),
    )


def _churn_knob(size: object) -> Knob:
    if isinstance(size, int) and size >= 2:
        return Knob("data.mixing.batch_size", size, max(size // 4, 1))
    return Knob("data.source", None, "longer streams: several files put together")


RULES = (
    Rule(
        name="stuck_reader",
        looks_at=(SURPRISE,),
        threshold="above ln(picks / 0.001): 12 for 200 picks, 21 for a million",
        why="Since a reader's last pick it grows like a unit exponential whatever the pool, so that one wait in a million ends "
        "beyond ln(1e6). Waits and spreads themselves have no threshold that holds.",
        knob='`data.mixing.pick_mode`: "round_robin", or repair the data set that is passed over',
        severity="error",
        check=check_stuck_reader,
    ),
    Rule(
        name="uneven_slices",
        looks_at=(REMAINING_MIN, REMAINING_MAX, FRACTION_MIN, WAIT),
        threshold=f"one slice has more than {UNEVEN_RATIO:g} times the picks of another, in {UNEVEN_SHARE:.0%} of the rows",
        why="A pick is weighted by what is left, so the readers with few picks (those with the large batch) wait. Advice "
        "where the config's batch sizes are even: then it is the streams that differ.",
        knob="`data.mixing.batch_size_by_modality`: within a factor of 2",
        severity="warning",
        check=check_uneven_slices,
    ),
    Rule(
        name="closed_pool_imbalance",
        looks_at=(REMAINING_MIN, FRACTION_MIN, FRACTION_MAX, EXHAUSTED),
        threshold="before the first slice ends: spread of the remaining fractions above c / sqrt(n) + 0.05, n the fewest "
        "picks of a slice, c = 3 for a pool of 4 (it grows with the logarithm of the pool)",
        why="Weighted picks shuffle all remaining batches, so fractions differ like a Brownian bridge. With refill no such "
        "limit holds.",
        knob='`data.mixing.pick_mode`: "weighted"',
        severity="warning",
        check=check_closed_pool,
    ),
    Rule(
        name="starved_modality",
        looks_at=(f"{MODALITIES}<modality>", EXHAUSTED),
        threshold="no reader of a modality while g of N readers were replaced, where (x + 1)(1 - g/N)^x < 0.001 / modalities; "
        "x of the N had it",
        why="Zero alone is normal for a rare modality. In a shuffled queue x points leave a gap of g with that chance.",
        knob="`data.mixing.num_streams_mixed`: twice as many; or a source of its own",
        severity="warning",
        check=check_starved_modality,
    ),
    Rule(
        name="exhaust_churn",
        looks_at=(EXHAUSTED, REMAINING_MAX),
        threshold=f"a reader lasts at most {CHURN_PICKS:g} picks on average, over at least {CHURN_EVENTS} ended readers a rank",
        why="Readers end at a rate of R / n a micro-batch (R ranks, n picks a slice). With a handful of picks opening files "
        "and starting groups is most of the work, and the mix is whatever was opened last.",
        knob="longer streams, or `data.mixing.batch_size`: a quarter",
        severity="warning",
        check=check_exhaust_churn,
    ),
)
