"""Rules about speed: a run that became slower, steps that wait for data, a rank that the others wait for."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from statistics import median

from trainer.diagnostics.outcome import Knob, Outcome, explained, finding, healthy, not_applicable, not_measured
from trainer.diagnostics.rules.rule import Rule
from trainer.diagnostics.series import Series, aligned, number, series, typical_deviation
from trainer.runs.load import Run

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
STRAGGLE_SHARE = 0.25


def _warm(column: Series) -> Series:
    """Without the first steps, which compile, fill caches and start workers."""
    skip = max(1, math.ceil(WARM_UP_SHARE * len(column)))
    return Series(column.key, column.steps[skip:], column.values[skip:])


def check_throughput(run: Run) -> Outcome:
    """Later parts of the run slower than earlier ones, beyond what parts differ by anyway."""
    speed = _warm(series(run, THROUGHPUT))
    if not series(run, THROUGHPUT):
        return not_measured(THROUGHPUT)
    size = max(len(speed) // NUM_BLOCKS, MIN_BLOCK)
    if len(speed) < 4 * size:
        return not_applicable("too few rows to compare parts of the run")
    starts = range(len(speed) % size, len(speed), size)
    blocks = [median(speed.values[start : start + size]) for start in starts]
    cut, before, after, noise = _largest_drop(blocks)
    words = f"{number(before)} tokens/s before step {speed.steps[starts[cut]]}, {number(after)} from there on"
    lost = 1.0 - after / before if before > 0 else 0.0
    if lost < LOST_SHARE or before - after < BLOCK_SIGMAS * noise:
        return healthy(f"no part of the run is slower than those before by {LOST_SHARE:.0%} and by its own noise")
    index = starts[cut]
    times = series(run, STEP_TIME)
    if times and _growth(times, speed.steps[index]) < MIN_GROWTH:
        return explained(f"{words}; steps took no longer, they had fewer tokens")
    shown = [*range(max(index - 3, 0), index), *range(index, len(speed), max((len(speed) - index) // 6, 1))]
    return finding(
        f"{lost:.0%} of the throughput was lost: {words}",
        evidence=[speed.evidence(shown)],
        knob=Knob(
            "data.prefetch", run.setting("data.prefetch"), "higher, if time/data_share rose with it; else the machine"
        ),
    )


def _growth(times: Series, cut: int) -> float:
    """How much longer steps take from a step on than before it (medians), the first ones left out."""
    warm = _warm(times)
    before = [value for step, value in zip(warm.steps, warm.values, strict=True) if step < cut]
    after = [value for step, value in zip(warm.steps, warm.values, strict=True) if step >= cut]
    if not before or not after or median(before) <= 0:
        return math.inf
    return median(after) / median(before)


def _largest_drop(blocks: Sequence[float]) -> tuple[int, float, float, float]:
    """(where, level before, level from there on, noise of a block) of the cut with the largest drop of medians."""
    cuts = range(2, len(blocks) - 1)
    cut = max(cuts, key=lambda at: median(blocks[:at]) - median(blocks[at:]))
    before, after = median(blocks[:cut]), median(blocks[cut:])
    residuals = [value - before for value in blocks[:cut]] + [value - after for value in blocks[cut:]]
    return cut, before, after, typical_deviation(residuals, 0.0)


def check_data_bound(run: Run) -> Outcome:
    """Time in which steps waited for data."""
    columns = [_warm(series(run, DATA_TIME)), _warm(series(run, STEP_TIME))]
    if not series(run, DATA_TIME) or not series(run, STEP_TIME):
        return not_measured(DATA_TIME, STEP_TIME)
    steps, (waits, times) = aligned(*columns)
    if len(steps) < MIN_ROWS:
        return not_applicable(f"fewer than {MIN_ROWS} rows after the first ones")
    share = math.fsum(waits) / max(math.fsum(times), 1e-12)
    words = f"{share:.1%} of the time of the logged steps was waiting for data"
    if share <= DATA_SHARE:
        return healthy(words)
    worst = sorted(sorted(range(len(steps)), key=lambda i: -waits[i])[:6])
    prefetch = run.setting("data.prefetch")
    return finding(
        words,
        evidence=[Series(DATA_TIME, array("q", steps), array("d", waits)).evidence(worst)],
        knob=Knob("data.prefetch", prefetch, 2 * prefetch if isinstance(prefetch, int) and prefetch else 2),
    )


def check_straggler(run: Run) -> Outcome:
    """Ranks that are ready for the gradient's reduction much later than others."""
    columns = [_warm(series(run, key)) for key in (SLOWEST, FASTEST, STEP_TIME)]
    if not series(run, SLOWEST) or not series(run, FASTEST):
        return not_measured(SLOWEST, FASTEST)
    if run.world_size == 1:
        return not_applicable("one rank")
    steps, (slowest, fastest, times) = aligned(*columns)
    if len(steps) < MIN_ROWS:
        return not_applicable(f"fewer than {MIN_ROWS} rows after the first ones")
    shares = [(high - low) / time for high, low, time in zip(slowest, fastest, times, strict=True) if time > 0]
    share = median(shares)
    words = f"the fastest rank waits for the slowest for {share:.0%} of a step (median)"
    if share <= STRAGGLE_SHARE:
        return healthy(words)
    worst = sorted(sorted(range(len(steps)), key=lambda i: fastest[i] - slowest[i])[:6])
    return finding(
        words,
        evidence=[
            Series(key, array("q", steps), array("d", values)).evidence(worst)
            for key, values in ((SLOWEST, slowest), (FASTEST, fastest))
        ],
        knob=Knob(
            "data.mixing.batching_mode",
            run.setting("data.mixing.batching_mode"),
            "per_stream, if ranks read unlike data",
        ),
    )


RULES = (
    Rule(
        name="throughput_regression",
        looks_at=(THROUGHPUT, STEP_TIME),
        threshold=f"the medians of parts of the run drop by {LOST_SHARE:.0%} at some point, and by {BLOCK_SIGMAS:g} times what "
        f"parts on one side of it differ by, and steps take {MIN_GROWTH - 1:.0%} longer",
        why="Tokens a second differ from step to step with padding; medians of a dozen parts do not. Smaller batches are "
        "no fault. The first "
        f"{WARM_UP_SHARE:.0%} of the rows (compilation, caches) are left out.",
        knob="`data.prefetch` where `time/data_share` rose with it; otherwise the machine",
        severity="warning",
        check=check_throughput,
    ),
    Rule(
        name="data_bound",
        looks_at=(DATA_TIME, STEP_TIME),
        threshold=f"waiting for data takes more than {DATA_SHARE:.0%} of the time of the logged steps",
        why="With reading ahead in a thread the wait is near 0 until reading is slower than computing.",
        knob="`data.prefetch`: twice as many",
        severity="warning",
        check=check_data_bound,
    ),
    Rule(
        name="straggling_rank",
        looks_at=(SLOWEST, FASTEST, STEP_TIME),
        threshold=f"median of (slowest - fastest rank) over the step's time above {STRAGGLE_SHARE:.0%}",
        why="Every rank waits for the slowest in the gradient's reduction. Uneven batches differ from step to step, and a "
        "median over the run does not see them.",
        knob="the rank's machine; or `data.mixing.batching_mode`",
        severity="warning",
        check=check_straggler,
    ),
)
