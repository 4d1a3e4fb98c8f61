"""Rules about the loss: divergence and spikes, and values that are not finite."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from itertools import islice
from statistics import median

from trainer.tools.diagnostics.facts import lower_lr
from trainer.tools.diagnostics.outcome import Outcome, Severity, finding, healthy, not_yet
from trainer.tools.diagnostics.rules.divergence import (
    BUMP,
    BUMP_SIGMAS,
    DOUBLED,
    END_RISE,
    END_ROWS,
    END_SIGMAS,
    LONE_BUMP,
    MANY_ROWS,
    MIN_RISE,
    MIN_ROWS,
    bump,
    end_above_first,
    finite,
    noise,
)
from trainer.tools.diagnostics.rules.rule import Rule
from trainer.tools.diagnostics.series import Series, series
from trainer.tools.runs.load import RunRecord
from trainer.wording import counted, number_text

LOSS = "loss"
GRAD_NORM = "grad_norm"
REJECTED = "non_finite_steps"
FLAG = "loss_spike"
WINDOW = 32
CENTER = 9
FAR_WINDOW = 128
MIN_BEFORE = 16
MIN_HISTORY = 30
SIGMAS = 10.0
RANGES = 1.5
GIVEN_BACK = 0.2
NEW_LEVEL = 8
MAX_FLAGGED = 0.05
FP16_SHARE = 0.02
FP16_FREE = 20


def check_non_finite(run: RunRecord) -> Outcome:
    """Steps with a loss or gradient that is not finite."""
    loss, rejected = series(run, LOSS), series(run, REJECTED)
    count = counted(rejected.total, "step")
    if run.setting("train.precision") == "fp16" and rejected.total <= FP16_FREE + FP16_SHARE * loss.steps[-1]:
        return healthy(f"{count} skipped, as fp16 loss scaling does")
    bad = [(column, column.where(lambda value: not math.isfinite(value))) for column in (loss, series(run, GRAD_NORM))]
    hits = [(column, where) for column, where in [(rejected, rejected.positive), *bad] if where]
    if not hits:
        return healthy("every logged loss and gradient norm was finite")
    first = min(column.steps[where[0]] for column, where in hits)
    if not rejected.total:
        what = "NaN or infinite values"
    elif run.setting("train.precision") == "fp16" or run.setting("train.on_non_finite") == "skip":
        what = f"{count} skipped"
    else:
        what = f"the loss or the gradient of {count} was not finite"
    return finding(
        f"{what}, first logged at step {first}{'; events.jsonl names the batches' if run.config else ''}",
        evidence=[column.evidence(where) for column, where in hits],
        knob=lower_lr(run),
    )


def check_loss_spikes(run: RunRecord) -> Outcome:
    """Losses that ended above the first, or far outside their own noise: by the rows before, or flagged between two rows."""
    loss = series(run, LOSS)
    diverged = _divergence(run, finite(loss))
    if diverged is not None:
        return diverged
    flags = series(run, FLAG)
    # The flag compares with an average and a deviation alone. Where every step is logged, the rows say more; and flags that
    # return are a source whose losses differ.
    before = dict(zip(loss.steps, [0, *loss.steps], strict=False))
    flagged = {step for step in flags.at(flags.positive).steps if step - before.get(step, step) > 1}
    if len(flagged) > max(1, MAX_FLAGGED * len(flags)):
        flagged = set()
    flagged &= {*loss.steps[MIN_HISTORY:]}
    if len(loss) <= MIN_BEFORE and not flagged:
        return not_yet(f"needs {MIN_BEFORE + 1} logged losses, has {len(loss)}")
    hits = sorted({*find_spikes(loss.values), *(i for i, step in enumerate(loss.steps) if step in flagged)})
    if not hits:
        return healthy(f"no loss rose far above the first, or by {SIGMAS:g} times its noise")
    unlogged = f"; {len(flagged)} flagged between two rows, see events.jsonl" if flagged else ""
    worst = max(hits, key=loss.values.__getitem__)
    around = sorted({j for i in hits for j in (i - 1, i) if j >= 0})
    return finding(
        f"loss spikes at {counted(len(hits), 'logged step')}, the highest {number_text(loss.values[worst])} at step "
        f"{loss.steps[worst]}{unlogged}",
        evidence=[loss.evidence(around)],
        knob=lower_lr(run),
    )


def _divergence(run: RunRecord, loss: Series) -> Outcome | None:
    """The finding on a loss that rose above its first row and stayed there, or came back."""
    if (end := end_above_first(loss)) is not None:
        text = f"is {number_text(end.value)} at the end (median of the last {len(end.rows)} rows)"
        severity: Severity = "error"
        ending, rows = ": the run diverged", {loss.largest()[0], *end.rows}
    elif (high := bump(loss)) is not None:
        text = f"rose to {number_text(high.value)} at step {loss.steps[loss.values.index(high.value)]}"
        ending, severity, rows = ", and came back", "warning", {*high.rows, len(loss) - 1}
    else:
        return None
    first = f"{number_text(loss.values[0])} at step {loss.steps[0]}"
    return finding(
        f"the loss {text}, {first}{ending}",
        evidence=[loss.evidence(sorted({0, *rows}))],
        knob=lower_lr(run),
        severity=severity,
    )


def find_spikes(values: Iterable[float]) -> list[int]:
    """Indices of values that rise above the noise of the run.

    The distance of a value from the median of the values before it must exceed four limits; see the threshold of the rule.
    The largest distance before it accounts for a blend of sources with different losses, the share of the total improvement
    for a rare source. The first batches of a source, or of a hard document, are as bad as those of the untrained model:
    until `MIN_HISTORY` values may have shown such, only what is worse than the first value counts.
    """
    before: deque[float] = deque(maxlen=WINDOW)
    distances: deque[float] = deque(maxlen=FAR_WINDOW)
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
            and (index >= MIN_HISTORY or value > first)
            and distance > max(MIN_RISE, RANGES * max(distances), GIVEN_BACK * (first - center))
            and distance > SIGMAS * noise(before)
        )
        in_a_row = in_a_row + 1 if is_spike else 0
        if is_spike:
            found.append(index)
        if is_spike and in_a_row < NEW_LEVEL:
            continue  # A spike says nothing about the noise, unless it lasts: then it is the new level.
        before.append(value)
        distances.append(distance)
    return found


RULES = (
    Rule(
        name="non_finite",
        needs=(LOSS,),
        uses=(REJECTED, GRAD_NORM),
        threshold=f"above 0 (fp16: above {FP16_FREE} + {FP16_SHARE:.0%} of the steps)",
        why="A step whose loss or gradient is not finite changes no weight: it ends the run, or is skipped "
        "(`train.on_non_finite`). fp16 skips some steps until its loss scale has settled.",
        knob="`optimizer.lr`: half; or the batch that events.jsonl names",
        severity="error",
        check=check_non_finite,
    ),
    Rule(
        name="loss_spikes",
        needs=(LOSS,),
        uses=(FLAG,),
        threshold=f"a spike: above the median of the {CENTER} rows before by each of: {SIGMAS:g} deviations (of second "
        f"differences), {RANGES:g} times the largest such distance in {FAR_WINDOW} rows, {GIVEN_BACK:.0%} of the "
        f"improvement, {MIN_RISE} nats (as for all that follows), and in the first {MIN_HISTORY} rows above the first; or "
        f"flagged between two later rows, in one row or at most {MAX_FLAGGED:.0%} of them. A divergence, which is an error, "
        f"from {MIN_ROWS} rows on: each of the last rows (a quarter, {END_ROWS[0]} to {END_ROWS[1]}) is {DOUBLED:g} times "
        f"the first; or, from {MANY_ROWS} rows on, their median is {END_RISE:.0%} and {END_SIGMAS:g} deviations above the "
        "first, and each is nearer to it than to the first. A rise that came back: within the first half, two rows "
        f"in a row {BUMP:g} times the first, or one {LONE_BUMP:g} times, and {BUMP_SIGMAS:g} deviations above "
        "it, while the second half is nearer to the first row",
        why="The distances adapt to the run: a blend of sources with different losses is given room, and a rare "
        "source is not a spike, nor is one that is read for the first time. The first row is that of the record, after a "
        "resume too, and a single one that noise or a source may make low: the last rows must agree, and must be far above "
        "it. A warm-up moves the loss by less, and so does most of a change of shares; one that moves it by more reads as "
        "a divergence. A first loss of 0 or less has no multiples, and only spikes are looked for.",
        knob="`optimizer.lr`: half; or, for a spike, the batches of that step",
        severity="warning",
        check=check_loss_spikes,
    ),
)
