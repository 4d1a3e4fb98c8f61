"""The rule about the batch size: compared with the gradient noise scale and its confidence interval."""

from __future__ import annotations

from statistics import median

from trainer.diagnostics.facts import micro_batches
from trainer.diagnostics.outcome import Knob, Outcome, finding, healthy, not_measured
from trainer.diagnostics.rules.rule import Rule
from trainer.diagnostics.series import aligned, series
from trainer.runs.load import RunRecord
from trainer.runs.wording import number_text

B_SIMPLE = "gns/b_simple"
ERROR = "gns/b_simple_se"
B_BIG = "gns/b_big"
TOO_SMALL = 0.1
WASTEFUL = 4.0
MIN_ROWS = 5
ERRORS = 2.0


def check_batch_size(run: RunRecord) -> Outcome:
    """Whether the batch is too small, about right or wasteful, over the second half of the run."""
    batch = series(run, B_BIG)
    half = (batch.steps[0] + batch.steps[-1]) // 2
    late = batch.since(half)
    scales, errors, batches = aligned(series(run, B_SIMPLE).since(half), series(run, ERROR).since(half), late)
    if len(scales) < max(MIN_ROWS, len(late) // 4):
        return not_measured(f"the noise scale was estimated in only {len(scales)} of the last {len(late)} rows")
    scale, size = median(scales.values), median(batches.values)
    low = median(max(b - ERRORS * e, 0.0) for b, e in zip(scales.values, errors.values, strict=True))
    high = median(b + ERRORS * e for b, e in zip(scales.values, errors.values, strict=True))
    words = (
        f"{number_text(size)} sequences per step, noise scale {number_text(scale)} "
        f"({number_text(low)} to {number_text(high)})"
    )
    evidence = [scales.evidence(), batches.evidence()]
    factor = scale / size if size else 1.0
    micros = micro_batches(run)
    if size < TOO_SMALL * low:
        more = max(round(micros * min(factor, 1 / TOO_SMALL)), micros + 1)
        return finding(
            f"the batch is too small: {words}; a larger batch takes fewer steps and hardly more tokens",
            evidence=evidence,
            knob=Knob("train.micro_batches", micros, more),
        )
    if size > WASTEFUL * high:
        key = "train.micro_batches" if micros > 1 else "data.mixing.batch_size"
        current = micros if micros > 1 else run.setting(key)
        suggested = max(round(current * factor), 1) if isinstance(current, int) else "smaller"
        return finding(
            f"the batch is wasteful: {words}; a smaller batch reaches the same loss with fewer tokens",
            evidence=evidence,
            knob=Knob(key, current, suggested),
        )
    return healthy(f"the batch is about right: {words}")


RULES = (
    Rule(
        name="batch_size",
        needs=(B_SIMPLE, ERROR, B_BIG),
        threshold=f"over the second half of the run, the batch is below {TOO_SMALL:g} of the lower bound of the noise scale "
        f"(too small) or above {WASTEFUL:g} times its upper bound (wasteful); the bounds are {ERRORS:g} standard errors away",
        why="A batch B needs 1 + B / B_simple times the minimum number of tokens and 1 + B_simple / B times the minimum "
        "number of steps (McCandlish et al. 2018): beyond the bounds, five times the tokens or eleven times the steps. "
        "This costs compute but does no harm, hence advice.",
        knob="`train.micro_batches` (or `data.mixing.batch_size`): move the batch towards the noise scale",
        severity="advice",
        check=check_batch_size,
    ),
)
