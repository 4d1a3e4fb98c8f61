"""The rows of the catalog: the type of a row, and one for each metric key of training, data and
ledger, gradient noise scale (docs/gns.md) and layers."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, Final, Literal

Kind = Literal["gauge", "counter", "flag"]
WindowReduction = Literal["mean", "weighted_mean", "sum", "max", "min", "last"]
# Lowest and highest healthy value; None if that side is unbounded.
Band = tuple[float | None, float | None]
RankReduction = Literal["mean", "weighted_mean", "sum", "min", "max", "sum_and_worst"]


@dataclass(frozen=True)
class MetricSpec:
    """One key, or one pattern with parts in angle brackets (`objective/<name>`).

    Attributes:
        name: the key in a payload, or the pattern.
        unit: unit of the value; empty for a pure number.
        kind: gauge (a level), counter (accumulates) or flag (0 or 1).
        window: reduction over several micro-steps or steps.
        ranks: reduction over ranks; `sum_and_worst` gives the largest rank's value as `<key>_max`,
            too.
        description: the meaning, in a sentence.
        healthy: the values of a good run.
        pathological: those of a bad run, and the likely cause.
        group: heading in documents and charts.
        title: label of the chart.
        band: the healthy range, if it is the same for every run; charts shade it.
        has_error: its standard error is `<key>_se`.
    """

    description: str
    healthy: str
    pathological: str
    _: KW_ONLY
    name: str
    unit: str = ""
    kind: Kind = "gauge"
    window: WindowReduction = "mean"
    ranks: RankReduction = "mean"
    group: str
    title: str
    band: Band | None = None
    has_error: bool = False

    @property
    def is_pattern(self) -> bool:
        return "<" in self.name


def row_of(name: str, title: str, **settings: Any) -> partial[MetricSpec]:
    """A row without texts: `row_of(name, title, unit=...)(description, healthy, pathological)`."""
    return partial(MetricSpec, name=name, title=title, **settings)


# ---- Training: objective, gradient, safety, speed, time, device memory, averages

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
    _TimeRow("time/data_sec", "Time: waiting for data", unit="s")(
        "Host time of a step in waiting for data (the rank that waits longest), mean since the last payload.",
        "Far below the compute time.",
        "Close to the compute time: data is too slow.",
    ),
    _TimeRow("time/forward_backward_sec", "Time: forward and backward", unit="s", ranks="mean")(
        "Host time of a step in forward and backward, mean since the last payload.",
        "Most of the step.",
        "Uneven: batches or a slow rank.",
    ),
    _TimeRow("time/optimizer_sec", "Time: clipping and the optimizer", unit="s", ranks="mean")(
        "Host time of a step in clipping and the optimizer, mean since the last payload.",
        "A few percent.",
        "Large: tiny batch, unfused optimizer.",
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
        for rank, ranks in (("slowest", "max"), ("fastest", "min"))
    ),
    _MemoryRow("gpu/allocated_gb", "Allocated")(
        "Memory of tensors when the step is logged (1 GB = 1e9 bytes).",
        "Flat.",
        "Grows: something keeps tensors alive.",
    ),
    _MemoryRow("gpu/peak_gb", "Peak")(
        "Largest allocated memory since the process started.",
        "Reached within the first steps.",
        "Grows late: longer batches.",
    ),
    _MemoryRow("gpu/reserved_gb", "Reserved")(
        "Memory reserved by the caching allocator.", "Slightly above the peak.", "Far above the peak: fragmentation."
    ),
    _MemoryRow("gpu/total_gb", "Total")("Memory of the device.", "Constant.", "Less than the card has: it is shared."),
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

# ---- The data, and the ledger of recurrent states

EPOCHS: Final = "data/epochs/"
"""A data set reports what was read since its last report, the tracker the total since the start."""

_MixingRow = partial(row_of, group="Stream mixing", window="last")
_BlendRow = partial(row_of, group="Blend", window="last")
_SourceMean = partial(_BlendRow, unit="nats/token", window="weighted_mean", ranks="weighted_mean")
_LedgerRow = partial(row_of, group="Ledger")
_Counter = partial(_LedgerRow, kind="counter", window="sum", ranks="sum_and_worst")
_LedgerZero = partial(_Counter, band=(0.0, 0.0), healthy="0.")

DATA_ROWS: tuple[MetricSpec, ...] = (
    _MixingRow("stream_mixing/active/remaining_min", "Remaining picks, minimum", unit="picks", ranks="min")(
        "Fewest picks left of an active reader.",
        "Often 1 or 0 with refill: readers drain together.",
        "Never low while others drain: a reader is not picked.",
    ),
    _MixingRow("stream_mixing/active/remaining_max", "Remaining picks, maximum", unit="picks", ranks="max")(
        "Most picks left of an active reader.", "At most a whole slice's picks.", "Constant: that reader is stuck."
    ),
    _MixingRow(
        "stream_mixing/active/remaining_fraction_min", "Remaining fraction, minimum", unit="fraction", ranks="min"
    )("Smallest fraction of a slice left to a reader.", "Mostly low with refill.", "Outside 0 to 1: a wrong cursor."),
    _MixingRow(
        "stream_mixing/active/remaining_fraction_max", "Remaining fraction, maximum", unit="fraction", ranks="max"
    )(
        "Largest fraction left to a reader.",
        "About 0.6 above the minimum with refill.",
        "1 for long: it is never picked.",
    ),
    _MixingRow("stream_mixing/active/modalities/<modality>", "Active readers by modality", unit="readers", ranks="sum")(
        "Active readers of a modality, over all ranks.", "Near its share of the streams.", "0 for long: it starves."
    ),
    _MixingRow("stream_mixing/active/steps_since_pick_max", "Longest wait", unit="picks", ranks="max")(
        "Most picks since a reader was last picked.",
        "Up to the pool's remaining picks.",
        "Grows: see pick_surprise_max.",
    ),
    _MixingRow("stream_mixing/active/pick_surprise_max", "Pick surprise", unit="nats", ranks="max")(
        "Largest sum of -ln(1 - p) since a reader was last picked; exponential with mean 1.",
        "Below ln(steps / alpha): about 12 for 200 steps, 21 for a million.",
        "Above: a reader is picked too rarely.",
    ),
    _MixingRow(
        "stream_mixing/refill/exhaust_events",
        "Exhausted readers",
        unit="events",
        kind="counter",
        window="sum",
        ranks="sum",
    )("Readers at the end of their slice.", "Ranks over picks per slice, per micro-batch.", "Bursts: the mix narrows."),
    _MixingRow("stream_mixing/masked_share", "Masked share", unit="fraction", window="mean", ranks="max")(
        "Micro-batches without a target, on the worst rank.", "Near 0.", "High: data exhausted, or too few groups."
    ),
    _MixingRow("data/fill", "Fill of the rows", unit="fraction", window="mean", ranks="mean")(
        "Positions that hold a document's token over those of full rows, since the last payload.",
        "0.999 or more with full rows that run on.",
        "Low: the device computes padding, or batches are small.",
    ),
    _BlendRow("data/documents", "Documents to draw from", unit="documents", ranks="max")(
        "Documents of an epoch over all data shards, about; of several sources 1 / sum(share^2 / documents).",
        "Above 7 times the noise scale, counted in rows.",
        "Fewer: a step draws them without replacement, and the noise scale comes out too high (docs/gns.md).",
    ),
    _BlendRow(f"{EPOCHS}<source>", "Epochs of source", unit="epochs", kind="counter", window="sum", ranks="sum")(
        "Epochs of a source read since the start, over all ranks: "
        "the share read of each file's tokens, weighted by file size.",
        "Below 4: repeated tokens are nearly as good as new ones until then.",
        "Far above: the model memorizes the source.",
    ),
    _BlendRow("blend/max_share_error", "Blend share error", unit="fraction", ranks="max")(
        "Largest difference of a source's share from its weight; documents count when begun.",
        "Shrinks with the root of the batches; with full rows, to a few documents.",
        "Flat or growing: a source is exhausted or a weight ignored.",
    ),
    _BlendRow("blend/longest_share", "Longest document", unit="fraction", ranks="max")(
        "Longest document over all tokens so far: a share may be off by twice this.",
        "Shrinks to 0.",
        "Large late in the run: the mix goes by single documents.",
    ),
    _BlendRow("blend/ended_sources", "Exhausted sources", unit="sources", ranks="max")(
        "Sources without data left, on the worst rank.", "0 with data.mixing.repeat.", "Above 0 early in the run."
    ),
    _BlendRow("blend/share/<source>", "Share of source", unit="fraction")(
        "Actual share of one source so far, counted as blend/max_share_error (metrics.per_source).",
        "Close to its configured weight.",
        "0 although its weight is positive.",
    ),
    _BlendRow("blend/weight/<source>", "Weight of source", unit="fraction")(
        "Weight of one source over the sum of all (metrics.per_source).", "As configured.", "Not what you meant."
    ),
    *(
        _SourceMean(f"{part}/<{part}>/loss", f"Loss of {part}")(
            "Loss over its tokens (metrics.per_source).",
            "Falls.",
            "Rises while the total falls: starved or in conflict.",
        )
        for part in ("source", "modality")
    ),
    *(
        _Counter(f"ledger/evictions/{mode}", f"Evictions ({mode})", unit="groups")(
            f"Groups whose state was dropped {reason}.", healthy, "Followed by false evictions."
        )
        for mode, reason, healthy in (
            ("lru", "because the ledger was full", "0 if the capacity covers the groups in flight."),
            ("stale", "because they were not stored in time", "Only groups that never return."),
        )
    ),
    *(
        _LedgerZero(f"ledger/false_evictions/{mode}", f"False evictions ({mode})", unit="groups")(
            f"Groups that continued from zero after an eviction ({mode}).", pathological=f"Above 0: {fix}."
        )
        for mode, fix in (
            ("lru", "raise the capacity or lower the number of groups in flight"),
            ("stale", "the stale threshold is shorter than the interval between two cells of a group"),
        )
    ),
    _LedgerZero("ledger/cold_starts", "Cold starts", unit="cells")(
        "Cells that continued a group but found no state.",
        pathological="Above 0: wipe, eviction, refused row, or resume without ledger.",
    ),
    _LedgerZero("ledger/refused_rows", "Refused rows", unit="rows")(
        "Non-finite states, which are not stored.", pathological="Above 0: the recurrence overflows."
    ),
    _Counter("ledger_wipe_count", "Full wipes", unit="wipes")(
        "Wipes of the whole ledger.", "As configured; 0 in the other modes.", "More than configured."
    ),
    _LedgerRow("ledger/live_groups", "Live groups", unit="groups", window="last", ranks="sum")(
        "Groups with a stored state, over all ranks.", "Near the groups in flight.", "Grows: groups are not released."
    ),
    _LedgerRow(
        "ledger/fill_fraction", "Fill of the ledger", unit="fraction", window="last", ranks="max", band=(None, 0.95)
    )("Live groups over capacity, on the fullest rank.", "Well below 1.", "1: a new group evicts another."),
)

# ---- The gradient noise scale, and layers

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
