"""The rule about the batch size: against the gradient noise scale, with its confidence interval."""

from __future__ import annotations

from statistics import median

from trainer.diagnostics.facts import micro_batches
from trainer.diagnostics.outcome import Evidence, Knob, Outcome, finding, healthy, not_applicable, not_measured
from trainer.diagnostics.rules.rule import Rule
from trainer.diagnostics.series import aligned, number, series, thin
from trainer.runs.load import Run

B_SIMPLE = "gns/b_simple"
ERROR = "gns/b_simple_se"
B_BIG = "gns/b_big"
TOO_SMALL = 0.1
WASTEFUL = 4.0
MIN_ROWS = 5
ERRORS = 2.0


def check_batch_size(run: Run) -> Outcome:
    """Too small, about right, or wasteful, over the second half of the run."""
    batch = series(run, B_BIG)
    if not batch:
        return not_measured(B_SIMPLE, B_BIG)
    half = (batch.steps[0] + batch.steps[-1]) // 2
    late = batch.since(half)
    steps, (scales, errors, batches) = aligned(series(run, B_SIMPLE).since(half), series(run, ERROR).since(half), late)
    if len(steps) < max(MIN_ROWS, len(late) // 4):
        return not_applicable(f"the noise scale was determined in {len(steps)} of the last {len(late)} rows")
    scale = median(scales)
    low = median(max(b - ERRORS * e, 0.0) for b, e in zip(scales, errors, strict=True))
    high = median(b + ERRORS * e for b, e in zip(scales, errors, strict=True))
    size = median(batches)
    words = f"a step has {number(size)} sequences, the noise scale is {number(scale)} ({number(low)} to {number(high)})"
    shown = thin(range(len(steps)))
    evidence = [
        Evidence(key, tuple(steps[i] for i in shown), tuple(values[i] for i in shown))
        for key, values in ((B_SIMPLE, scales), (B_BIG, batches))
    ]
    factor = scale / size if size else 1.0
    micros = micro_batches(run)
    if size < TOO_SMALL * low:
        knob = Knob("train.micro_batches", micros, max(round(micros * min(factor, 1 / TOO_SMALL)), micros + 1))
        return finding(
            f"the batch is too small: {words}; a larger one costs no more tokens", evidence=evidence, knob=knob
        )
    if size > WASTEFUL * high:
        key = "train.micro_batches" if micros > 1 else "data.mixing.batch_size"
        current = micros if micros > 1 else run.setting(key)
        suggested = max(round(current * factor), 1) if isinstance(current, int) else "smaller"
        return finding(
            f"the batch is wasteful: {words}; a smaller one learns as much from fewer tokens",
            evidence=evidence,
            knob=Knob(key, current, suggested),
        )
    return healthy(f"the batch is about right: {words}")


RULES = (
    Rule(
        name="batch_size",
        looks_at=(B_SIMPLE, ERROR, B_BIG),
        threshold=f"second half of the run: batch below {TOO_SMALL:g} of the noise scale's lower bound (too small), or above "
        f"{WASTEFUL:g} times its upper bound (wasteful); bounds are {ERRORS:g} standard errors",
        why="A batch B takes 1 + B / B_simple times the fewest tokens and 1 + B_simple / B times the fewest steps "
        "(McCandlish et al. 2018): beyond the bounds five times the tokens, or eleven times the steps. An economy: advice.",
        knob="`train.micro_batches` (or `data.mixing.batch_size`) towards the noise scale",
        severity="advice",
        check=check_batch_size,
    ),
)
