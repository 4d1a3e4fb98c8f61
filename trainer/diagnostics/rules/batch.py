"""The rule about the batch size: compared with the gradient noise scale and its confidence interval."""

from __future__ import annotations

from math import inf
from statistics import median

from trainer.diagnostics.facts import micro_batches
from trainer.diagnostics.outcome import Knob, Outcome, finding, healthy, not_measured
from trainer.diagnostics.rules.rule import Rule
from trainer.diagnostics.series import aligned, series
from trainer.runs.load import RunRecord
from trainer.wording import number_text

B_SIMPLE = "gns/b_simple"
LOW = "gns/b_simple_low"
HIGH = "gns/b_simple_high"
B_BIG = "gns/b_big"
TOO_SMALL = 0.1
WASTEFUL = 4.0
MIN_ROWS = 5


def check_batch_size(run: RunRecord) -> Outcome:
    """Whether the batch is too small, about right or wasteful, over the second half of the run.

    A lower bound is enough for "too small". The other two verdicts need a noise scale, with its upper bound, in at least
    a quarter of the rows; in the others both count as infinite.
    """
    batch = series(run, B_BIG)
    half = (batch.steps[0] + batch.steps[-1]) // 2
    late = batch.since(half)
    lows, batches = aligned(series(run, LOW).since(half), late)
    if len(lows) < max(MIN_ROWS, len(late) // 4):
        needed = max(MIN_ROWS, len(late) // 4)
        return not_measured(
            f"the noise scale has a lower bound in {len(lows)} rows since step {half}, fewer than {needed}"
        )
    scales, highs = aligned(series(run, B_SIMPLE).since(half), series(run, HIGH).since(half))
    is_known = len(scales) >= max(MIN_ROWS, len(late) // 4)
    low, size = median(lows.values), median(batches.values)
    per_step = f"{number_text(size)} sequences per step"
    micros = micro_batches(run, since=batch.steps[-1])
    is_constant = isinstance(run.setting("train.micro_batches", 1), int)
    if is_known:
        scale = median(scales.values)
        high = median([*highs.values, *[inf] * (len(lows) - len(highs))])
        upper = number_text(high) if high < inf else "infinity"
        words = f"{per_step}, noise scale {number_text(scale)} ({number_text(low)} to {upper})"
        evidence = [scales.evidence(), batches.evidence()]
    else:
        scale, high, evidence = low, inf, [lows.evidence(), batches.evidence()]
        words = f"{per_step}, noise scale at least {number_text(low)}"
    factor = scale / size if size else 1.0
    if size < TOO_SMALL * low:
        more = max(round(micros * min(factor, 1 / TOO_SMALL)), micros + 1)
        return finding(
            f"the batch is too small: {words}; a larger batch takes fewer steps and hardly more tokens",
            evidence=evidence,
            knob=Knob("train.micro_batches", micros, more if is_constant else f"a schedule that reaches {more}"),
        )
    if size > WASTEFUL * high:
        key = "train.micro_batches" if micros > 1 else "data.mixing.batch_size"
        current = micros if micros > 1 else run.setting(key)
        suggested = max(round(current * factor), 1) if isinstance(current, int) else "smaller"
        if not is_constant and micros > 1:
            suggested = f"a schedule that ends at {suggested}"
        return finding(
            f"the batch is wasteful: {words}; a smaller batch reaches the same loss with fewer tokens",
            evidence=evidence,
            knob=Knob(key, current, suggested),
        )
    if not is_known:
        return not_measured(f"the noise scale has no upper bound in most of the last {len(late)} rows: {words}")
    return healthy(f"the batch is about right: {words}")


RULES = (
    Rule(
        name="batch_size",
        needs=(LOW, B_BIG),
        threshold=f"over the second half of the run, the batch is below {TOO_SMALL:g} of the lower bound of the noise scale "
        f"(too small) or above {WASTEFUL:g} times its upper bound (wasteful)",
        why="A batch B needs 1 + B / B_simple times the minimum number of tokens and 1 + B_simple / B times the minimum "
        "number of steps (McCandlish et al. 2018): beyond the bounds, five times the tokens or eleven times the steps. "
        "This costs compute but does no harm, hence advice.",
        knob="`train.micro_batches` (or `data.mixing.batch_size`): move the batch towards the noise scale",
        severity="advice",
        check=check_batch_size,
    ),
)
