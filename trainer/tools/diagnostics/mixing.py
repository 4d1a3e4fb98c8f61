"""Rules about the pool of active readers and the blend. The thresholds were calibrated on simulated healthy pools; see
docs/diagnosis.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from trainer.tools import limits
from trainer.tools.diagnostics.rule import (
    MODALITIES,
    Knob,
    Outcome,
    Series,
    aligned,
    batches_through,
    finding,
    has_full_rows,
    healthy,
    is_one_pool,
    micro_batches,
    modality_columns,
    not_measured,
    not_yet,
    ranks,
    rule,
    series,
    sources,
    unlogged,
)
from trainer.tools.runs.load import RunRecord
from trainer.wording import counted, few, number_text

SURPRISE = "stream_mixing/active/pick_surprise_max"
WAIT = "stream_mixing/active/steps_since_pick_max"
REMAINING_MIN = "stream_mixing/active/remaining_min"
REMAINING_MAX = "stream_mixing/active/remaining_max"
FRACTION_MIN = "stream_mixing/active/remaining_fraction_min"
EXHAUSTED = "stream_mixing/refill/exhaust_events"
MASKED = "stream_mixing/masked_share"
ROWS_FILL = "data/fill"
SHARE_ERROR = "blend/max_share_error"
ENDED_SOURCES = "blend/ended_sources"

ALPHA = 1e-3  # false alarm probability of a statistical rule, per run
UNEVEN_RATIO = 16.0
UNEVEN_SHARE = 0.05
UNEVEN_ROWS = 5
EVEN_RATIO = 1.5
CHURN_PICKS = 4.0
EVEN_BATCHES = 2  # factor between the batch sizes of a pool that are still even
IDLE = 0.1  # share of its micro-batches in which a rank of a healthy run may have no rows
CHURN_EVENTS = 20
MASKED_ROWS = 5
MASKED_LIMIT = 0.25
FILL_ROWS = 5
FULL = 0.999

FULL_ROWS = not_measured("with full rows a document stays on its row, whatever its file has left")
SEVERAL_POOLS = not_measured("with several sources these keys do not say which source they are of")


def _has_own_pools(run: RunRecord) -> bool:
    """Whether every rank picks from its own pool."""
    return has_full_rows(run) or bool(run.setting("data.mixing.batching_mode") == "device_per_stream")


@rule("error", needs=[SURPRISE], uses=[WAIT])
def stuck_reader(run: RunRecord) -> Outcome:
    """Above ln(picks / {ALPHA}): 12 for 200 picks, 21 for a million.

    The surprise accumulated since the last pick of a reader is a unit exponential in any pool: one wait in a million exceeds
    ln(1e6).
    Change: `data.mixing.pick_mode`: "round_robin"; or repair the data set that is not picked
    """
    surprise, waits = series(run, SURPRISE), series(run, WAIT)
    mode = run.setting("data.mixing.pick_mode")
    if mode == "round_robin":
        return not_measured("round_robin picks readers in turn, so no wait is improbable")
    pools = ranks(run) if _has_own_pools(run) else 1
    picks = batches_through(run, surprise.steps[-1]) * pools
    if has_full_rows(run):  # a document is a token at least
        picks *= math.prod(int(run.setting(key, 1)) for key in ("data.mixing.batch_size", "data.seq_len"))
    limit = math.log(max(picks, 2) / ALPHA)
    hits = surprise.where(lambda value: value > limit)
    if not hits:
        chances = f"the least likely wait has a chance of {_odds(max(surprise.values))}, the alarm is at {_odds(limit)}"
        return healthy(f"no open stream waits for longer than chance explains ({chances})")
    words = f"an open stream is no longer read: so long a wait has a chance of {_odds(max(surprise.values))}"
    words += f"; first beyond {_odds(limit)} at step {surprise.steps[hits[0]]}"
    both = [column.evidence(hits) for column in (surprise, waits) if column.steps == surprise.steps]
    return finding(words, *both, knob=Knob("data.mixing.pick_mode", mode, "round_robin"))


def _odds(nats: float) -> str:
    """The probability exp(-nats) in words."""
    digits = max(nats, 0.0) / math.log(10)
    return f"1 in {10**digits:,.0f}" if digits < 6 else f"1 in 10^{digits:.0f}"


def _batch_sizes(run: RunRecord) -> list[int]:
    """Every batch size in the config."""
    tables = [run.setting("data.mixing", {}), *(table.get("mixing", {}) for table in sources(run))]
    found = [table.get("batch_size") for table in tables]
    for table in tables:
        found.extend(dict(table.get("batch_size_by_modality") or {}).values())
    return [size for size in found if isinstance(size, int)]


@rule("warning", needs=(REMAINING_MIN, REMAINING_MAX, FRACTION_MIN), uses=[WAIT])
def uneven_slices(run: RunRecord) -> Outcome:
    """One slice has more than {UNEVEN_RATIO:g} times as many picks as another, in {UNEVEN_SHARE:.0%} of the rows.

    Picks are weighted by remaining picks, so readers with few picks (large batches) wait. Advice if the configured
    batch sizes are even: then the streams differ in size.
    Change: `data.mixing.batch_size_by_modality`: within a factor of {EVEN_BATCHES}
    """
    if has_full_rows(run):
        return FULL_ROWS
    if not is_one_pool(run):
        return SEVERAL_POOLS
    least, most, fraction = aligned(*(series(run, key) for key in (REMAINING_MIN, REMAINING_MAX, FRACTION_MIN)))
    ratios = [
        # The reader with the fewest picks left started with at most low / share + 1, the other with at least `high`.
        high / (low / share + 1) if low > 0 and share > 0 else 0.0
        for low, high, share in zip(least.values, most.values, fraction.values, strict=True)
    ]
    hits = [index for index, ratio in enumerate(ratios) if ratio > UNEVEN_RATIO]
    times = f"at least {number_text(max(ratios))} times as many batches as the shortest (limit {UNEVEN_RATIO:g})"
    words = f"the longest open stream gives {times}"
    if len(hits) < max(UNEVEN_ROWS, UNEVEN_SHARE * len(least)):
        return healthy(words if max(ratios) > 1 else "all open streams give about the same number of batches")
    words += ", and streams are read in proportion to their batches: those with few (large) ones wait"
    if waits := series(run, WAIT):
        words += f", here for up to {counted(max(waits.values), 'batch')} of others"
    shown = hits[:: max(len(hits) // 6, 1)][:6]
    evidence = least.evidence(shown), most.evidence(shown)
    sizes = _batch_sizes(run)
    if sizes and max(sizes) > EVEN_BATCHES * min(sizes):
        value = f"sizes within a factor of {EVEN_BATCHES}"
        knob = Knob("data.mixing.batch_size_by_modality", f"{min(sizes)} to {max(sizes)}", value)
        return finding(words, *evidence, knob=knob, severity="warning")
    return finding(words, *evidence, knob=Knob("data.source", None, "streams of similar size"), severity="advice")


@rule("warning", needs=(REMAINING_MIN, REMAINING_MAX, EXHAUSTED))
def closed_pool_imbalance(run: RunRecord) -> Outcome:
    """Before the first slice is exhausted, the shares of picks left differ by more than c / sqrt(n); n is the number of picks
    of the shortest slice, c = 3 for a pool of 4 (c grows with the logarithm of the pool size); picks that are not weighted are
    judged if one slice has more than {EVEN_RATIO:g} times the picks of another.

    Weighted picks shuffle all remaining batches, so the shares differ like a Brownian bridge, unless there is refill or
    a pool per rank.
    Change: `data.mixing.pick_mode`: "weighted"
    """
    # In picks, which all ranks of a shared pool count alike. Fractions of cells are of a rank's own slice, which ends before
    # the longest one; the least and the largest of them would compare ranks, not readers.
    if has_full_rows(run):
        return FULL_ROWS
    if not is_one_pool(run):
        return SEVERAL_POOLS
    if _has_own_pools(run) and ranks(run) > 1:
        return not_measured("with device_per_stream these keys do not say which rank they are of")
    least, most, ended = aligned(*(series(run, key) for key in (REMAINING_MIN, REMAINING_MAX, EXHAUSTED)))
    closed = next((index for index, count in enumerate(ended.values) if count > 0), len(ended))
    if closed < 2 or ended.steps[0] > 1:
        return not_measured("needs two logged steps, from step 1 on, before the first stream ended")
    if least.values[0] < 1:
        return not_measured("a stream has fewer than two batches")
    shortest, longest = least.values[0], most.values[0] + batches_through(run, ended.steps[0]) - 1
    mode = run.setting("data.mixing.pick_mode")
    if mode != "weighted" and longest <= EVEN_RATIO * shortest:
        return healthy("all open streams have about the same number of batches")
    # The difference of the drained shares of two slices is a Brownian bridge of variance 2 / n. So the limit is c / sqrt(n),
    # where exp(-c^2) summed over all ordered pairs of readers is ALPHA.
    columns = modality_columns(run)
    readers = max((sum(column.values[0] for column in columns) if columns else 4.0) / ranks(run), 2.0)
    limit = math.sqrt(math.log(readers * (readers - 1) / ALPHA) / shortest)
    # Which readers have least and most left is not known: their shares differ by this or more.
    spreads = [high / longest - low / shortest for high, low in zip(most.values, least.values, strict=True)][:closed]
    words = f"one stream had {max(*spreads, 0):.0%} more of its batches unread than another, before any of them ended "
    words += f"(chance explains {limit:.0%})"
    hits = [index for index, spread in enumerate(spreads) if spread > limit]
    if not hits:
        return healthy(words)
    words = f"streams are not read evenly: {words}, first beyond that at step {ended.steps[hits[0]]}"
    evidence = least.evidence(hits), most.evidence(hits)
    if mode == "weighted":
        wrong = "the data set counts its remaining batches wrongly"
        return finding(f"{words}, although each is read in proportion to what is left of it: {wrong}", *evidence)
    return finding(words, *evidence, knob=Knob("data.mixing.pick_mode", mode, "weighted"))


@rule("warning", needs=[EXHAUSTED], uses=[f"{MODALITIES}<modality>"])
def starved_modality(run: RunRecord) -> Outcome:
    """No active reader of a modality while g of N readers entered the pool, where (x + 1)(1 - g/N)^x < {ALPHA} / modalities
    and x of the N have the modality.

    In a shuffled queue, x points leave a gap of g with this probability.
    Change: `data.mixing.num_streams_mixed`: twice as many; or a source of its own for the modality
    """
    # Of the rows before a source is exhausted: its modalities are absent from then on, which `shares` reports.
    gone = series(run, ENDED_SOURCES)
    stop = gone.steps[gone.positive[0]] if gone.positive else math.inf
    found = [
        column.at(index for index, step in enumerate(column.steps) if step < stop)
        for column in (series(run, EXHAUSTED), *modality_columns(run))
    ]
    ended, *columns = aligned(*found)
    if not columns:
        return unlogged([f"{MODALITIES}<modality>"])
    if len(columns) == 1:
        return healthy("there is only one modality")
    if not ended:
        return not_measured("a source was exhausted before the first row")
    pools = 1 if _has_own_pools(run) else ranks(run)
    refills = [events / pools for events in ended.values]
    counts = [column.values for column in columns]
    gaps = [_longest_absence(refills, counts, number) for number in range(len(counts))]
    worst = max(range(len(gaps)), key=lambda number: gaps[number].surprise)
    gap, column = gaps[worst], columns[worst]
    name = column.key.removeprefix(MODALITIES)
    if gap.surprise <= math.log(len(columns) / ALPHA):
        return healthy(f"no modality was missing for longer than chance explains (longest: {name})")
    readers = run.setting("data.mixing.num_streams_mixed")
    more = 2 * readers if isinstance(readers, int) else "twice as many; or give the modality its own source and weight"
    words = f"nothing of modality {name} was open for reading from step {column.steps[gap.first]} to "
    words += f"{column.steps[gap.last]}, while {counted(gap.refills, 'other stream')} were opened"
    shown = column.evidence(range(max(gap.first - 1, 0), gap.last + 1))
    return finding(words, shown, knob=Knob("data.mixing.num_streams_mixed", readers, more))


class _Absence(NamedTuple):
    """Rows `first` to `last` without a modality: readers that entered the pool meanwhile, and -ln of the probability."""

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


@rule("warning", needs=[EXHAUSTED])
def exhaust_churn(run: RunRecord) -> Outcome:
    """A reader lasts {CHURN_PICKS:g} picks or fewer on average, over {CHURN_EVENTS} exhausted readers per rank or more.

    Most of the work is then opening files and starting groups, and the mix depends on which streams were opened last.
    Change: longer streams, or `data.mixing.batch_size`: a quarter
    """
    if has_full_rows(run):
        return FULL_ROWS
    ended = series(run, EXHAUSTED)
    if len(ended) < 2:
        return not_yet("needs 2 rows, has 1")
    events = math.fsum(ended.values[1:])
    picks = batches_through(run, ended.steps[-1]) - batches_through(run, ended.steps[0])
    size = run.setting("data.mixing.batch_size")
    per_slice = ranks(run) * picks / events if events else math.inf
    each, rate = number_text(per_slice), number_text(ranks(run) / per_slice)
    words = f"a stream gives a rank {each} batches before it ends: {rate} are opened per micro-batch"
    words += f" on {counted(ranks(run), 'rank')}" if ranks(run) > 1 else ""
    if per_slice > CHURN_PICKS or events < CHURN_EVENTS * ranks(run):
        return healthy(words if events else "no stream ended")
    knob = Knob("data.source", None, "longer streams: merge files")
    if isinstance(size, int) and size >= 2:
        knob = Knob("data.mixing.batch_size", size, max(size // 4, 1))
    return finding(words, ended.evidence(ended.positive), knob=knob)


@rule("warning", needs=[MASKED])
def masked_ranks(run: RunRecord) -> Outcome:
    """Over the second half of the rows, the worst rank had no target in more than {MASKED_LIMIT:.0%} of its micro-batches, and
    in more than the worst of as many ranks has that are each masked in {IDLE:.0%}.

    With a shared pool, a rank waits while others finish a stream: briefly, unless it has fewer groups than there are ranks.
    A row holds only the worst rank, which grows with the number of ranks.
    Change: `data.mixing.batching_mode`: "device_per_stream", if there are many files per rank; a smaller
    `data.max_group_cells`; or longer streams; with full rows more data, or fewer ranks
    """
    masked = series(run, MASKED)
    recent = masked.at(range(len(masked) // 2, len(masked)))
    if len(recent) < MASKED_ROWS:
        return not_yet(f"needs {2 * MASKED_ROWS - 1} rows, has {len(masked)}")
    steps_per_row = (recent.steps[-1] - recent.steps[0]) // (len(recent) - 1)
    limit = max(_worst_of_healthy_ranks(steps_per_row * micro_batches(run, recent.steps[0]), ranks(run)), MASKED_LIMIT)
    share = recent.total / len(recent)
    words = f"the worst rank had nothing to train on in {share:.0%} of its micro-batches since step {recent.steps[0]} "
    words += f"(limit for {counted(ranks(run), 'rank')}: {limit:.0%})"
    if share <= limit:
        return healthy(words)
    if has_full_rows(run) and run.setting("data.mixing.repeat", True):
        knob = Knob("data.source", None, "more data, or fewer ranks")
    elif not _has_own_pools(run):
        condition = "if there are many files per rank"
        knob = Knob("data.mixing.batching_mode", "per_stream", "device_per_stream", condition)
    elif run.setting("data.mixing.repeat", True) is False:
        knob = Knob("data.mixing.repeat", False, True)
    else:
        cells = run.setting("data.max_group_cells")
        knob = Knob("data.max_group_cells", cells, "fewer, or longer streams: merge files")
    return finding(words, recent.evidence(recent.where(lambda value: value > limit)), knob=knob)


@rule("warning", needs=[ROWS_FILL])
def low_fill(run: RunRecord) -> Outcome:
    """Of the positions of full rows, less than {limits.LOW_FILL:.0%} held a document's token, over all logged steps.

    The rest is computed for nothing. Batches of single streams shrink as documents end; full rows have gaps where each document
    begins a row, or where there are fewer documents than rows, or one is longer than a row's share of an epoch.
    Change: `data.mixing.batching_mode`: "per_row" (advice where another one was chosen); with it, fewer rows
    (`data.mixing.batch_size`), or, where documents are padded, a shorter `data.seq_len` or `data.align`: "stream"
    """
    fill, tables = series(run, ROWS_FILL), sources(run)
    if tables and all(table.get("target") for table in tables):
        return not_measured("data sets of your own make the rows")
    if len(fill) < FILL_ROWS:
        return not_yet(f"needs {FILL_ROWS} rows, has {len(fill)}")
    mean = fill.total / len(fill)
    words = (
        f"{mean:.1%} of the positions of full rows held a token (from {min(fill.values):.1%} to {max(fill.values):.1%})"
    )
    if mean >= limits.LOW_FILL:
        return healthy(words)
    mode, rows = (run.setting(f"data.mixing.{key}") for key in ("batching_mode", "batch_size"))
    if not has_full_rows(run):
        knob = Knob("data.mixing.batching_mode", mode, "per_row")
        return finding(words, fill.evidence(), knob=knob, severity=None if mode is None else "advice")
    align, cell = run.setting("data.align"), run.setting("data.seq_len")
    is_built_in, fewer = run.setting("model.target") is None, int(mean * rows) if isinstance(rows, int) else 0
    if run.setting("data.mixing.repeat") is False and fill.values[0] >= limits.LOW_FILL:
        knob = Knob("data.mixing.repeat", False, True)
    elif align == "document" and is_built_in:
        knob = Knob("data.align", align, "stream")
    elif not (align == "stream" or (align == "auto" and is_built_in) or max(fill.values) >= FULL):
        shorter = max(cell // 2, 1) if isinstance(cell, int) else "half"
        knob = Knob("data.seq_len", cell, shorter, "or train a model that runs resets in one pass (docs/models.md)")
    elif fewer:
        knob = Knob("data.mixing.batch_size", rows, fewer, "or read more data, or set data.max_group_cells")
    else:
        knob = Knob("data.source", None, "more data")
    return finding(words, fill.evidence(), knob=knob)


def _worst_of_healthy_ranks(batches: int, world_size: int) -> float:
    """The expected share of masked micro-batches on the worst of some ranks that are masked in `IDLE` of theirs.

    E max of W binomials is the sum of P(max >= k) = 1 - F(k - 1)^W. Beyond 200 batches the excess over their mean is small.
    """
    n = min(max(batches, 1), 200)
    below, excess = 0.0, 0.0
    for k in range(n):
        below += math.comb(n, k) * IDLE**k * (1 - IDLE) ** (n - k)
        excess += 1 - min(below, 1.0) ** world_size
    return excess / n


@rule("warning", needs=[SHARE_ERROR], uses=[ENDED_SOURCES])
def shares(run: RunRecord) -> Outcome:
    """The realised and the configured share differ by more than sqrt(ln(1024 / {ALPHA}) / (2 N)) after N batches; or a source
    has ended (advice).

    Batches are independent draws, so Hoeffding's bound holds (for 16 sources, tested at each doubling of the steps, 32
    times). A source that ran out of data keeps its configured share, so its missing batches count.
    Change: the `weight` of the source, `data.mixing.repeat`, or more data
    """
    errors, ended = series(run, SHARE_ERROR), series(run, ENDED_SOURCES)
    limits_by_row, due = {}, 1
    for index, step in enumerate(errors.steps):  # the first row at or after each power of two, and the last row
        if step >= due or index == len(errors) - 1:
            limits_by_row[index] = math.sqrt(math.log(1024 / ALPHA) / (2 * max(batches_through(run, step), 1)))
            due = 2 ** (step.bit_length())
    hits = [index for index, limit in limits_by_row.items() if errors.values[index] > limit]
    repeat = Knob("data.mixing.repeat", run.setting("data.mixing.repeat"), "true, or more data")
    first_end = [ended.evidence(ended.positive[:1])] if ended.positive else []
    index = hits[-1] if hits else len(errors) - 1
    words = f"by {errors.values[index]:.1%} at step {errors.steps[index]}; chance explains {limits_by_row[index]:.1%}"
    if not hits:
        if first_end:
            text = f"{_what_ended(run, ended)}; the others give its batches"
            return finding(text, *first_end, knob=repeat, severity="advice")
        return healthy(f"the shares of the sources differ from their weights {words}")
    words = f"the share of a source differs from its weight {words}"
    if first_end:
        return finding(f"{words}; {_what_ended(run, ended)}", errors.evidence(hits), *first_end, knob=repeat)
    knob = Knob("data.source.weight", None, "a weight that the amount of data allows")
    return finding(words, errors.evidence(hits), knob=knob)


def _what_ended(run: RunRecord, ended: Series) -> str:
    """The exhausted sources, each with its step where events.jsonl, which rank 0 writes, has it."""
    events = [event for event in run.events if event.get("event") == "source_ended"]
    named = [event for event in events if isinstance(event.get("sources"), list)]
    if names := {name: event.get("global_step") for event in named for name in event["sources"]}:
        where = " on rank 0" if ranks(run) > 1 else ""
        return f"source {few([f'{name} exhausted at step {step}{where}' for name, step in names.items()])}"
    return f"{counted(max(ended.values), 'source')} exhausted, the first by step {ended.steps[ended.positive[0]]}"


RULES = (
    stuck_reader,
    uneven_slices,
    closed_pool_imbalance,
    starved_modality,
    exhaust_churn,
    masked_ranks,
    low_fill,
    shares,
)
