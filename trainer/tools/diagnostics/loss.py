"""Rules about the loss: divergence and spikes, and values that are not finite."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median

from trainer.tools import limits
from trainer.tools.diagnostics.rule import Knob, Outcome, Series, finding, healthy, lower_lr, not_yet, rule, series
from trainer.tools.runs.load import RunRecord, changes_of
from trainer.wording import counted, number_text

LOSS = "loss"
GRAD_NORM = "grad_norm"
REJECTED = "non_finite_steps"  # steps since the row before


@rule("error", needs=[LOSS])
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


@rule("warning", needs=[LOSS])
def loss_spikes(run: RunRecord) -> Outcome:
    """Spikes of the loss, and losses that end far above where they began."""
    loss = series(run, LOSS)
    diverged = _divergence(run, loss.at(loss.where(math.isfinite)))
    if diverged is not None:
        return diverged
    if len(loss) <= limits.SPIKE_BEFORE:
        return not_yet(f"needs {limits.SPIKE_BEFORE + 1} logged losses, has {len(loss)}")
    hits = find_spikes(loss.values)
    if not hits:
        return healthy(f"no loss rose far above the first, or by {limits.SPIKE_SIGMAS:g} times its noise")
    peak = max(hits, key=loss.values.__getitem__)
    before = [*filter(math.isfinite, loss.values[:peak])][-limits.SPIKE_CENTER :]
    words = f"loss spikes at {counted(len(hits), 'logged step')}, the highest "
    words += f"{number_text(loss.values[peak])} at step {loss.steps[peak]}, after {_level(before)}"
    around = sorted({j for i in hits for j in (i - 1, i) if j >= 0})
    mix, knob = _cause(run, loss, peak)
    return finding(words + mix, loss.evidence(around), knob=knob)


def _cause(run: RunRecord, loss: Series, row: int) -> tuple[str, Knob]:
    """A weight that a resume changed right before a rise in words, or "", and the setting to change."""
    since = min(loss.steps[max(row - limits.SPIKE_CENTER, 0)], loss.steps[row] - limits.MIX_STEPS)
    for restart in reversed(run.restarts):
        step = restart.global_step + 1
        for key, pair in changes_of(restart):
            is_weight = key.startswith("data.source.") and key.endswith(".weight")
            if is_weight and isinstance(pair["before"], int | float) and since < step <= loss.steps[row]:
                condition = "if the new mix should not have a higher loss"
                return f"; the mix changed at step {step}", Knob(key, pair["after"], pair["before"], condition)
    return "", lower_lr(run)


def _divergence(run: RunRecord, loss: Series) -> Outcome | None:
    """The finding on a finite loss whose last rows are all far above its first row.

    A first loss of 0 or less has no multiples: such losses are not judged.
    """
    first, (least, most) = loss.values[:1], limits.END_ROWS
    if len(loss) < limits.DIVERGED_ROWS or first[0] <= 0:
        return None
    last = range(len(loss) - max(least, min(len(loss) // 4, most)), len(loss))
    end = loss.at(last).values
    if min(end) < limits.DOUBLED * first[0] or median(end) - first[0] < limits.MIN_RISE:
        return None
    words = f"the run diverged: its loss began with {number_text(first[0])} at step "
    words += f"{loss.steps[0]} and is {_level(end)} at the end"
    risen = loss.where(lambda value: value >= (first[0] + median(end)) / 2)
    mix, knob = _cause(run, loss, risen[0])
    return finding(words + mix, loss.evidence([0, *last]), knob=knob, severity="error")


def _level(rows: Sequence[float]) -> str:
    """The median of three rows or more, and their deviation."""
    level = f"{number_text(median(rows))} +- {number_text(_noise(rows), 2)}"
    return f"{level} (median and spread of {len(rows)} logged losses)"


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
