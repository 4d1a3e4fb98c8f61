"""Rules about the loss: spikes, and what is not finite."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from itertools import islice
from statistics import median

from trainer.diagnostics.outcome import Knob, Outcome, finding, healthy, not_applicable, not_measured
from trainer.diagnostics.rules.rule import Rule
from trainer.diagnostics.series import count_of, number, series, typical_deviation
from trainer.runs.load import Run

LOSS = "loss"
GRAD_NORM = "grad_norm"
REJECTED = "non_finite_steps"
FLAG = "loss_spike"
WINDOW = 32
CENTER = 9
MIN_BEFORE = 16
SIGMAS = 10.0
MIN_RISE = 0.1
RANGES = 1.5
GIVEN_BACK = 0.2
NEW_LEVEL = 8
FP16_SHARE = 0.02
FP16_FREE = 20


def check_non_finite(run: Run) -> Outcome:
    """Steps whose loss or gradient was not finite."""
    loss = series(run, LOSS)
    if not loss:
        return not_measured(LOSS)
    rejected = series(run, REJECTED)
    grad_norm = series(run, GRAD_NORM)
    bad = [(column, column.where(lambda value: not math.isfinite(value))) for column in (loss, grad_norm)]
    hits = rejected.where(lambda value: value > 0)
    if run.setting("train.precision") == "fp16" and rejected.total <= FP16_FREE + FP16_SHARE * loss.steps[-1]:
        return healthy(f"{count_of(rejected.total, 'step')} rejected, as fp16's loss scaling does")
    found = [(column, where) for column, where in [(rejected, hits), *bad] if where]
    if not found:
        return healthy("every logged loss and gradient was finite")
    first = min(column.steps[where[0]] for column, where in found)
    lr = run.setting("optimizer.lr")
    counted = f"{count_of(rejected.total, 'step')} rejected" if rejected.total else "values that are not finite"
    return finding(
        f"{counted}, the first by step {first}; events.jsonl names the batches",
        evidence=[column.evidence(where) for column, where in found],
        knob=Knob("optimizer.lr", lr, lr / 2 if isinstance(lr, float) else "half of it"),
    )


def check_loss_spikes(run: Run) -> Outcome:
    """A loss far out of its own noise, by the tracker's flag or, where there is none, against the rows before."""
    loss = series(run, LOSS)
    if not loss:
        return not_measured(LOSS)
    flags = series(run, FLAG)
    flagged = {flags.steps[i] for i in flags.where(lambda value: value > 0)}
    if len(loss) <= MIN_BEFORE and not flagged:
        return not_applicable(f"fewer than {MIN_BEFORE + 1} logged losses")
    hits = sorted({*find_spikes(loss.values), *(i for i, step in enumerate(loss.steps) if step in flagged)})
    if not hits:
        return healthy(f"no loss rose by {SIGMAS:g} times its own noise")
    worst = max(hits, key=loss.values.__getitem__)
    around = sorted({j for i in hits for j in (i - 1, i) if j >= 0})
    lr = run.setting("optimizer.lr")
    return finding(
        f"the loss leaves its own noise at {count_of(len(hits), 'logged step')}, to {number(loss.values[worst])} at step "
        f"{loss.steps[worst]}",
        evidence=[loss.evidence(around)],
        knob=Knob("optimizer.lr", lr, lr / 2 if isinstance(lr, float) else "half of it"),
    )


def find_spikes(values: Iterable[float]) -> list[int]:
    """Indices of values that rise out of the run's own noise.

    How far a value lies above the median of the few before has to pass four bars; see the rule's threshold. The largest
    such distance before stands for a blend whose sources differ; the share of what was learnt, for a rare source.
    """
    before: deque[float] = deque(maxlen=WINDOW)
    distances: deque[float] = deque(maxlen=WINDOW)
    found: list[int] = []
    first: float | None = None
    in_a_row = 0
    for index, value in enumerate(values):
        if not math.isfinite(value):
            continue
        first = value if first is None else first
        center = median(islice(reversed(before), CENTER)) if before else value
        distance = value - center
        is_spike = (
            len(before) >= MIN_BEFORE
            and distance > max(MIN_RISE, RANGES * max(distances), GIVEN_BACK * (first - center))
            and distance > SIGMAS * _noise(before)
        )
        in_a_row = in_a_row + 1 if is_spike else 0
        if is_spike:
            found.append(index)
        if is_spike and in_a_row < NEW_LEVEL:
            continue  # a spike is no measure of the noise, until it has become the level
        before.append(value)
        distances.append(distance)
    return found


def _noise(values: Iterable[float]) -> float:
    """Robust deviation from second differences, which a falling loss does not enlarge: theirs is sqrt(6) times a value's."""
    listed = list(values)
    bends = [a - 2 * b + c for a, b, c in zip(listed, listed[1:], listed[2:], strict=False)]
    return typical_deviation(bends, 0.0) / math.sqrt(6)


RULES = (
    Rule(
        name="non_finite",
        looks_at=(REJECTED, LOSS, GRAD_NORM),
        threshold=f"above 0 (fp16: above {FP16_FREE} + {FP16_SHARE:.0%} of the steps)",
        why="A step whose loss or gradient is not finite is rejected whole. fp16 rejects some while its scale settles.",
        knob="`optimizer.lr`: half; or the batch that events.jsonl names",
        severity="error",
        check=check_non_finite,
    ),
    Rule(
        name="loss_spikes",
        looks_at=(LOSS, FLAG),
        threshold=f"above the median of the {CENTER} rows before by all of: {SIGMAS:g} deviations (of second differences), "
        f"{RANGES:g} times the largest such distance in {WINDOW} rows, {GIVEN_BACK:.0%} of what was learnt, {MIN_RISE} nats",
        why="All but the last are the run's own: a blend whose sources differ has room, and a rare source is no spike.",
        knob="`optimizer.lr`: half; or the batches at that step",
        severity="warning",
        check=check_loss_spikes,
    ),
)
