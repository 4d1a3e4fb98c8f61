"""Rules about the run itself: its speed, ending and restarts, and the contract of its model."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from statistics import median

from trainer.tools import limits
from trainer.tools.diagnostics.rule import (
    Knob,
    Outcome,
    Series,
    aligned,
    finding,
    healthy,
    micro_batches,
    not_measured,
    not_yet,
    rule,
    series,
)
from trainer.tools.runs.load import RunRecord
from trainer.wording import counted

DATA_TIME = "time/data_sec"  # waiting for data, of an average step since the row before
STEP_TIME = "step_time_sec"
SLOWEST = "time/slowest_rank_sec"
FASTEST = "time/fastest_rank_sec"

STAGES = {  # of reading: what makes them faster
    "open": "fewer, larger files, or text tokenized ahead (train data tokenize)",
    "read": "files on a faster disk, or less work for each batch",
    "own_code": "less work for each batch in its own code",
}


def _warm(run: RunRecord, key: str) -> Series:
    """A key without the first rows, whose steps compile, fill caches and start workers."""
    column = series(run, key)
    return column.at(range(max(1, math.ceil(limits.WARM_UP_SHARE * len(column))), len(column)))


def _seconds(times: Series) -> float:
    """Time of the steps from the first row on; a row has the mean since the row before."""
    before = [times.steps[0] - 1, *times.steps]
    return sum(mean * (step - last) for last, step, mean in zip(before, times.steps, times.values, strict=False))


@rule("warning", needs=(DATA_TIME, STEP_TIME))
def data_bound(run: RunRecord) -> Outcome:
    """Steps that wait for data."""
    waits, times = aligned(_warm(run, DATA_TIME), _warm(run, STEP_TIME))
    if len(waits) < limits.SPEED_ROWS:
        return not_yet(f"needs {limits.SPEED_ROWS} rows after warm-up, has {len(waits)}")
    waited, lasted = _seconds(waits), _seconds(times)
    share = waited / max(lasted, 1e-12)
    words = f"{share:.1%} of the time of the steps was spent waiting for data"
    if share <= limits.DATA_SHARE:
        return healthy(words)
    if lasted < limits.BUSY_SECONDS:
        return not_yet(f"needs {limits.BUSY_SECONDS:g} s of steps: {words}")
    keys = [key for stage in STAGES for key in run.train.keys if key.startswith(f"time/{stage}/")]
    stages = [series(run, key).since(waits.steps[0]) for key in keys]
    reading, step = math.fsum(stage.total for stage in stages), micro_batches(run)
    ahead = run.setting("data.prefetch")
    takes_turns = ahead is not None and ahead < step and reading < lasted - waited  # with computing
    if takes_turns or reading < limits.EXPLAINED_WAIT * waited:  # which reading ahead hides
        return finding(words, waits.evidence(), knob=Knob("data.prefetch", ahead, max(2 * (ahead or 1), step)))
    slowest = max(stages, key=lambda stage: stage.total)
    words += f"; of the stages of reading, {slowest.key} took most"
    knob = Knob("data.source", None, STAGES[slowest.key.split("/")[1]], in_words=True)
    return finding(words, waits.evidence(), slowest.evidence(), knob=knob)


@rule("warning", needs=(SLOWEST, FASTEST, STEP_TIME), hint="a run of several ranks logs them")
def straggling_rank(run: RunRecord) -> Outcome:
    """Ranks that wait for the slowest one."""
    slowest, fastest, times = aligned(*(_warm(run, key) for key in (SLOWEST, FASTEST, STEP_TIME)))
    if len(times) < limits.SPEED_ROWS:
        return not_yet(f"needs {limits.SPEED_ROWS} rows after warm-up, has {len(times)}")
    waits = [high - low for high, low in zip(slowest.values, fastest.values, strict=True)]
    share = median(wait / time for wait, time in zip(waits, times.values, strict=True) if time > 0)
    words = f"the fastest rank waits for the slowest rank in {share:.0%} of a step (median)"
    if share <= limits.STRAGGLE_SHARE:
        return healthy(words)
    if _seconds(times) < limits.BUSY_SECONDS:
        return not_yet(f"needs {limits.BUSY_SECONDS:g} s of steps: {words}")
    # Rows hold the extremes over ranks, not which rank it was.
    return finding(f"{words}: look at the machine of the slowest", slowest.evidence(), fastest.evidence())


@rule("warning")
def restarts(run: RunRecord) -> Outcome:
    """Restarts that repeat many steps, or that return to one step again and again."""
    if not run.restarts:
        return healthy("no restarts")
    lost, total = run.steps_redone, max(run.steps, default=0)
    starts = Counter(restart.global_step for restart in run.restarts)
    most_often, times = starts.most_common(1)[0]
    words = f"{counted(starts.total(), 'restart')}, at least {counted(lost, 'step')} repeated"
    loses_much, is_loop = lost > limits.REDONE_SHARE * total, times > limits.RESTARTS
    if not loses_much and not is_loop:
        return healthy(words)
    words += f" of {total:,}"
    if is_loop:
        words += f"; {times} restarts from step {most_often}"
    steps, every = sorted(starts), run.setting("checkpoint.every")
    counts = Series("restart", array("q", steps), array("d", map(starts.__getitem__, steps)))
    knob: Knob | None = None
    # With so many steps between checkpoints as many restarts repeat little. 0: minutes decide.
    enough = max(int(limits.REDONE_SHARE * total) // starts.total(), 1)
    if loses_much and isinstance(every, int) and not 0 < every <= enough:
        knob = Knob("checkpoint.every", every, enough)
    return finding(words, counts.evidence(), knob=knob)


@rule("error")
def ending(run: RunRecord) -> Outcome:
    """A run that failed or died."""
    state, step = run.status.get("state"), run.status.get("last_step")
    if state is None:
        return not_measured("needs status.json beside the metrics")
    words = ": ".join(filter(None, (f"the run is {state}", run.status.get("reason"))))
    if state == "running":
        return not_yet(words)
    if state not in ("failed", "died"):
        return healthy(words)
    steps = [step] if isinstance(step, int) else []
    return finding(words.replace(" is ", " ", 1), Series("status.json", array("q", steps), array("d", steps)))


@rule("warning")
def model_contract(run: RunRecord) -> Outcome:
    """A model that breaks the contract of state."""
    events = [event for event in run.events if event.get("event") == "contract"]
    if not events:
        if "model" in run.config and run.setting("model.target") is None:
            return healthy("a built-in model, which the tests prove")
        return not_measured("the run has no record of a check of its model (trainer.lab.contracts.check_model)")
    verdicts = [verdict for event in events for verdict in event.get("verdicts", [])]
    broken = {each["check"]: each["text"] for each in verdicts if each["status"] == "broken"}
    if broken:
        sentence = "; ".join(f"the model breaks {check}: {text}" for check, text in broken.items())
        steps = sorted({int(event.get("global_step", 0)) for event in events})
        evidence = Series("checks of the contract", array("q", steps), array("d", [1.0] * len(steps)))
        return finding(f"{sentence}; fix the model (docs/contracts.md)", evidence)
    # Every model can be judged for causality: where that one was not testable, nothing was.
    causality = [each for each in verdicts if each["check"] == "causality"]
    untested = [each["text"] for each in causality if each["status"] == "not testable here"]
    if not verdicts:
        untested = [event["not_tried"] for event in events]
    if untested:
        return not_measured(f"the model was not checked: {untested[0]}")
    return healthy("the model keeps the contract, as far as it could be tested")


SPEED_RULES = (data_bound, straggling_rank)
"""Not judged in the smoke matrix and the calibration: they report what else the machine did."""
