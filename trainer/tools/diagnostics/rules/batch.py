"""Rules about the batch: its size beside the gradient noise scale, and whether its parts are different data at all."""

from __future__ import annotations

from trainer.tools.diagnostics.facts import MICRO_BATCHES, micro_batches
from trainer.tools.diagnostics.outcome import Knob, Outcome, explained, finding, healthy, not_measured, not_yet
from trainer.tools.diagnostics.rules.rule import Rule
from trainer.tools.diagnostics.series import Series, aligned, series
from trainer.tools.runs.load import RunRecord
from trainer.tools.runs.noise_scale import B_BIG, NoiseScale, noise_scale_of, why_unknown
from trainer.wording import counted, number_text

TOO_SMALL = 0.1
WASTEFUL = 4.0
MIN_STEPS = 20  # fewer say more about the first steps than about the batch
CONSISTENCY = "gns/consistency"
B_SMALL = "gns/b_small"
DRAWN = "gns/b_drawn"
TR_SIGMA = "gns/tr_sigma"
GRAD_SQ = "gns/grad_sq"
INCONSISTENT = 0.2  # relative error of the noise scale that is worth a word
SIGMAS = 3.0
SMALLEST = 0.01  # of a consistency, which may be negative by chance
SAME_DATA = 0.02  # of a consistency: ranks that read slices of one stream still differ by their rows
TOO_DIFFERENT = 2.0  # the same, of loops that may do anything with the gradient
# Of the squared gradient: what rounding leaves of the noise of a step whose micro-batches are equal.
ROUNDING = 1e-6


def check_batch_size(run: RunRecord) -> Outcome:
    """Whether the batch is surely too small or surely wasteful at the end of the run.

    A lower bound is enough for "too small". The other two verdicts need an upper bound.
    """
    if all(run.column(key)[0] for key in (TR_SIGMA, GRAD_SQ)) and check_repeated_data(run).verdict == "finding":
        return explained("what is the same data on several ranks has no noise scale: see repeated_data")
    scale = noise_scale_of(run)
    if scale is None or not scale.is_known:
        return not_yet(f"the noise scale is {why_unknown(run)}")
    if scale.steps is not None and scale.steps < MIN_STEPS:
        return not_yet(f"needs a noise scale from {MIN_STEPS} steps, has one from {scale.steps}")
    words = (
        f"{number_text(scale.batch)} sequences per step, noise scale {scale.number} ({scale.where}){_doubt(run, scale)}"
    )
    evidence = [_row(run, key, scale) for key in (f"{scale.key}_low", scale.key, f"{scale.key}_high", B_BIG)]
    shown = [row.evidence() for row in evidence if len(row)]
    if scale.batch < TOO_SMALL * scale.low:
        return finding(
            f"the batch is too small: {words}; a larger batch takes fewer steps and hardly more tokens",
            evidence=shown,
            knob=_larger(run, scale),
        )
    if scale.high is not None and scale.batch > WASTEFUL * scale.high:
        return finding(
            f"the batch is wasteful: {words}; a smaller batch reaches the same loss with fewer tokens",
            evidence=shown,
            knob=_smaller(run, scale),
        )
    if scale.high is None:
        return not_yet(f"the noise scale has no upper bound: {words}")
    ends = number_text(TOO_SMALL * scale.low, 3), number_text(WASTEFUL * scale.high, 3)
    return healthy(f"the batch is neither too small nor wasteful: {words}; {ends[0]} to {ends[1]} are neither")


def check_repeated_data(run: RunRecord) -> Outcome:
    """Ranks or micro-batches with the same gradients, which come from the same data."""
    noise, signal, batch = aligned(*(series(run, key) for key in (TR_SIGMA, GRAD_SQ, B_BIG)))
    if not noise:
        return not_yet("no row has a noise scale yet")
    last = noise.steps[-1]
    if noise.values[-1] == signal.values[-1] == 0.0:
        return not_measured("the gradient is 0")
    if abs(noise.values[-1]) <= ROUNDING * batch.values[-1] * abs(signal.values[-1]):
        return finding(
            f"all micro-batches of a step have the same gradient (noise {number_text(noise.values[-1])} at step {last:,}): "
            "they are the same data, and no noise scale can be measured",
            evidence=[noise.evidence([len(noise) - 1])],
            knob=_other_data(run),
        )
    ratio, error = aligned(series(run, CONSISTENCY), series(run, f"{CONSISTENCY}_se"))
    if not ratio:
        per_micro = series(run, B_SMALL).values
        one_each = run.world_size is not None and per_micro and batch.values[-1] / per_micro[-1] < 1.5 * run.world_size
        if run.world_size != 1 and not one_each:
            judged = not_yet if last < MIN_STEPS else not_measured  # sharded ranks and burn-in never have it
            return judged(f"ranks of several micro-batches need {CONSISTENCY}")
        return healthy(f"the micro-batches of a step differ (noise {number_text(noise.values[-1])} at step {last:,})")
    value, within = ratio.values[-1], SIGMAS * error.values[-1]
    parts = {None: "ranks, or the halves of a step on one,", 1: "the two halves of each step"}.get(
        run.world_size, "ranks"
    )
    shown, where = number_text(max(value, 0.0), 3), f"step {ratio.steps[-1]:,}"
    words, evidence = (
        f"the noise between {parts} is {shown} of that within them ({where})",
        [ratio.evidence([len(ratio) - 1])],
    )
    if value + within < SAME_DATA:
        text = f"{words}: they read the same data, and the noise scale and every mean over the step count them as new"
        return finding(text, evidence=evidence, knob=_other_data(run))
    if value - within > TOO_DIFFERENT and not run.config:  # the trainer measures before it clips, and repeats nothing
        text = (
            f"{words}: gradients were clipped or scaled before they were measured, micro-batches repeat, or ranks read data "
            "of different kinds; the noise scale is wrong"
        )
        return finding(text, evidence=evidence, severity="warning")
    return healthy(words)


