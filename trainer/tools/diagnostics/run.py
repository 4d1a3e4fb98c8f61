"""Rules about the run itself: its speed, how it ended, how often it restarted, and the contract of its model."""

from __future__ import annotations

import heapq
import math
from array import array
from collections import Counter
from collections.abc import Sequence
from statistics import median

from trainer.tools.diagnostics.rule import (
    Evidence,
    Knob,
    Outcome,
    Series,
    aligned,
    explained,
    finding,
    healthy,
    not_measured,
    not_yet,
    rule,
    series,
    sources,
)
from trainer.tools.runs.load import RunRecord
from trainer.wording import counted, number_text

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
REDONE_SHARE = 0.05
REPEATED = 2


def _warm(run: RunRecord, key: str) -> Series:
    """A key without the first rows, whose steps compile, fill caches and start workers."""
    column = series(run, key)
    return column.at(range(max(1, math.ceil(WARM_UP_SHARE * len(column))), len(column)))


def _seconds(times: Series, since: float = 0, until: float = math.inf) -> float:
    """Time that the logged steps [since, until) took, each with the steps without a row before it."""
    gaps = (step - before for before, step in zip([times.steps[0] - 1, *times.steps], times.steps, strict=False))
    rows = zip(times.steps, times.values, gaps, strict=True)
    return math.fsum(value * gap for step, value, gap in rows if since <= step < until)


def _more_prefetch(run: RunRecord, condition: str = "") -> Knob:
    """Twice as many batches loaded ahead."""
    prefetch = run.setting("data.prefetch")
    return Knob("data.prefetch", prefetch, 2 * prefetch if isinstance(prefetch, int) and prefetch else 2, condition)


