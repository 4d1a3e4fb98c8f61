"""Rules about speed: throughput that dropped, steps that wait for data, a rank that the others wait for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from trainer.tools.diagnostics.outcome import Knob, Outcome, explained, finding, healthy, not_measured, not_yet
from trainer.tools.diagnostics.rules.rule import Rule
from trainer.tools.diagnostics.series import Series, aligned, series, typical_deviation
from trainer.tools.runs.load import RunRecord
from trainer.wording import number_text

THROUGHPUT = "tokens_per_sec"
DATA_TIME = "time/data_sec"
STEP_TIME = "step_time_sec"
SLOWEST = "time/slowest_rank_sec"
FASTEST = "time/fastest_rank_sec"

WARM_UP_SHARE = 0.05
NUM_BLOCKS = 12
MIN_BLOCK = 4
LOST_SHARE = 0.2
MIN_GROWTH = 1.1
BLOCK_SIGMAS = 4.0
DATA_SHARE = 0.15
MIN_ROWS = 8
MIN_SECONDS = 60.0  # for which something else may keep a machine busy
STRAGGLE_SHARE = 0.25
STAGES = {  # of reading: in words, and what makes them faster
    "open": ("opening the files", "fewer, larger files, or token ids that train data tokenize made of text"),
    "tokenize": ("tokenizing the files", "files that train data tokenize made"),
    "read": ("reading opened files", "files on a faster disk, or less work for each batch"),
    "own_code": ("running the own code", "less work for each batch in its own code"),
}
STAGE_KEYS = tuple(f"time/{stage}/" for stage in STAGES)


def _warm(run: RunRecord, key: str) -> Series:
    """A key without the first rows, whose steps compile, fill caches and start workers."""
    column = series(run, key)
    return column.at(range(max(1, math.ceil(WARM_UP_SHARE * len(column))), len(column)))


def check_throughput(run: RunRecord) -> Outcome:
    """A drop of throughput between blocks of rows, beyond the noise of the blocks."""
    speed = _warm(run, THROUGHPUT)
    size = max(len(speed) // NUM_BLOCKS, MIN_BLOCK)
    if len(speed) < 4 * size:
        return not_yet(f"needs {4 * size} rows after warm-up, has {len(speed)}")
    starts = range(len(speed) % size, len(speed), size)
    blocks = [median(speed.values[start : start + size]) for start in starts]
    before, after, noise = _largest_drop(blocks)
    is_beyond_noise = before - after >= BLOCK_SIGMAS * noise
    index = first_slow_row(speed.values, (before + after) / 2)
    before, after = median(speed.values[:index]), median(speed.values[index:])
    words = f"{number_text(before)} tokens/s before step {speed.steps[index]}, {number_text(after)} from there on"
    lost = 1.0 - after / before if before > 0 else 0.0
    if lost < LOST_SHARE or not is_beyond_noise:
        return healthy(f"throughput never dropped by {LOST_SHARE:.0%} and beyond its noise")
    if series(run, STEP_TIME) and _growth(_warm(run, STEP_TIME), speed.steps[index]) < MIN_GROWTH:
        return explained(f"{words}; step times did not grow, the steps had fewer tokens")
    times = _warm(run, STEP_TIME)
    if (
        times
        and min(_seconds(times, until=speed.steps[index]), _seconds(times, since=speed.steps[index])) < MIN_SECONDS
    ):
        return not_yet(f"needs {MIN_SECONDS:g} s of both levels: {words}")
    shown = {
        *range(index - 1, min(index + 3, len(speed))),
        *range(index, len(speed), max((len(speed) - index) // 6, 1)),
    }
    condition = "if steps wait longer for data than before; otherwise look at the machine"
    return finding(
        f"throughput dropped by {lost:.0%}: {words}",
        evidence=[speed.evidence(sorted(shown))],
        knob=replace(more_prefetch(run), condition=condition),
    )


def more_prefetch(run: RunRecord) -> Knob:
    """Twice as many batches loaded ahead."""
    prefetch = run.setting("data.prefetch")
    return Knob("data.prefetch", prefetch, 2 * prefetch if isinstance(prefetch, int) and prefetch else 2)


def first_slow_row(values: Sequence[float], middle: float) -> int:
    """The row from 1 on at which a drop through `middle` began: the fewest rows before it are slower, and from it on faster.

    Blocks say whether the speed dropped, but a block may lie across the drop. Single slow rows move this cut no more than they
    move a median. Of equal cuts the first counts.
    """
    mistaken = sum(value >= middle for value in values)
    fewest, found = math.inf, 1
    for index, value in enumerate(values[:-1], start=1):
        mistaken += 1 if value < middle else -1
        if mistaken < fewest:
            fewest, found = mistaken, index
    return found


def _seconds(times: Series, since: float = 0, until: float = math.inf) -> float:
    """Time that the logged steps [since, until) took, each with the steps without a row before it."""
    gaps = (step - before for before, step in zip([times.steps[0] - 1, *times.steps], times.steps, strict=False))
    rows = zip(times.steps, times.values, gaps, strict=True)
    return math.fsum(value * gap for step, value, gap in rows if since <= step < until)


def _growth(times: Series, cut: int) -> float:
    """Median step time from a step on over the median before it."""
    before = [value for step, value in zip(times.steps, times.values, strict=True) if step < cut]
    after = times.since(cut).values
    if not before or not after or median(before) <= 0:
        return math.inf
    return median(after) / median(before)


def _largest_drop(blocks: Sequence[float]) -> tuple[float, float, float]:
    """(level before, level after, noise of a block) of the cut with the largest drop between medians."""
    cuts = range(2, len(blocks) - 1)
    cut = max(cuts, key=lambda at: median(blocks[:at]) - median(blocks[at:]))
    before, after = median(blocks[:cut]), median(blocks[cut:])
    residuals = [value - before for value in blocks[:cut]] + [value - after for value in blocks[cut:]]
    return before, after, typical_deviation(residuals, 0.0)


def check_data_bound(run: RunRecord) -> Outcome:
    """The share of step time spent waiting for data; the first rows, in which files are opened, are told apart."""
    waits, times = aligned(_warm(run, DATA_TIME), _warm(run, STEP_TIME))
    if len(waits) < MIN_ROWS:
        return not_yet(f"needs {MIN_ROWS} rows after warm-up, has {len(waits)}")
    share = waits.total / max(times.total, 1e-12)
    words = f"{share:.1%} of the logged step time was spent waiting for data"
    first = [value for step, value in zip(*run.column(DATA_TIME), strict=True) if step < waits.steps[0]]
    if sum(first) > DATA_SHARE * (times.total + sum(first)):
        words += f", without {number_text(sum(first))} s before step {waits.steps[0]}, while the data was opened"
    if share <= DATA_SHARE:
        return healthy(words)
    if _seconds(times) < MIN_SECONDS:
        return not_yet(f"needs {MIN_SECONDS:g} s of steps: {words}")
    evidence = [waits.evidence(waits.largest(6))]
    typical = median(wait / time for wait, time in zip(waits.values, times.values, strict=True) if time > 0)
    steady = f"{typical:.0%} of a typical step: a batch takes longer to read than to train on"
    words += f", {steady if typical > DATA_SHARE / 3 else 'in single steps'}"
    stage, faster = "", STAGES["read"][1]
    if str(run.setting("data.tokenizer", "")).endswith(".json"):
        faster = f"{STAGES['tokenize'][1]}, {faster}"
    columns = [series(run, key).since(waits.steps[0]) for key in run.train.keys if key.startswith(STAGE_KEYS)]
    total = sum(column.total for column in columns)
    if columns and total >= waits.total / 2:  # otherwise something else took the time
        slowest = max(columns, key=lambda column: column.total)
        stage, source = slowest.key.split("/", 2)[1:]
        what, faster = STAGES[stage]
        words += f". {slowest.total / total:.0%} of the time of reading went into {what}{_of_source(run, source)}"
        evidence.append(slowest.evidence(slowest.largest(6)))
    if typical <= DATA_SHARE / 3 and stage not in (
        "open",
        "tokenize",
    ):  # reading ahead hides a small part of what a file takes
        return finding(words, evidence=evidence, knob=more_prefetch(run))
    return finding(words, evidence=evidence, knob=Knob("data.source", None, faster))


def _of_source(run: RunRecord, name: str) -> str:
    """Which source a key of a stage is about."""
    sources = run.setting("data.source")
    if name == "all" and isinstance(sources, list) and len(sources) == 1 and isinstance(sources[0], Mapping):
        name = str(sources[0].get("name"))
    return " (metrics.per_source = true names the source)" if name == "all" else f" of source {name}"


def check_straggler(run: RunRecord) -> Outcome:
    """Ranks that reach the gradient reduction much later than others."""
    if run.world_size == 1:
        return not_measured("single rank")
    slowest, fastest, times = aligned(*(_warm(run, key) for key in (SLOWEST, FASTEST, STEP_TIME)))
    if len(times) < MIN_ROWS:
        return not_yet(f"needs {MIN_ROWS} rows after warm-up, has {len(times)}")
    waits = [high - low for high, low in zip(slowest.values, fastest.values, strict=True)]
    share = median(wait / time for wait, time in zip(waits, times.values, strict=True) if time > 0)
    words = f"the fastest rank waits for the slowest for {share:.0%} of a step (median)"
    if share <= STRAGGLE_SHARE:
        return healthy(words)
    if _seconds(times) < MIN_SECONDS:
        return not_yet(f"needs {MIN_SECONDS:g} s of steps: {words}")
    worst = sorted(sorted(range(len(waits)), key=lambda i: -waits[i])[:6])
    mode = run.setting("data.mixing.batching_mode")
    condition = "if ranks read different data; otherwise look at the machine of the slowest rank"
    shares_streams = mode == "per_stream"
    return finding(
        f"{words}; they read slices of the same streams: look at the machine of the slowest"
        if shares_streams
        else words,
        evidence=[slowest.evidence(worst), fastest.evidence(worst)],
        knob=None if shares_streams else Knob("data.mixing.batching_mode", mode, "per_stream", condition),
    )


RULES = (
    Rule(
        name="throughput_regression",
        needs=(THROUGHPUT,),
        uses=(STEP_TIME,),
        threshold=f"the median over a block of rows drops by {LOST_SHARE:.0%} and by {BLOCK_SIGMAS:g} times the noise of "
        f"blocks, steps take {MIN_GROWTH - 1:.0%} longer, and both levels lasted {MIN_SECONDS:g} s",
        why="Throughput varies from step to step with padding; medians of a dozen blocks do not. Smaller batches are not a "
        f"regression. The first {WARM_UP_SHARE:.0%} of the rows (compilation, caches) are ignored.",
        knob="`data.prefetch`: twice as many, if `time/data_share` rose too; otherwise the machine",
        severity="warning",
        check=check_throughput,
    ),
    Rule(
        name="data_bound",
        needs=(DATA_TIME, STEP_TIME),
        uses=tuple(f"{key}<source>" for key in STAGE_KEYS),
        threshold=f"waiting for data takes more than {DATA_SHARE:.0%} of the logged step time, over {MIN_SECONDS:g} s or more",
        why="With a prefetch thread the wait is close to 0 until loading is slower than computing. Reading ahead helps where "
        "single steps wait; where the typical step does, only faster reading helps, of the stage that takes longest. The first "
        "rows are told apart.",
        knob="the data: tokenized ahead (`train data tokenize`), fewer files, a faster disk, or the data set's own code; where "
        "single steps wait for reading, `data.prefetch`",
        severity="warning",
        check=check_data_bound,
    ),
    Rule(
        name="straggling_rank",
        needs=(SLOWEST, FASTEST, STEP_TIME),
        hint="a run of several ranks logs them",
        threshold=f"the median of (slowest - fastest rank) / step time is above {STRAGGLE_SHARE:.0%}, over "
        f"{MIN_SECONDS:g} s of steps or more",
        why="Every rank waits for the slowest in the gradient reduction. Uneven batches change from step to step, so a median "
        "over the run ignores them.",
        knob="the machine of the rank; or `data.mixing.batching_mode`",
        severity="warning",
        check=check_straggler,
    ),
)
