"""Catalog rows of training: objective, gradient, safety, speed, time, device memory, averages; of the
gradient noise scale, of layers and of parameter groups (docs/gns.md)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

from trainer.metrics.catalog.spec import MetricSpec, RankReduction, row_of

ONE_BATCH_SIZE: Final = "one micro-batch per step on one rank has a single batch size, and two are compared"
"""Why some runs have none of these keys."""

_Row = partial(row_of, group="Training")
_TokenMean = partial(_Row, window="weighted_mean", ranks="weighted_mean")
_TokenTypeMean = partial(_TokenMean, group="Token types")
_SafetyRow = partial(row_of, group="Safety")
_MustBeZero = partial(_SafetyRow, band=(0.0, 0.0), healthy="0.")
_SpeedRow = partial(row_of, group="Speed", ranks="max")
_TimeRow = partial(row_of, group="Time in a step", ranks="max")
_MemoryRow = partial(row_of, group="Device memory", unit="GB", window="max", ranks="max")

_PARTS: tuple[tuple[str, str, RankReduction, str, str, str], ...] = (
    (
        "data",
        "waiting for data",
        "max",
        " (the rank that waits longest)",
        "Far below the compute time.",
        "Close to the compute time: data is too slow.",
    ),
    ("forward_backward", "forward and backward", "mean", "", "Most of the step.", "Uneven: batches or a slow rank."),
    ("optimizer", "clipping and the optimizer", "mean", "", "A few percent.", "Large: tiny batch, unfused optimizer."),
)
_RANK_TIMES: tuple[tuple[str, RankReduction], ...] = (("slowest", "max"), ("fastest", "min"))

_AtDepth = partial(row_of, unit="nats/token", has_error=True, group="Evaluation")
_DEPTH = (
    _AtDepth("eval/depth/<bucket>/loss", "Loss at a depth")(
        "Loss of targets with <bucket> to 2 <bucket> - 1 tokens before.", "Falls.", "See the gain."
    ),
    _AtDepth("eval/depth/<bucket>/loss_from_zero", "Loss at a depth, from zero")(
        "The same with the state reset at each cell.", "Above the former.", "See the gain."
    ),
    _AtDepth("eval/depth/<bucket>/carry_gain", "Gain of carrying at a depth")(
        "Their difference (`beyond_cell`: all later cells).",
        "Positive.",
        "0: context is unused. Falls: never trained so deep.",
    ),
)
_OF_A_SET: tuple[MetricSpec, ...] = (
    _TokenMean("loss", "Loss", unit="nats/token")(
        "Objective per target token.", "Falls, ever more slowly.", "Jumps: bad batch, learning rate; stays at ln(V)."
    ),
    _Row("loss_se", "Loss, standard error", unit="nats/token", window="last", ranks="max")(
        "Error of a sample's loss against the whole set's: two are 95 %. Absent if all is read.",
        "Below differences between runs.",
        "As large as those: raise eval.batches.",
    ),
    _TokenMean("accuracy", "Accuracy", unit="fraction")(
        "Fraction of targets predicted correctly.",
        "Rises while the loss falls.",
        "1 early on: targets leak into inputs.",
    ),
    _Row("perplexity", "Perplexity", window="last", ranks="max")(
        "exp of the cross-entropy per token.", "Falls to a floor set by the data.", "Near the vocabulary size."
    ),
    _TokenMean("bits_per_byte", "Bits per byte", unit="bits/byte", band=(None, 8.0))(
        "Cross-entropy of the tokens that stand for text, per byte of it.",
        "Below 8 at once; small models reach 1 to 2 on text.",
        "8 or more: random guessing.",
    ),
)

ROWS: tuple[MetricSpec, ...] = (
    *_OF_A_SET,
    *(
        replace(
            row,
            name=f"eval/<name>/{row.name}",
            title=f"{row.title}, by validation set",
            group="Evaluation",
            description="The same key on one validation set.",
            healthy="As in training.",
            pathological="Worse while training improves: overfitting.",
        )
        for row in _OF_A_SET
    ),
    *_DEPTH,
    *(
        _AtDepth(row.name.replace("/", "/<name>/", 1), f"{row.title} of a set")(
            "The same by depth on one validation set.", "As eval/depth.", "As eval/depth."
        )
        for row in _DEPTH
    ),
    *(
        row_of(name, "Tasks of your own", group="Evaluation")(
            "Result of a custom task (eval.target).", "As the task defines it.", "As the task defines it."
        )
        for name in ("eval/<name>/<metric>", "eval/<metric>")
    ),
    _Row("train/micro_batches", "Micro-batches per step", window="last", ranks="max")(
        "Micro-batches per step and rank, if not constant.",
        "As scheduled.",
        "gns/b_now_low above 2 gns/b_big for long.",
    ),
    _Row("grad_norm", "Gradient norm")(
        "L2 norm of the whole gradient before clipping.",
        "Settles within a few hundred steps.",
        "Spikes before loss spikes; steady growth; 0 (no gradient reaches the parameters).",
    ),
    _Row("lr", "Learning rate", window="last", ranks="max")(
        "Learning rate of the step.", "Follows the configured schedule.", "Deviates from the schedule after a resume."
    ),
    _Row("tokens_in_step", "Tokens in the step", unit="tokens", window="sum", ranks="sum")(
        "Target tokens of the step, even if skipped.",
        "Close to batch size times sequence length; lower with padding.",
        "Far lower: padding, or ranks without data.",
    ),
    _Row("tokens_seen", "Tokens seen", unit="tokens", window="last", ranks="max")(
        "Target tokens trained on so far, without skipped steps.", "Grows linearly.", "Restarts at zero after a resume."
    ),
    _TokenMean("objective/<name>", "Objective component", unit="nats/token", group="Objective")(
        "One weighted component of the loss, per token (or row) that it applies to.",
        "Falls, or stays relatively small.",
        "A regularizer outgrows the cross-entropy.",
    ),
    _TokenTypeMean("token_type/<type>/loss", "Loss by token type", unit="nats/token")(
        "Loss over the target tokens of one type.", "Falls for each type.", "One type rises while the total falls."
    ),
    _TokenTypeMean("token_type/<type>/accuracy", "Accuracy by token type", unit="fraction")(
        "Fraction of correct predictions of one type.", "Rises for each type.", "Stays at chance level for one type."
    ),
    _MustBeZero("non_finite_steps", "Rejected steps", unit="steps", kind="counter", window="sum", ranks="max")(
        "Steps rejected for a non-finite loss or gradient.",
        pathological="More than a few: lower the learning rate; batches: events.jsonl.",
    ),
    _MustBeZero("loss_spike", "Loss spike", kind="flag", window="max", ranks="max")(
        "1 if a loss was train.spike_sigma above its average; batches: events.jsonl.",
        pathological="1 repeatedly on the same sources: bad data.",
    ),
    _SafetyRow("grad_scale", "Loss scale", window="last", ranks="min")(
        "Factor of dynamic loss scaling (fp16).", "Powers of two, rarely halved.", "Falls towards 1: overflows."
    ),
    _SafetyRow("checkpoint/save_sec", "Checkpoint time", unit="s", window="sum", ranks="max")(
        "Time in which saves block, slowest rank.", "Far below the checkpoint interval.", "Grows: disk full or slow."
    ),
    _SpeedRow("tokens_per_sec", "Tokens per second", unit="tokens/s", window="last")(
        "Target tokens over time, of all steps since the last payload.",
        "Flat after the first steps.",
        "Falls over time (leak, throttling) or oscillates (data).",
    ),
    _SpeedRow("tokens_per_sec_per_device", "Tokens per second and device", unit="tokens/s", window="last")(
        "tokens_per_sec over the number of ranks.",
        "The same for any number.",
        "Falls as ranks are added: communication.",
    ),
    _SpeedRow("mfu", "Model FLOPs utilization", unit="fraction", window="last", band=(0.3, 0.6))(
        "Model FLOPs per second over the devices' peak, without recomputation.",
        "0.3 to 0.6 for large matrices on one node.",
        "Above 1: wrong peak or FLOP count. Below 0.1: data, launches or communication dominate.",
    ),
    _SpeedRow("step_time_sec", "Step time", unit="s")(
        "Mean step time since the last payload, without evaluation and saves.", "Flat.", "Grows: see time/*."
    ),
    *(
        _TimeRow(f"time/{part}_sec", f"Time: {words}", unit="s", ranks=ranks)(
            f"Host time of a step in {words}{whose}, mean since the last payload.", healthy, pathological
        )
        for part, words, ranks, whose, healthy, pathological in _PARTS
    ),
    *(
        _TimeRow(f"time/{stage}/<source>", f"Reading: {words}", unit="s", kind="counter", window="sum")(
            f"Time in {words}, waited for or not.", "Far below the time of the steps.", f"Close to it: {fix}."
        )
        for stage, words, fix in (
            ("open", "opening and tokenizing files", "many small files, or text to tokenize ahead"),
            ("read", "reading opened files and making batches", "the disk is slow"),
            ("own_code", "the user's data set or format", "its code is slow"),
        )
    ),
    *(
        _TimeRow(f"time/{part}_share", f"Share: {words}", unit="fraction", window="last", band=band)(
            "That part's time over step_time_sec.", "Flat.", "Grows."
        )
        for part, words, band in (
            ("data", "waiting for data", (None, 0.05)),
            ("forward_backward", "forward and backward", None),
            ("optimizer", "optimizer", None),
        )
    ),
    *(
        _TimeRow(f"time/{rank}_rank_sec", f"Time of the {rank} rank", unit="s", window="last", ranks=ranks)(
            "Host time before the gradient reduction.", "Slowest and fastest are close.", "Far apart in most steps."
        )
        for rank, ranks in _RANK_TIMES
    ),
    *(
        _MemoryRow(f"gpu/{name}", title)(description, healthy, pathological)
        for name, title, description, healthy, pathological in (
            (
                "allocated_gb",
                "Allocated",
                "Memory of tensors when the step is logged (1 GB = 1e9 bytes).",
                "Flat.",
                "Grows: something keeps tensors alive.",
            ),
            (
                "peak_gb",
                "Peak",
                "Largest allocated memory since the process started.",
                "Reached within the first steps.",
                "Grows late: longer batches.",
            ),
            (
                "reserved_gb",
                "Reserved",
                "Memory reserved by the caching allocator.",
                "Slightly above the peak.",
                "Far above the peak: fragmentation.",
            ),
            ("total_gb", "Total", "Memory of the device.", "Constant.", "Less than the card has: it is shared."),
        )
    ),
    _MemoryRow("gpu/mem_utilization", "Peak share", unit="fraction", band=(0.6, 0.95))(
        "gpu/peak_gb divided by gpu/total_gb.", "0.6 to 0.95.", "Above 0.97: the next long batch may not fit."
    ),
    *(
        row_of(f"smoothed/{name}", f"{title} (EMA)", unit=unit, window="last", group="Smoothed")(
            "Exponential average of the raw key over all steps.", "Follows the raw curve.", "As the raw curve."
        )
        for name, unit, title in (
            ("loss", "nats/token", "Loss"),
            ("tokens_per_sec", "tokens/s", "Tokens per second"),
            ("mfu", "fraction", "Model FLOPs utilization"),
            ("step_time", "s", "Step time"),
        )
    ),
)

_GnsRow = partial(row_of, group="Gradient noise scale", window="last")
_Sequences = partial(_GnsRow, unit="sequences")
_AsBSimple = partial(_GnsRow, healthy="As gns/b_simple.", pathological="As gns/b_simple.")
_Ratio = partial(_GnsRow, unit="ratio")
_BATCH_TOO_SMALL = ("Above ten times gns/b_big: batch too small.", "Absent for long: batch far too small.")
_AS_B_SIMPLE = ("As gns/b_simple_low.", "As gns/b_simple_high.")


def _with_bounds(
    name: str, title: str, texts: tuple[str, str, str], bounds: tuple[str, str] = _AS_B_SIMPLE
) -> tuple[MetricSpec, ...]:
    """The rows of a noise scale: its texts, and what is pathological of its bounds."""
    low, high = bounds
    return (
        _Sequences(f"gns/{name}", title)(*texts),
        _Sequences(f"gns/{name}_low", f"{title}, lower bound")("Its lower bound (97.5 %).", "Close to it.", low),
        _Sequences(f"gns/{name}_high", f"{title}, upper bound")(
            "Its upper bound (99.99 %).", "Within a factor of two.", high
        ),
    )


GNS_ROWS: tuple[MetricSpec, ...] = (
    *_with_bounds(
        "b_simple",
        "Noise scale B_simple",
        (
            "tr(Sigma) / |G|^2: batch size at which gradient noise equals signal.",
            "Grows slowly as the loss falls.",
            "Far below the batch: averaging wastes compute.",
        ),
        _BATCH_TOO_SMALL,
    ),
    *_with_bounds(
        "b_now",
        "Noise scale now",
        (
            "The noise scale at this step, by a line through recent ones.",
            "As gns/b_simple, and above it while growing.",
            "As gns/b_simple.",
        ),
    ),
    _Sequences("gns/b_simple_se", "Standard error of B_simple")(
        "Its standard error on the larger side.", "A small part of gns/b_simple.", "As large: average over more steps."
    ),
    _GnsRow("gns/b_now_steps", "Steps behind B now", unit="steps")(
        "Steps that gns/b_now comes from: half of those without visible curvature.",
        "Grows with the run.",
        "Small late in the run: noise or signal changes quickly.",
    ),
    _AsBSimple("gns/b_simple_tokens", "Noise scale in tokens", unit="tokens")(
        "gns/b_simple times the target tokens per sequence."
    ),
    _GnsRow("gns/tr_sigma", "Gradient noise tr(Sigma)")(
        "Trace of the covariance of a sequence's gradient.", "Steady.", "Negative for long: dependent micro-batches."
    ),
    _GnsRow("gns/grad_sq", "Gradient signal |G|^2")(
        "Squared norm of the true gradient, averaged.", "Falls.", "Negative for long: batch far below noise scale."
    ),
    _Ratio("gns/consistency", "Consistency", band=(0.5, 2.0))(
        "Noise between ranks over that within them (one rank: first over second half).",
        "1.",
        "0: ranks read the same data. Large: micro-batches are reused, or ranks differ.",
    ),
    _Ratio("gns/consistency_se", "Standard error of consistency")(
        "Its standard error on the larger side.", "Well below 1.", "1 or more: gns/consistency says nothing yet."
    ),
    _Sequences("gns/b_small", "Small batch")(
        "Effective sequences of a micro-batch on a rank.", "Constant.", "Far below its rows: uneven weights."
    ),
    _Sequences("gns/b_big", "Big batch")(
        "Effective sequences of the whole step.", "Constant.", "Far below the rows of a step: uneven weights."
    ),
    _Ratio("gns/batch_ratio", "Batch over noise scale", band=(0.1, 4.0))(
        "Sequences of a step divided by gns/b_simple.",
        "0.1 to 4.",
        "Below 0.1: larger batches take fewer steps. Above 4: smaller ones learn nearly as much per step.",
    ),
    _GnsRow("gns/skipped", "Skipped windows", unit="steps", kind="counter", window="sum", ranks="max", band=(0.0, 0.0))(
        "Steps without a usable estimate.", "0.", "Grows: non-finite micro-gradients, or hooks run twice."
    ),
    _GnsRow("gns/left_out", "Windows left out", unit="steps", kind="counter", window="sum", ranks="max")(
        "Steps of which two micro-batches have rows of one document.",
        "Absent.",
        "Most steps: the noise scale stands still. Use more documents, or fewer rows in a step.",
    ),
    _AsBSimple("gns/gns_mu", "Noise scale in micro-batches", unit="micro-batches")(
        "gns/b_simple over the sequences of a micro-batch on all ranks."
    ),
    _Sequences("gns/Bsimple_from_mu", "B_simple from mu")(
        "gns/b_simple by the name of an older recipe.", "Equals gns/b_simple.", "As gns/b_simple."
    ),
)

_LayerRow = partial(row_of, group="Layers", window="last")

LAYER_ROWS: tuple[MetricSpec, ...] = (
    _LayerRow("layer/<name>/grad_norm", "Gradient norm by layer")(
        "L2 norm of its gradient before clipping.",
        "Within a factor of a hundred.",
        "0: no gradient reaches it. Nearly all of grad_norm: clipping shrinks the others.",
    ),
    _LayerRow("layer/<name>/update_ratio", "Update over weight by layer", unit="ratio")(
        "L2 norm of its weight update over that of its weights.",
        "1e-4 to 1e-2 at the peak learning rate; follows the schedule.",
        "Far below the others: it stands still. Above 0.1: too fast.",
    ),
)
