"""Rules about training: spikes and divergence of the loss, values that are not finite, repeated
data, and the batch size next to the noise scale."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median

from trainer.tools import limits
from trainer.tools.diagnostics.rule import (
    Knob,
    Outcome,
    Series,
    aligned,
    finding,
    has_full_rows,
    healthy,
    lower_lr,
    micro_batches,
    not_measured,
    not_yet,
    rule,
    series,
)
from trainer.tools.runs.load import RunRecord
from trainer.tools.runs.readings import B_BIG, B_NOW, NoiseScale, noise_scale_of, number_text
from trainer.wording import counted

CONSISTENCY = "gns/consistency"  # noise between ranks over that within them
B_SMALL = "gns/b_small"  # sequences of a micro-batch
TR_SIGMA = "gns/tr_sigma"  # noise: trace of the covariance of a sequence's gradient
GRAD_SQ = "gns/grad_sq"  # signal: squared norm of the true gradient
HINT = "that takes gns.enabled = true and at least two micro-batches per step over all ranks, of different documents"


@rule("error", needs=(TR_SIGMA, GRAD_SQ, B_BIG), hint=HINT)
def repeated_data(run: RunRecord) -> Outcome:
    """Ranks or micro-batches whose gradients are too much alike, or differ too much."""
    noise, signal, batch = aligned(*(series(run, key) for key in (TR_SIGMA, GRAD_SQ, B_BIG)))
    if not noise:
        return not_yet("no row has a noise scale yet")
    last = noise.steps[-1]
    other_data = Knob("data.source", None, "data of its own for every micro-batch", in_words=True)
    if noise.values[-1] == signal.values[-1] == 0.0:
        return not_measured("the gradient is 0")
    words = f"(noise {number_text(noise.values[-1])} at step {last:,})"
    if abs(noise.values[-1]) <= limits.ROUNDING * batch.values[-1] * abs(signal.values[-1]):
        words = f"all micro-batches of a step have the same gradient {words}: they are the same data"
        return finding(words, noise.evidence([len(noise) - 1]), knob=other_data)
    ratio, error = aligned(series(run, CONSISTENCY).since(last), series(run, f"{CONSISTENCY}_se"))
    if not ratio:
        # With one micro-batch per rank, the noise between micro-batches is the noise between ranks.
        per_micro = series(run, B_SMALL).values
        is_one_each = per_micro and batch.values[-1] < 1.5 * (run.world_size or 1) * per_micro[-1]
        if run.world_size == 1 or is_one_each:
            return healthy(f"the micro-batches of a step differ {words}")
        # Sharded ranks never have it: no further step would help.
        needed = f"ranks of several micro-batches need {CONSISTENCY}"
        if last >= limits.NOISE_STEPS:
            return not_measured(needed)
        return not_yet(needed)
    value, evidence = ratio.values[-1], ratio.evidence([len(ratio) - 1])
    within = limits.CONSISTENCY_ERRORS * error.values[-1]
    parts = "the two halves of a step" if run.world_size == 1 else "ranks"
    times = f"{number_text(max(value, 0.0), 3)} times as much as independent data explains"
    words = f"the gradients of {parts} differ {times}"
    if value + within < limits.SAME_DATA:
        words += ": they read the same data, so the batch is smaller than it seems"
        return finding(words, evidence, knob=other_data)
    is_own = any("target" in table for table in run.setting("data.source", []))
    if abs(value - 1.0) > within and has_full_rows(run) and not is_own:
        words += ": the rows of a step are not independent, and the noise scale is wrong"
        knob = Knob("data.source", None, "more and shorter documents (train check: what limits lanes)", in_words=True)
        return finding(words, evidence, severity="warning", knob=knob)
    # The trainer measures before it clips, and repeats nothing: only other loops can do this.
    if value - within > limits.TOO_DIFFERENT and not run.config:
        words += ": gradients were clipped or scaled before they were measured, "
        words += "or ranks read data of different kinds"
        return finding(words, evidence, severity="warning")
    return healthy(words)


@rule("advice", needs=[B_BIG], hint=HINT)
def batch_size(run: RunRecord) -> Outcome:
    """A batch that is far from the noise scale of the gradient."""
    if repeated_data.apply(run).verdict == "finding":
        return Outcome("explained", "the noise scale cannot be trusted: see repeated_data")
    scale = noise_scale_of(run)
    if scale is None or not scale.is_known:
        return not_yet("the noise scale is not known yet")
    if scale.is_high:
        return not_measured(f"the noise scale is {scale.number}: it takes more documents")
    if scale.steps < limits.NOISE_STEPS:
        return not_yet(f"needs a noise scale from {limits.NOISE_STEPS} steps, has one from {scale.steps}")
    words = f"{number_text(scale.batch)} sequences per step, "
    words += f"noise scale {scale.number} ({scale.where})"
    keys = (f"{B_NOW}_low", B_NOW, f"{B_NOW}_high", B_BIG)
    shown = [row.evidence() for key in keys if (row := series(run, key).since(scale.step))]
    # A lower bound is enough for "too small". The other two verdicts need an upper bound.
    if scale.batch < limits.SMALL_BATCH * scale.low:
        words = f"the batch is too small: {words}; a larger batch takes fewer steps and hardly more tokens"
        return finding(words, *shown, knob=_towards(run, scale))
    if scale.high is None:
        return not_yet(f"the noise scale has no upper bound: {words}")
    if scale.batch > limits.WASTEFUL_BATCH * scale.high:
        words = f"the batch is wasteful: {words}; a smaller batch reaches the same loss with fewer tokens"
        return finding(words, *shown, knob=_towards(run, scale))
    return healthy(f"the batch is neither too small nor wasteful: {words}")


def _towards(run: RunRecord, scale: NoiseScale) -> Knob | None:
    """Towards the noise scale, at most tenfold up or down.

    None in other loops, and where a rank's only sequence per step is too many.
    """
    if not run.config:
        return None
    # A noise scale is an order of magnitude: no step beyond ten is suggested at once.
    middle = scale.low if scale.value is None else scale.value
    factor = min(max(middle / scale.batch, limits.SMALL_BATCH), 1 / limits.SMALL_BATCH)
    micros, size = micro_batches(run, since=scale.step), run.setting("data.mixing.batch_size")
    if factor > 1 or micros > 1:
        return Knob("train.micro_batches", micros, max(round(micros * factor), 1))
    # One micro-batch cannot be fewer: its rows can, where no source has its own.
    owns = (each.get("target") or each.get("mixing") for each in run.setting("data.source", []))
    if isinstance(size, int) and size > 1 and not any(owns):
        return Knob("data.mixing.batch_size", size, max(round(size * factor), 1))
    return None


# ---- The loss

LOSS = "loss"
GRAD_NORM = "grad_norm"
REJECTED = "non_finite_steps"  # steps since the row before


@rule("error", needs=[LOSS])
def non_finite(run: RunRecord) -> Outcome:
    """Steps whose loss or gradient, and evaluations whose loss, was not finite."""
    rejected = series(run, REJECTED)
    evaluated = [Series(key, *run.evals.column(key)) for key in run.evals.keys if key.endswith("loss")]
    found = [series(run, LOSS), series(run, GRAD_NORM), *evaluated]
    bad = [rejected.evidence(rejected.positive)]
    bad += [each.evidence(each.where(lambda x: not math.isfinite(x))) for each in found]
    shown = [evidence for evidence in bad if evidence.steps]
    if not shown:
        return healthy("every logged loss and gradient norm was finite")
    what = f"the loss or the gradient of {counted(rejected.total, 'step')} was not finite"
    if not rejected.total:
        what = "NaN or infinite values"
    first = min(each.steps[0] for each in [each for each in bad[:3] if each.steps] or shown)
    words = f"{what}, first logged at step {first}"
    if run.config and rejected.total:  # other loops write no events
        words += "; events.jsonl names the batches"
    return finding(words, *shown, knob=lower_lr(run, first))


@rule("warning", needs=[LOSS])
def loss_spikes(run: RunRecord) -> Outcome:
    """Spikes of the loss, and losses that end far above where they began."""
    logged = series(run, LOSS)
    loss = logged.at(logged.where(math.isfinite))
    # Nats; a loss of one's own may have any scale.
    least_rise = 0.0 if run.setting("objective.target") else limits.MIN_RISE
    diverged = _divergence(run, loss, least_rise)
    if diverged is not None:
        return diverged
    if len(loss) <= limits.SPIKE_BEFORE:
        return not_yet(f"needs {limits.SPIKE_BEFORE + 1} logged losses, has {len(loss)} finite")
    hits = find_spikes(loss.values, least_rise)
    if not hits:
        end = ", and the end is not far above the first row" * (loss.values[0] > 0)
        return healthy(f"no spike behind row {limits.SPIKE_BEFORE}{end}")
    peak = max(hits, key=loss.values.__getitem__)
    before = [loss.values[at] for at in range(peak) if at not in hits][-limits.SPIKE_CENTER :]
    words = f"loss spikes at {counted(len(hits), 'logged step')}, the highest "
    words += f"{number_text(loss.values[peak])} at step {loss.steps[peak]}, after {_level(before)}"
    return finding(words, loss.evidence(hits), knob=lower_lr(run))


def _divergence(run: RunRecord, loss: Series, least_rise: float) -> Outcome | None:
    """The finding on a finite loss whose last rows are all far above its first row.

    A first loss of 0 or less has no multiples: such losses are not judged.
    """
    first, (least, most) = loss.values[:1], limits.END_ROWS
    if len(loss) < limits.DIVERGED_ROWS or first[0] <= 0:
        return None
    last = range(len(loss) - max(least, min(len(loss) // 4, most)), len(loss))
    end = loss.at(last).values
    if min(end) < limits.DOUBLED * first[0] or median(end) - first[0] < least_rise:
        return None
    words = f"the run diverged: its loss began with {number_text(first[0])} at step "
    words += f"{loss.steps[0]} and is {_level(end)} at the end"
    return finding(words, loss.evidence([0, *last]), knob=lower_lr(run), severity="error")


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


def find_spikes(values: Sequence[float], least_rise: float) -> list[int]:
    """Indices of finite values that rise above the noise of the run; see the condition of the rule.

    The first batches of a source, or of a hard document, are as bad as those of the untrained
    model: until `SPIKE_HISTORY` values may have shown such, only one above the first counts.
    """
    before: deque[float] = deque(maxlen=limits.SPIKE_WINDOW)
    distances: deque[float] = deque(maxlen=limits.SPIKE_FAR_WINDOW)
    found: list[int] = []
    in_a_row = 0
    for index, value in enumerate(values):
        center = median([*before][-limits.SPIKE_CENTER :] or [value])
        distance = value - center
        given_back = limits.SPIKE_GIVEN_BACK * (values[0] - center)
        is_spike = (
            len(before) >= limits.SPIKE_BEFORE
            and (index >= limits.SPIKE_HISTORY or value > values[0])
            and distance > max(least_rise, limits.SPIKE_RANGES * max(distances), given_back)
            and distance > limits.SPIKE_SIGMAS * _noise(before)
        )
        found += [index] * is_spike
        in_a_row = (in_a_row + 1) * is_spike
        # A spike says nothing about the noise, unless it lasts: then it is the new level.
        if 0 < in_a_row < limits.NEW_LEVEL:
            continue
        before.append(value)
        distances.append(distance)
    return found


RULES = (repeated_data, batch_size, non_finite, loss_spikes)