@rule("warning", needs=[THROUGHPUT], uses=[STEP_TIME])
def throughput_regression(run: RunRecord) -> Outcome:
    """The median over a block of rows drops by {LOST_SHARE:.0%} and by {BLOCK_SIGMAS:g} times the noise of blocks, steps take
    {MIN_GROWTH:g} times as long, and both levels lasted {MIN_SECONDS:g} s.

    Throughput varies from step to step with padding; medians of a dozen blocks do not. Smaller batches are not a regression.
    The first {WARM_UP_SHARE:.0%} of the rows (compilation, caches) are ignored.
    Change: `data.prefetch`: twice as many, if `time/data_share` rose too; otherwise the machine
    """
    speed, times = _warm(run, THROUGHPUT), _warm(run, STEP_TIME)
    size = max(len(speed) // NUM_BLOCKS, MIN_BLOCK)
    if len(speed) < 4 * size:
        return not_yet(f"needs {4 * size} rows after warm-up, has {len(speed)}")
    starts = range(len(speed) % size, len(speed), size)
    before, after, noise = _largest_drop([median(speed.values[start : start + size]) for start in starts])
    is_beyond_noise = before - after >= BLOCK_SIGMAS * noise
    index = _first_slow_row(speed.values, (before + after) / 2)
    cut = speed.steps[index]
    before, after = median(speed.values[:index]), median(speed.values[index:])
    lost = 1.0 - after / before if before > 0 else 0.0
    if lost < LOST_SHARE or not is_beyond_noise:
        return healthy(f"throughput never dropped by {LOST_SHARE:.0%} and beyond its noise")
    words = f"{number_text(before)} tokens/s before step {cut}, {number_text(after)} from there on"
    if times and _growth(times, cut) < MIN_GROWTH:
        return explained(f"{words}; step times did not grow, the steps had fewer tokens")
    if times and min(_seconds(times, until=cut), _seconds(times, since=cut)) < MIN_SECONDS:
        return not_yet(f"needs {MIN_SECONDS:g} s of both levels: {words}")
    every = max((len(speed) - index) // 6, 1)
    shown = {*range(index - 1, min(index + 3, len(speed))), *range(index, len(speed), every)}
    condition = "if steps wait longer for data than before; otherwise look at the machine"
    words = f"throughput dropped by {lost:.0%}: {words}"
    return finding(words, speed.evidence(sorted(shown)), knob=_more_prefetch(run, condition))


def _largest_drop(blocks: Sequence[float]) -> tuple[float, float, float]:
    """(level before, level after, robust noise of a block) of the cut with the largest drop between medians."""
    cut = max(range(2, len(blocks) - 1), key=lambda at: median(blocks[:at]) - median(blocks[at:]))
    before, after = median(blocks[:cut]), median(blocks[cut:])
    residuals = [abs(value - before) for value in blocks[:cut]] + [abs(value - after) for value in blocks[cut:]]
    return before, after, 1.4826 * median(residuals)


def _first_slow_row(values: Sequence[float], middle: float) -> int:
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


def _growth(times: Series, cut: int) -> float:
    """Median step time from a step on over the median before it."""
    after = times.since(cut).values
    before = times.values[: len(times) - len(after)]
    return median(after) / median(before) if before and after and median(before) > 0 else math.inf


@rule("warning", needs=(DATA_TIME, STEP_TIME), uses=[f"{key}<source>" for key in STAGE_KEYS])
def data_bound(run: RunRecord) -> Outcome:
    """Waiting for data takes more than {DATA_SHARE:.0%} of the time of the steps, over {MIN_SECONDS:g} s or more.

    With a prefetch thread the wait is close to 0 until loading is slower than computing. Reading ahead helps if single steps
    wait; if the typical step does, only speeding up the slowest stage helps. The first rows are judged separately.
    Change: the data: tokenized ahead (`train data tokenize`), fewer files, a faster disk, or the data set's own code; where
    single steps wait for reading, `data.prefetch`
    """
    waits, times = aligned(_warm(run, DATA_TIME), _warm(run, STEP_TIME))
    if len(waits) < MIN_ROWS:
        return not_yet(f"needs {MIN_ROWS} rows after warm-up, has {len(waits)}")
    waited, lasted = _seconds(waits), _seconds(times)
    share = waited / max(lasted, 1e-12)
    words = f"{share:.1%} of the time of the steps was spent waiting for data"
    first = [value for step, value in zip(*run.column(DATA_TIME), strict=True) if step < waits.steps[0]]
    if sum(first) > DATA_SHARE * (lasted + sum(first)):
        words += f", without {number_text(sum(first))} s before step {waits.steps[0]}, while the data was opened"
    if share <= DATA_SHARE:
        return healthy(words)
    if lasted < MIN_SECONDS:
        return not_yet(f"needs {MIN_SECONDS:g} s of steps: {words}")
    evidence = [waits.evidence(waits.largest(6))]
    typical = median(wait / time for wait, time in zip(waits.values, times.values, strict=True) if time > 0)
    is_steady = typical > DATA_SHARE / 3
    steady = f"{typical:.0%} of a typical step: a batch takes longer to read than to train on"
    words += f", {steady if is_steady else 'in single steps'}"
    stage, faster = "", STAGES["read"][1]
    if str(run.setting("data.tokenizer", "")).endswith(".json"):
        faster = f"{STAGES['tokenize'][1]}, {faster}"
    columns = [series(run, key).since(waits.steps[0]) for key in run.train.keys if key.startswith(STAGE_KEYS)]
    total = sum(column.total for column in columns)
    if columns and total >= waited / 2:  # otherwise something else took the time
        slowest = max(columns, key=lambda column: column.total)
        stage, source = slowest.key.split("/", 2)[1:]
        what, faster = STAGES[stage]
        words += f". {slowest.total / total:.0%} of the time of reading went into {what}"
        if source != "all":
            words += f" of source {source}"
        elif len(sources(run)) > 1:
            words += " (metrics.per_source = true names the source)"
        evidence.append(slowest.evidence(slowest.largest(6)))
    # Reading ahead hides a small part of what a file takes.
    helps_to_read_ahead = not is_steady and stage not in ("open", "tokenize")
    knob = _more_prefetch(run) if helps_to_read_ahead else Knob("data.source", None, faster)
    return finding(words, *evidence, knob=knob)


@rule("warning", needs=(SLOWEST, FASTEST, STEP_TIME), hint="a run of several ranks logs them")
def straggling_rank(run: RunRecord) -> Outcome:
    """The median of (slowest - fastest rank) / step time is above {STRAGGLE_SHARE:.0%}, over {MIN_SECONDS:g} s or more.

    Every rank waits for the slowest in the gradient reduction. The median ignores occasional uneven batches.
    Change: the machine of the rank; or `data.mixing.batching_mode`
    """
    if run.world_size == 1:
        return not_measured("single rank")
    slowest, fastest, times = aligned(*(_warm(run, key) for key in (SLOWEST, FASTEST, STEP_TIME)))
    if len(times) < MIN_ROWS:
        return not_yet(f"needs {MIN_ROWS} rows after warm-up, has {len(times)}")
    waits = [high - low for high, low in zip(slowest.values, fastest.values, strict=True)]
    share = median(wait / time for wait, time in zip(waits, times.values, strict=True) if time > 0)
    words = f"the fastest rank waits for the slowest rank in {share:.0%} of a step (median)"
    if share <= STRAGGLE_SHARE:
        return healthy(words)
    if _seconds(times) < MIN_SECONDS:
        return not_yet(f"needs {MIN_SECONDS:g} s of steps: {words}")
    worst = sorted(heapq.nlargest(6, range(len(waits)), key=waits.__getitem__))
    evidence = slowest.evidence(worst), fastest.evidence(worst)
    mode = run.setting("data.mixing.batching_mode")
    if mode in ("per_stream", "per_row"):
        why = "they read slices of the same streams" if mode == "per_stream" else "their rows are full alike"
        words += f"; {why}: look at the machine of the slowest"
        return finding(words, *evidence)
    condition = "if ranks read different data; otherwise look at the machine of the slowest rank"
    return finding(words, *evidence, knob=Knob("data.mixing.batching_mode", mode, "per_stream", condition))


@rule("warning", uses=["the `restart` events of metrics.jsonl"])
def restarts(run: RunRecord) -> Outcome:
    """More than {REDONE_SHARE:.0%} of the steps were repeated, or there were more than {REPEATED} restarts from one step.

    A planned stop repeats no step. Repeated steps waste compute, and repeated restarts are a crash loop.
    Change: `checkpoint.every`: a quarter
    """
    if not run.restarts:
        return healthy("no restarts")
    lost = sum(run.steps_redone)
    total = run.steps[-1] if run.steps else 0
    starts = [restart.global_step for restart in run.restarts]
    most_often = max(starts, key=starts.count)
    repeated = starts.count(most_often)
    words = f"{counted(len(starts), 'restart')}, {counted(lost, 'step')} repeated"
    if lost <= REDONE_SHARE * total and repeated <= REPEATED:
        return healthy(words)
    every = run.setting("checkpoint.every")
    suggested = max(every // 4, 1) if isinstance(every, int) and every else max(total // 50, 1)
    # More checkpoints do not help a run that keeps failing at the same step, or one that saves at every step.
    more_would_help = lost > REDONE_SHARE * total and suggested != every
    why = f"; {repeated} restarts from step {most_often}" if repeated > REPEATED else ""
    evidence = Series("restart", array("q", starts), array("d", run.steps_redone)).evidence()
    knob = Knob("checkpoint.every", every, suggested) if more_would_help else None
    return finding(f"{words} of {total:,}{why}", evidence, knob=knob)


@rule("error", uses=["status.json"])
def ending(run: RunRecord) -> Outcome:
    """The state is `failed`, or `running` while the process is gone.

    status.json has the reason even where torchrun replaced the exit code with 1.
    Change: depends on the reason
    """
    state = run.status.get("state")
    if state is None:
        return not_measured("needs status.json beside the metrics")
    if state in ("running", "unknown"):
        return not_yet("status.json says that the run has not ended")
    if state not in ("failed", "died"):
        return healthy(f"the run is {state}")
    step = run.status.get("last_step")
    steps = (step,) if isinstance(step, int) else ()
    words = f"the run {state}: {run.status.get('reason') or 'unknown reason'}"
    return finding(words, Evidence("status.json", steps, tuple(map(float, steps))))


@rule("warning", uses=["the `contract` events of events.jsonl"])
def model_contract(run: RunRecord) -> Outcome:
    """A check of the model was broken when the run or a resume began (`resets`: where documents may begin within rows).

    A model that drops its state, sees later tokens or mixes rows trains without another symptom ([contracts.md](contracts.md)).
    Change: the model; then empty `model.trust` where it names something
    """
    events = [event for event in run.events if event.get("event") == "contract"]
    if not events:
        if "model" in run.config and run.setting("model.target") is None:
            return healthy("a built-in model, which the tests prove")
        return not_measured("the run has no record of a check of its model (trainer.lab.contracts.check_model)")
    # Where each document begins a row, none has a reset inside.
    begins_rows = run.setting("data.mixing.batching_mode") != "per_row" or run.setting("data.align") == "document"
    unused = "resets" if begins_rows else None
    broken: dict[str, str] = {}
    starts: Counter[int] = Counter()  # breaches found at each step
    judged, why = False, "unknown reason"
    for event in events:
        verdicts = event.get("verdicts", [])
        for verdict in verdicts:
            if verdict["status"] == "broken" and verdict["check"] != unused:
                broken.setdefault(verdict["check"], verdict["text"])
                starts[int(event.get("global_step", 0))] += 1
        # Every model can be judged for causality.
        causality = next((each for each in verdicts if each["check"] == "causality"), {"status": ""})
        untried = [causality["text"]] if causality["status"] == "not testable here" else []
        judged = judged or bool(verdicts and not untried)
        why = str((untried or [event.get("not_tried") or why])[0])
    if broken:
        trusted = run.setting("model.trust", events[-1].get("trusted")) or []
        sentence = "; ".join(f"the model breaks {check}: {text}" for check, text in broken.items())
        evidence = Evidence("breaches of the contract", tuple(starts), tuple(map(float, starts.values())))
        if not broken.keys() & set(trusted):
            return finding(f"{sentence}; fix the model (docs/contracts.md)", evidence)
        return finding(sentence, evidence, knob=Knob("model.trust", trusted, [], "with a model that keeps it"))
    if not judged:
        return not_measured(f"the model was not checked: {why}")
    return healthy("the model keeps the contract, as far as it could be tested")


SPEED_RULES = (throughput_regression, data_bound, straggling_rank)
"""Displayed but not judged in the smoke matrix and the calibration: they report what else the machine was doing."""
