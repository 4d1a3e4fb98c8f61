"""Rules about gradients: the batch size next to the noise scale, and repeated data."""

from __future__ import annotations

from trainer.tools import limits
from trainer.tools.diagnostics.rule import (
    MICRO_BATCHES,
    Knob,
    Outcome,
    aligned,
    explained,
    finding,
    has_full_rows,
    healthy,
    micro_batches,
    not_measured,
    not_yet,
    ranks,
    rule,
    series,
    sources,
)
from trainer.tools.runs.load import RunRecord
from trainer.tools.runs.noise_scale import B_BIG, NoiseScale, noise_scale_of, why_unknown
from trainer.wording import counted, number_text

CONSISTENCY = "gns/consistency"  # noise between ranks over that within them
B_SMALL = "gns/b_small"  # sequences of a micro-batch
TR_SIGMA = "gns/tr_sigma"  # noise: trace of the covariance of a sequence's gradient
GRAD_SQ = "gns/grad_sq"  # signal: squared norm of the true gradient
LEFT_OUT = "gns/left_out"  # steps that a document is in twice
HINT = "that takes gns.enabled = true and at least two micro-batches per step over all ranks"


@rule("error", needs=(TR_SIGMA, GRAD_SQ, B_BIG), hint=HINT)
def repeated_data(run: RunRecord) -> Outcome:
    """Ranks or micro-batches whose gradients are too much alike, or differ too much."""
    noise, signal, batch = aligned(*(series(run, key) for key in (TR_SIGMA, GRAD_SQ, B_BIG)))
    if not noise:
        return not_yet("no row has a noise scale yet")
    last = noise.steps[-1]
    other_data = Knob("data.source", None, "a part of its own for every rank")
    if noise.values[-1] == signal.values[-1] == 0.0:
        return not_measured("the gradient is 0")
    words = f"(noise {number_text(noise.values[-1])} at step {last:,})"
    if abs(noise.values[-1]) <= limits.ROUNDING * batch.values[-1] * abs(signal.values[-1]):
        words = f"all micro-batches of a step have the same gradient {words}: they are the same data"
        return finding(words, noise.evidence([len(noise) - 1]), knob=other_data)
    ratio, error = aligned(series(run, CONSISTENCY), series(run, f"{CONSISTENCY}_se"))
    if not ratio:
        # With one micro-batch per rank, the noise between micro-batches is the noise between ranks.
        per_micro = series(run, B_SMALL).values
        is_one_each = per_micro and batch.values[-1] < 1.5 * ranks(run) * per_micro[-1]
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
    is_own = any("target" in table for table in sources(run))
    if abs(value - 1.0) > within and has_full_rows(run) and not is_own:
        words += ": the rows of a step are not independent, and the noise scale is wrong"
        return finding(words, evidence, severity="warning", knob=_towards_independence(run))
    # The trainer measures before it clips, and repeats nothing: only other loops can do this.
    if value - within > limits.TOO_DIFFERENT and not run.config:
        words += ": gradients were clipped or scaled before they were measured, "
        words += "or ranks read data of different kinds"
        return finding(words, evidence, severity="warning")
    return healthy(words)


def _towards_independence(run: RunRecord) -> Knob:
    """More open files, or a larger spread."""
    if run.setting("data.mixing.num_streams_mixed"):
        return Knob.of(run, "data.mixing.num_streams_mixed", 0)
    return Knob.of(run, "data.mixing.spread", "larger, or more and shorter documents")


@rule("advice", needs=[B_BIG], hint=HINT)
def batch_size(run: RunRecord) -> Outcome:
    """A batch that is far from the noise scale of the gradient."""
    if repeated_data.apply(run).verdict == "finding":
        return explained("the rows of a step are not independent: see repeated_data")
    scale = noise_scale_of(run)
    if scale is not None and scale.is_high:
        return not_measured(f"the noise scale is {scale.number}: it takes more documents")
    if scale is None or not scale.is_known:
        return not_yet(f"the noise scale is {why_unknown(run)}")
    if scale.steps is not None and scale.steps < limits.NOISE_STEPS:
        return not_yet(f"needs a noise scale from {limits.NOISE_STEPS} steps, has one from {scale.steps}")
    words = f"{number_text(scale.batch)} sequences per step, "
    words += f"noise scale {scale.number} ({scale.where})"
    half = scale.step // 2
    left_out = series(run, LEFT_OUT).since(half + 1).total
    if left_out > half / 2:
        text = f"{left_out:,.0f} of the last {half:,} steps were left out, since two of their micro-batches read one document"
        return not_measured(f"{text}: it takes more documents; {words}")
    keys = (f"{scale.key}_low", scale.key, f"{scale.key}_high", B_BIG)
    rows = [series(run, key).since(scale.step) for key in keys]
    shown = [row.evidence() for row in rows if row]
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
    """Towards the noise scale, at most tenfold; None where a rank has one sequence per step."""
    # A noise scale is an order of magnitude: no step beyond ten is suggested at once.
    middle = scale.low if scale.value is None else scale.value
    factor = min(middle / scale.batch, 1 / limits.SMALL_BATCH)
    if not run.config and not series(run, MICRO_BATCHES):
        wanted = counted(max(round(scale.batch * factor), 1), "sequence")
        return Knob("train.micro_batches", None, f"as many as give {wanted} per step")
    micros, size = micro_batches(run, since=scale.step), run.setting("data.mixing.batch_size")
    if factor > 1 or micros > 1:
        least = micros + 1 if factor > 1 else 1
        return Knob("train.micro_batches", micros, max(round(micros * factor), least))
    # One micro-batch cannot be fewer: its rows can.
    if not isinstance(size, int):
        return Knob("data.mixing.batch_size", size, "smaller")
    if size <= 1:
        return None
    return Knob("data.mixing.batch_size", size, max(round(size * factor), 1))


RULES = (repeated_data, batch_size)
