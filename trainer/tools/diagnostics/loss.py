"""Rules about the loss: divergence and spikes, and values that are not finite."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median

from trainer.tools import limits
from trainer.tools.diagnostics.facts import Knob, Series, lower_lr, series
from trainer.tools.diagnostics.rule import Outcome, finding, healthy, not_yet, rule
from trainer.tools.runs.load import RunRecord, mix_changes
from trainer.wording import counted, number_text

LOSS = "loss"
GRAD_NORM = "grad_norm"
REJECTED = "non_finite_steps"  # steps since the row before
FLAG = "loss_spike"  # 1 if a step since the row before was flagged


@rule("error", needs=[LOSS], uses=(REJECTED, GRAD_NORM))
def non_finite(run: RunRecord) -> Outcome:
    """Steps whose loss or gradient was not finite."""
    loss, rejected = series(run, LOSS), series(run, REJECTED)
    count, is_fp16 = counted(rejected.total, "step"), run.setting("train.precision") == "fp16"
    if is_fp16 and rejected.total <= limits.FP16_STEPS + limits.FP16_SHARE * loss.steps[-1]:
        return healthy(f"{count} skipped, as fp16 loss scaling does")
    bad = [rejected.evidence(rejected.positive)]
    bad += [each.evidence(each.where(_is_not_finite)) for each in (loss, series(run, GRAD_NORM))]
    shown = [evidence for evidence in bad if evidence.steps]
    if not shown:
        return healthy("every logged loss and gradient norm was finite")
    what = f"the loss or the gradient of {count} was not finite"
    if not rejected.total:
        what = "NaN or infinite values"
    elif is_fp16 or run.setting("train.on_non_finite") == "skip":
        what = f"{count} skipped"
    words = f"{what}, first logged at step {min(evidence.steps[0] for evidence in shown)}"
    if run.config:  # other loops write no events
        words += "; events.jsonl names the batches"
    return finding(words, *shown, knob=lower_lr(run))


def _is_not_finite(value: float) -> bool:
    return not math.isfinite(value)


@rule("warning", needs=[LOSS], uses=[FLAG])
def loss_spikes(run: RunRecord) -> Outcome:
    """Spikes of the loss, and losses that end above where they began."""
    loss = series(run, LOSS)
    diverged = _divergence(run, loss.at(loss.where(math.isfinite)))
    if diverged is not None:
        return diverged
    flagged = _flagged(loss, series(run, FLAG))
    if len(loss) <= limits.SPIKE_BEFORE and not flagged:
        return not_yet(f"needs {limits.SPIKE_BEFORE + 1} logged losses, has {len(loss)}")
    late = [index for index, step in enumerate(loss.steps) if step in flagged]
    hits = sorted({*find_spikes(loss.values), *late})
    if not hits:
        return healthy(f"no loss rose far above the first, or by {limits.SPIKE_SIGMAS:g} times its noise")
    peak = max(hits, key=loss.values.__getitem__)
    before = [*filter(math.isfinite, loss.values[:peak])][-limits.SPIKE_CENTER :]
    words = f"loss spikes at {counted(len(hits), 'logged step')}, the highest "
    words += f"{number_text(loss.values[peak])} at step {loss.steps[peak]}, after {_level(before)}"
    if flagged:
        words += f"; {len(flagged)} flagged between two rows, see events.jsonl"
    around = sorted({j for i in hits for j in (i - 1, i) if j >= 0})
    mix, knob = _cause(run, loss, peak)
    return finding(words + mix, loss.evidence(around), knob=knob)


def _flagged(loss: Series, flags: Series) -> set[int]:
    """The steps of late rows that were flagged since the row before.

    The flag compares with an average and a deviation alone. Where every step is logged, the rows
    say more; and flags that return are a source whose losses differ.
    """
    before = dict(zip(loss.steps, [0, *loss.steps], strict=False))
    flagged = {step for step in flags.at(flags.positive).steps if step - before.get(step, step) > 1}
    if len(flagged) > max(1, limits.MAX_FLAGGED * len(flags)):
        return set()
    return flagged & {*loss.steps[limits.SPIKE_HISTORY :]}


def _cause(run: RunRecord, loss: Series, row: int) -> tuple[str, Knob]:
    """A change of the mix right before a rise in words, or "", and the setting to change."""
    since = min(loss.steps[max(row - limits.SPIKE_CENTER, 0)], loss.steps[row] - limits.MIX_STEPS)
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
    if len(loss) < limits.DIVERGED_ROWS or loss.values[0] <= 0:
        return None
    first = f"{number_text(loss.values[0])} at step {loss.steps[0]}"
    last = _end_above_first(loss)
    if last is not None:
        level = _level(loss.at(last).values)
        words = f"the run diverged: its loss began with {first} and is {level} at the end"
        middle = (loss.values[0] + median(loss.at(last).values)) / 2
        mix, knob = _cause(run, loss, loss.where(lambda value: value >= middle)[0])
        shown = loss.evidence(sorted({0, loss.largest()[0], *last}))
        return finding(words + mix, shown, knob=knob, severity="error")
    high = _bump(loss)
    if high is None:
        return None
    top = max(high, key=loss.values.__getitem__)
    words = f"the loss began with {first}, rose to {number_text(loss.values[top])} at step "
    words += f"{loss.steps[top]}, and came back to {_level(loss.values[len(loss) // 2 :])}"
    mix, knob = _cause(run, loss, high[0])
    shown = loss.evidence(sorted({0, *high, len(loss) - 1}))
    return finding(words + mix, shown, knob=knob, severity="warning")


def _level(rows: Sequence[float]) -> str:
    """The median of three rows or more, and their deviation."""
    level = f"{number_text(median(rows))} +- {number_text(_noise(rows), 2)}"
    return f"{level} (median and spread of {len(rows)} logged losses)"


def _end_above_first(loss: Series) -> range | None:
    """The last rows, if the run ended above its first row (see the condition of the rule)."""
    first, (least, most) = loss.values[0], limits.END_ROWS
    start = len(loss) - max(least, min(len(loss) // 4, most))
    last = loss.values[start:]
    end, lowest = median(last), min(last)
    rise = end - first
    has_doubled = lowest >= limits.DOUBLED * first
    is_beyond_noise = (
        len(loss) >= limits.MANY_ROWS
        and rise >= limits.END_RISE * first
        and rise > limits.END_SIGMAS * _noise(loss.values[-2 * most :])
        and lowest - first > end - lowest
    )
    if rise < limits.MIN_RISE or not (has_doubled or is_beyond_noise):
        return None
    return range(start, len(loss))


def _bump(loss: Series) -> list[int] | None:
    """The high rows of the first half, if the loss rose far above the first row and came back."""
    first, half = loss.values[0], len(loss) // 2
    before, after = loss.values[:half], loss.values[half:]
    peak = max(before)
    is_high = [value > limits.BUMP * first for value in before]
    lasts = any(a and b for a, b in pairwise(is_high))
    is_beyond_noise = peak - first > max(limits.MIN_RISE, limits.BUMP_SIGMAS * _noise(after))
    came_back = max(after) - first < peak - max(after)
    if is_beyond_noise and came_back and (lasts or peak > limits.LONE_BUMP * first):
        return [index for index, high in enumerate(is_high) if high]
    return None


def _noise(values: Iterable[float]) -> float:
    """Robust deviation of three values or more from second differences, which ignore a falling
    loss; theirs is sqrt(6) times that of a value, and 1.4826 times their median size.
    """
    listed = list(values)
    bends = (abs(a - 2 * b + c) for a, b, c in zip(listed, listed[1:], listed[2:], strict=False))
    return 1.4826 * median(bends) / math.sqrt(6)


def find_spikes(values: Iterable[float]) -> list[int]:
    """Indices of values that rise above the noise of the run; see the condition of the rule.

    The first batches of a source, or of a hard document, are as bad as those of the untrained
    model: until `SPIKE_HISTORY` values may have shown such, only one above the first counts.
    """
    before: deque[float] = deque(maxlen=limits.SPIKE_WINDOW)
    distances: deque[float] = deque(maxlen=limits.SPIKE_FAR_WINDOW)
    found: list[int] = []
    first, in_a_row = math.nan, 0
    for index, value in enumerate(values):
        if not math.isfinite(value):
            continue
        if math.isnan(first):
            first = value
        center = median([*before][-limits.SPIKE_CENTER :] or [value])
        distance = value - center
        given_back = limits.SPIKE_GIVEN_BACK * (first - center)
        is_spike = (
            len(before) >= limits.SPIKE_BEFORE
            and (index >= limits.SPIKE_HISTORY or value > first)
            and distance > max(limits.MIN_RISE, limits.SPIKE_RANGES * max(distances), given_back)
            and distance > limits.SPIKE_SIGMAS * _noise(before)
        )
        if is_spike:
            found.append(index)
            in_a_row += 1
        else:
            in_a_row = 0
        # A spike says nothing about the noise, unless it lasts: then it is the new level.
        if 0 < in_a_row < limits.NEW_LEVEL:
            continue
        before.append(value)
        distances.append(distance)
    return found


RULES = (non_finite, loss_spikes)