def _other_data(run: RunRecord) -> Knob:
    return Knob("data.source", None, "a part of its own for every rank")


def _larger(run: RunRecord, scale: NoiseScale) -> Knob:
    """Towards the noise scale, at most `1 / TOO_SMALL` times as large."""
    factor = min(_aim(scale) / scale.batch, 1 / TOO_SMALL)
    if not _knows_micro_batches(run):
        return _any_micro_batches(scale, factor)
    micros = micro_batches(run, since=scale.step)
    more = max(round(micros * factor), micros + 1)
    return Knob("train.micro_batches", micros, more if _is_constant(run) else f"a schedule that reaches {more}")


def _smaller(run: RunRecord, scale: NoiseScale) -> Knob | None:
    """Towards the noise scale; None where a rank has one sequence of one micro-batch."""
    factor = _aim(scale) / scale.batch
    if not _knows_micro_batches(run):
        return _any_micro_batches(scale, factor)
    micros = micro_batches(run, since=scale.step)
    key = "train.micro_batches" if micros > 1 else "data.mixing.batch_size"
    current = micros if micros > 1 else run.setting(key)
    if current == 1:
        return None
    suggested = max(round(current * factor), 1) if isinstance(current, int) else "smaller"
    if not _is_constant(run) and micros > 1:
        suggested = f"a schedule that ends at {suggested}"
    return Knob(key, current, suggested)


def _aim(scale: NoiseScale) -> float:
    return scale.low if scale.value is None else scale.value


def _is_constant(run: RunRecord) -> bool:
    return isinstance(run.setting("train.micro_batches", 1), int)


def _knows_micro_batches(run: RunRecord) -> bool:
    return bool(run.config) or bool(series(run, MICRO_BATCHES))


def _any_micro_batches(scale: NoiseScale, factor: float) -> Knob:
    """For a loop that does not log its micro-batches per step, in sequences per step."""
    wanted = counted(max(round(scale.batch * factor), 1), "sequence")
    return Knob("train.micro_batches", None, f"as many as give {wanted} per step")


def _row(run: RunRecord, key: str, scale: NoiseScale) -> Series:
    column = series(run, key)
    return column.at(index for index, step in enumerate(column.steps) if step == scale.step)


def _doubt(run: RunRecord, scale: NoiseScale) -> str:
    """What is to be said if the rows of a step visibly depend on each other, and the noise scale does not know it."""
    value, error = (_row(run, key, scale).values for key in (CONSISTENCY, f"{CONSISTENCY}_se"))
    if scale.key == DRAWN or not value or not error:
        return ""
    # Noise that micro-batches share passes for signal: a share of 1 - 1 / consistency of the noise, which is B / batch of the
    # signal in a step's gradient.
    known = scale.low if scale.value is None else scale.value
    shift = abs(1.0 / max(value[0], SMALLEST) - 1.0) * max(known / scale.batch, 1.0)
    if shift < INCONSISTENT or abs(value[0] - 1.0) < SIGMAS * error[0]:
        return ""
    drawn = _row(run, f"{DRAWN}_low", scale).values
    if drawn:
        more = f": {DRAWN}, which does not, is at least {number_text(drawn[0])} so far"
    else:
        is_off = run.config and not run.setting("gns.components_every")
        more = ": gns.components_every measures what that does" if is_off else ""
    return f", which takes micro-batches for independent, and they are not (consistency {number_text(value[0])}){more}"


RULES = (
    Rule(
        name="repeated_data",
        needs=(TR_SIGMA, GRAD_SQ, B_BIG),
        uses=(CONSISTENCY, f"{CONSISTENCY}_se", B_SMALL),
        hint="that takes gns.enabled = true and at least two micro-batches per step over all ranks",
        threshold=f"in the last row, gns/consistency with {SIGMAS:g} standard errors is below {SAME_DATA:g}, or (a warning, in "
        f"loops that are not the trainer's) above {TOO_DIFFERENT:g}; or the noise is "
        f"below {ROUNDING:g} of the squared gradient",
        why="Ranks that forget to read different data (a sampler without the rank, one seed for all) train on a batch that is "
        "smaller than it seems, by the number of ranks, with nothing else to be seen: losses and throughput look right. Their "
        "gradients then are equal, and the noise between ranks is 0.",
        knob="the part of the data that each rank reads: a `DistributedSampler`, the rank in the seed",
        severity="error",
        check=check_repeated_data,
    ),
    Rule(
        name="batch_size",
        needs=(B_BIG,),
        hint="that takes gns.enabled = true and at least two micro-batches per step over all ranks",
        threshold=f"in the last row, the batch is below {TOO_SMALL:g} of the lower bound of the noise scale (too small) or "
        f"above {WASTEFUL:g} times its upper bound (wasteful)",
        why="A batch B needs 1 + B / B_simple times the minimum number of tokens and 1 + B_simple / B times the minimum "
        "number of steps (McCandlish et al. 2018): beyond the bounds, five times the tokens or eleven times the steps. "
        "This costs compute but does no harm, hence advice.",
        knob="`train.micro_batches` (or `data.mixing.batch_size`): move the batch towards the noise scale",
        severity="advice",
        check=check_batch_size,
    ),
)
