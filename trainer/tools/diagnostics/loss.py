"""Rules about the loss: divergence and spikes, and values that are not finite."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice, pairwise
from statistics import median

from trainer.tools.diagnostics.rule import Knob, Outcome, Series, finding, healthy, lower_lr, not_yet, rule, series
from trainer.tools.runs.load import RunRecord, mix_changes
from trainer.wording import counted, number_text

LOSS = "loss"
GRAD_NORM = "grad_norm"
REJECTED = "non_finite_steps"
FLAG = "loss_spike"
FP16_SHARE = 0.02
FP16_FREE = 20
# Of a spike.
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
MIN_RISE = 0.1
MIX_STEPS = 50  # that the average of `train.spike_sigma` spans
# Of a divergence.
MIN_ROWS = 5
END_ROWS = (3, 16)
DOUBLED = 2.0
MANY_ROWS = 17
END_RISE = 0.25
END_SIGMAS = 5.0
# Of a rise that came back.
BUMP = 1.5
LONE_BUMP = 3.0
BUMP_SIGMAS = 10.0


@rule("error", needs=[LOSS], uses=(REJECTED, GRAD_NORM))
def non_finite(run: RunRecord) -> Outcome:
    """Above 0 (fp16: above {FP16_FREE} + {FP16_SHARE:.0%} of the steps).

    Such a step changes no weight: it ends the run, or is skipped (`train.on_non_finite`). fp16 skips some steps until its
    loss scale has settled.
    Change: `optimizer.lr`: half; or the batch that events.jsonl names
    """
    loss, rejected = series(run, LOSS), series(run, REJECTED)
    count, is_fp16 = counted(rejected.total, "step"), run.setting("train.precision") == "fp16"
    if is_fp16 and rejected.total <= FP16_FREE + FP16_SHARE * loss.steps[-1]:
        return healthy(f"{count} skipped, as fp16 loss scaling does")
    bad = [(column, column.where(lambda value: not math.isfinite(value))) for column in (loss, series(run, GRAD_NORM))]
    hits = [(column, where) for column, where in [(rejected, rejected.positive), *bad] if where]
    if not hits:
        return healthy("every logged loss and gradient norm was finite")
    first = min(column.steps[where[0]] for column, where in hits)
    if not rejected.total:
        what = "NaN or infinite values"
    elif is_fp16 or run.setting("train.on_non_finite") == "skip":
        what = f"{count} skipped"
    else:
        what = f"the loss or the gradient of {count} was not finite"
    words = f"{what}, first logged at step {first}{'; events.jsonl names the batches' if run.config else ''}"
    return finding(words, *(column.evidence(where) for column, where in hits), knob=lower_lr(run))


@rule("warning", needs=[LOSS], uses=[FLAG])
def loss_spikes(run: RunRecord) -> Outcome:
    """A spike: above the median of the {CENTER} rows before by each of: {SIGMAS:g} deviations (of second differences),
    {RANGES:g} times the largest such distance in {FAR_WINDOW} rows, {GIVEN_BACK:.0%} of the improvement, {MIN_RISE} nats (as
    for all that follows), and in the first {MIN_HISTORY} rows above the first; or flagged between two later rows, in one row or
    at most {MAX_FLAGGED:.0%} of them. A divergence, which is an error, from {MIN_ROWS} rows on: each of the last rows (a
    quarter, {END_ROWS[0]} to {END_ROWS[1]}) is {DOUBLED:g} times the first; or, from {MANY_ROWS} rows on, their median is
    {END_RISE:.0%} and {END_SIGMAS:g} deviations above the first, and each is nearer to it than to the first. A rise that came
    back: within the first half, two rows in a row {BUMP:g} times the first, or one {LONE_BUMP:g} times, and {BUMP_SIGMAS:g}
    deviations above it, while the second half is nearer to the first row.

    The distances adapt to the run: neither a blend of sources with different losses nor a rare source is a spike. The first
    row, even after a resume, may be low by chance, so the last rows must agree and be far above it. A change of shares that
    moves the loss as far reads as a divergence. With a first loss of 0 or less only spikes count.
    Change: `optimizer.lr`: half; the weight that `train mix` changed before; or, for a spike, the batches of that step
    """
    loss = series(run, LOSS)
    if (diverged := _divergence(run, loss.at(loss.where(math.isfinite)))) is not None:
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
    peak = max(hits, key=loss.values.__getitem__)
    around = sorted({j for i in hits for j in (i - 1, i) if j >= 0})
    words = f"loss spikes at {counted(len(hits), 'logged step')}, the highest {number_text(loss.values[peak])} at step "
    words += f"{loss.steps[peak]}, after {_level([*filter(math.isfinite, loss.values[:peak])][-CENTER:])}{unlogged}"
    mix, knob = _cause(run, loss, peak)
    return finding(words + mix, loss.evidence(around), knob=knob)


def _cause(run: RunRecord, loss: Series, row: int) -> tuple[str, Knob]:
    """What to say of a change of the mix right before a rise (empty: there was none), and what to change."""
    since = min(loss.steps[max(row - CENTER, 0)], loss.steps[row] - MIX_STEPS)
    changes = [change for change in mix_changes(run) if since < change[0] <= loss.steps[row]]
    if not changes:
        return "", lower_lr(run)
    step, key, pair = changes[-1]
    condition = "if the new mix should not have a higher loss"
    return f"; the mix changed at step {step}", Knob(key, pair["after"], pair["before"], condition)


def _divergence(run: RunRecord, loss: Series) -> Outcome | None:
    """The finding on a finite loss that rose above its first row and stayed there, or came back.

    A first loss of 0 or less has no multiples: such losses are not judged.
    """
    if len(loss) < MIN_ROWS or loss.values[0] <= 0:
        return None
    first = f"{number_text(loss.values[0])} at step {loss.steps[0]}"
    if (last := _end_above_first(loss)) is not None:
        words = f"the run diverged: its loss began with {first} and is {_level(loss.at(last).values)} at the end"
        middle = (loss.values[0] + median(loss.at(last).values)) / 2
        mix, knob = _cause(run, loss, loss.where(lambda value: value >= middle)[0])
        return finding(words + mix, loss.evidence(sorted({0, loss.largest()[0], *last})), knob=knob, severity="error")
    if (high := _bump(loss)) is not None:
        top = max(high, key=loss.values.__getitem__)
        words = f"the loss began with {first}, rose to {number_text(loss.values[top])} at step {loss.steps[top]}, "
        words += f"and came back to {_level(loss.values[len(loss) // 2 :])}"
        mix, knob = _cause(run, loss, high[0])
        shown = loss.evidence(sorted({0, *high, len(loss) - 1}))
        return finding(words + mix, shown, knob=knob, severity="warning")
    return None


def _level(rows: Sequence[float]) -> str:
    """The median of three rows or more, and their deviation."""
    return f"{number_text(median(rows))} +- {number_text(_noise(rows), 2)} (median and spread of {len(rows)} logged losses)"


def _end_above_first(loss: Series) -> range | None:
    """The last rows if the run ended above its first row (see the condition of the rule); None: it did not."""
    first, (least, most) = loss.values[0], END_ROWS
    start = len(loss) - max(least, min(len(loss) // 4, most))
    last = loss.values[start:]
    end, lowest = median(last), min(last)
    rise = end - first
    has_doubled = lowest >= DOUBLED * first
    is_beyond_noise = (
        len(loss) >= MANY_ROWS
        and rise >= END_RISE * first
        and rise > END_SIGMAS * _noise(loss.values[-2 * most :])
        and lowest - first > end - lowest
    )
    if rise < MIN_RISE or not (has_doubled or is_beyond_noise):
        return None
    return range(start, len(loss))


def _bump(loss: Series) -> list[int] | None:
    """The high rows of the first half if the loss rose far above the first row and came back; None: it did not."""
    first, half = loss.values[0], len(loss) // 2
    before, after = loss.values[:half], loss.values[half:]
    peak = max(before)
    is_high = [value > BUMP * first for value in before]
    lasts = any(a and b for a, b in pairwise(is_high))
    is_far = peak - first > max(MIN_RISE, BUMP_SIGMAS * _noise(after)) and (lasts or peak > LONE_BUMP * first)
    if not is_far or max(after) - first >= peak - max(after):
        return None
    return [index for index, high in enumerate(is_high) if high]


def _noise(values: Iterable[float]) -> float:
    """Robust deviation of three values or more from second differences, which ignore a falling loss; theirs is sqrt(6) times
    that of a value, and 1.4826 times their median size.
    """
    listed = list(values)
    bends = (abs(a - 2 * b + c) for a, b, c in zip(listed, listed[1:], listed[2:], strict=False))
    return 1.4826 * median(bends) / math.sqrt(6)


def find_spikes(values: Iterable[float]) -> list[int]:
    """Indices of values that rise above the noise of the run; see the condition of the rule.

    The first batches of a source, or of a hard document, are as bad as those of the untrained model: until `MIN_HISTORY`
    values may have shown such, only what is worse than the first value counts.
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
            and distance > SIGMAS * _noise(before)
        )
        in_a_row = in_a_row + 1 if is_spike else 0
        if is_spike:
            found.append(index)
        if is_spike and in_a_row < NEW_LEVEL:
            continue  # A spike says nothing about the noise, unless it lasts: then it is the new level.
        before.append(value)
        distances.append(distance)
    return found


RULES = (non_finite, loss_spikes)
