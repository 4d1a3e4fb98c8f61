"""The rows of the catalog: the type of a row, and one for each metric key of training, data and
ledger, gradient noise scale (docs/gns.md) and layers."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, partial
from typing import Any, Final, Literal

Kind = Literal["gauge", "counter", "flag"]
WindowReduction = Literal["mean", "weighted_mean", "sum", "max", "min", "last"]
# Lowest and highest healthy value; None if that side is unbounded.
Band = tuple[float | None, float | None]
RankReduction = Literal["mean", "weighted_mean", "sum", "min", "max", "sum_and_worst", "max_over_sum"]


@dataclass(frozen=True)
class MetricSpec:
    """One key, or one pattern with parts in angle brackets (`objective/<name>`).

    Attributes:
        name: the key in a payload, or the pattern.
        unit: unit of the value; empty for a pure number.
        kind: gauge (a level), counter (accumulates) or flag (0 or 1).
        window: reduction over several micro-steps or steps.
        ranks: reduction over ranks; `sum_and_worst` gives the largest rank's value as `<key>_max`,
            too, and `max_over_sum` divides the largest numerator by the sum of the denominators.
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

    @cached_property
    def is_ratio(self) -> bool:
        """Whether values are a numerator and a denominator, each reduced by itself."""
        is_last = self.window == "last" and self.ranks in ("weighted_mean", "max_over_sum")
        return self.window == "weighted_mean" or is_last


def row_of(name: str, title: str, **settings: Any) -> partial[MetricSpec]:
    """A row without texts: `row_of(name, title, unit=...)(description, healthy, pathological)`."""
    return partial(MetricSpec, name=name, title=title, **settings)


# ---- Training: objective, gradient, safety, speed, time, device memory, averages

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
        "Their difference (`beyond_cell`: later cells).", "Positive.", "0: context is unused."
    ),
)
_OF_A_SET: tuple[MetricSpec, ...] = (
    _TokenMean("loss", "Loss", unit="nats/token")(
        "Objective per target token.", "Falls, ever more slowly.", "Jumps: bad batch, learning rate; stays at ln(V)."
    ),
    _Row("loss_se", "Loss, standard error", unit="nats/token", window="last", ranks="max")(
        "Error of a sample's loss: two are 95 %.", "Below differences between runs.", "As large: raise eval.batches."
    ),
    _TokenMean("accuracy", "Accuracy", unit="fraction")(
        "Fraction of correct predictions.", "Rises while the loss falls.", "1 early: targets leak."
    ),
    _Row("perplexity", "Perplexity", window="last", ranks="max")(
        "exp of the cross-entropy per token.", "Falls to a floor.", "Near the vocabulary size."
    ),
    _TokenMean("bits_per_byte", "Bits per byte", unit="bits/byte", band=(None, 8.0))(
        "Cross-entropy per byte of text.", "Below 8 at once; 1 to 2 for small models.", "8 or more: random guessing."
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
        "Micro-batches per step, if not constant.", "As scheduled.", "gns/b_now_low above 2 b_big."
    ),
    _Row("grad_norm", "Gradient norm")(
        "L2 norm of the gradient before clipping.", "Settles within a few hundred steps.", "Steady growth, spikes; 0."
    ),
    _Row("lr", "Learning rate", window="last", ranks="max")(
        "Learning rate of the step.", "Follows the configured schedule.", "Deviates from the schedule after a resume."
    ),
    _Row("tokens_in_step", "Tokens in the step", unit="tokens", window="sum", ranks="sum")(
        "Target tokens, even if skipped.", "Constant.", "Far lower: padding, or ranks without data."
    ),
    _Row("tokens_seen", "Tokens seen", unit="tokens", window="last", ranks="max")(
        "Target tokens trained on so far, without skipped steps.", "Grows linearly.", "Restarts at zero after a resume."
    ),
    _TokenMean("objective/<name>", "Objective component", unit="nats/token", group="Objective")(
        "A weighted component of the loss, per token or row.", "Falls, or stays small.", "Outgrows the cross-entropy."
    ),
    _TokenTypeMean("token_type/<type>/loss", "Loss by token type", unit="nats/token")(
        "Loss over the target tokens of one type.", "Falls for each type.", "One type rises."
    ),
    _TokenTypeMean("token_type/<type>/accuracy", "Accuracy by token type", unit="fraction")(
        "Fraction of correct predictions of one type.", "Rises for each type.", "Stays at chance level for one type."
    ),
    _MustBeZero("non_finite_steps", "Rejected steps", unit="steps", kind="counter", window="sum", ranks="max")(
        "Steps rejected as non-finite.", pathological="Many: lower the learning rate."
    ),
    _MustBeZero("loss_spike", "Loss spike", kind="flag", window="max", ranks="max")(
        "1 if a loss was train.spike_sigma above average.", pathological="1 repeatedly on the same sources: bad data."
    ),
    _SafetyRow("checkpoint/save_sec", "Checkpoint time", unit="s", window="sum", ranks="max")(
        "Time in which saves block, slowest rank.", "Far below the checkpoint interval.", "Grows: disk full or slow."
    ),
    _SpeedRow("tokens_per_sec", "Tokens per second", unit="tokens/s", window="last")(
        "Target tokens over time since the last payload.", "Flat.", "Falls: leak, throttling."
    ),
    _SpeedRow("tokens_per_sec_per_device", "Tokens per second and device", unit="tokens/s", window="last")(
        "tokens_per_sec over the number of ranks.", "Constant.", "Falls with more: communication."
    ),
    _SpeedRow("mfu", "Model FLOPs utilization", unit="fraction", window="last", band=(0.3, 0.6))(
        "Model FLOPs/s of trained targets over the peak.", "0.3 to 0.6.", "Above 1: wrong peak. Below 0.1: idle."
    ),
    _SpeedRow("step_time_sec", "Step time", unit="s")(
        "Mean step time, without evaluations and saves.", "Flat.", "Grows: see time/*."
    ),
    _TimeRow("time/data_sec", "Time: waiting for data", unit="s")(
        "Host time waiting for data, slowest rank.", "Far below computing.", "Near it: slow data."
    ),
    _TimeRow("time/forward_backward_sec", "Time: forward and backward", unit="s", ranks="mean")(
        "Host time of a step in forward and backward.", "Most of the step.", "Uneven: a slow rank."
    ),
    _TimeRow("time/optimizer_sec", "Time: clipping and the optimizer", unit="s", ranks="mean")(
        "Host time of a step in the optimizer.", "A few percent.", "Large: tiny batch."
    ),
    *(
        _TimeRow(f"time/{stage}/<source>", f"Reading: {words}", unit="s", kind="counter", window="sum")(
            f"Time in {words}, waited for or not.", "Far below the steps.", f"Close to it: {fix}."
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
        "Memory of tensors at the logged step (1e9 bytes).", "Flat.", "Grows: tensors are kept."
    ),
    _MemoryRow("gpu/peak_gb", "Peak")(
        "Most memory allocated so far.", "Reached at once.", "Grows late: longer batches."
    ),
    _MemoryRow("gpu/reserved_gb", "Reserved")(
        "Memory reserved by the caching allocator.", "Slightly above the peak.", "Far above the peak: fragmentation."
    ),
    _MemoryRow("gpu/total_gb", "Total")("Memory of the device.", "Constant.", "Less than the card has: it is shared."),
    _MemoryRow("gpu/mem_utilization", "Peak share", unit="fraction", band=(0.6, 0.95))(
        "gpu/peak_gb over gpu/total_gb.", "0.6 to 0.95.", "Above 0.95: a long batch may not fit."
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

SHARE_ERRORS: Final = "blend/share_error/"
EPOCHS_LEAST: Final = "data/epochs_least"
EPOCHS_MOST: Final = "data/epochs_most"

_MixingRow = partial(row_of, group="Stream mixing", window="last")
_MixingCounter = partial(_MixingRow, kind="counter", window="sum", ranks="sum")
_BlendRow = partial(row_of, group="Blend", window="last")
_SourceShare = partial(_BlendRow, unit="fraction", ranks="weighted_mean")
_SourceMean = partial(_BlendRow, unit="nats/token", window="weighted_mean", ranks="weighted_mean")
_LedgerRow = partial(row_of, group="Ledger")
_Counter = partial(_LedgerRow, kind="counter", window="sum", ranks="sum_and_worst")
_LedgerZero = partial(_Counter, band=(0.0, 0.0), healthy="0.")

DATA_ROWS: tuple[MetricSpec, ...] = (
    _MixingRow("stream_mixing/active/remaining_min", "Remaining picks, minimum", unit="picks", ranks="min")(
        "Fewest picks left of a reader.", "Often 1 with refill.", "Never low: not picked."
    ),
    _MixingRow("stream_mixing/active/remaining_max", "Remaining picks, maximum", unit="picks", ranks="max")(
        "Most picks left of an active reader.", "At most a whole slice's picks.", "Constant: stuck."
    ),
    _MixingRow("stream_mixing/active/remaining_fraction_min", "Fraction left, minimum", unit="fraction", ranks="min")(
        "Smallest fraction of a slice left to a reader.", "Mostly low with refill.", "Outside 0 to 1: a wrong cursor."
    ),
    _MixingRow("stream_mixing/active/remaining_fraction_max", "Fraction left, maximum", unit="fraction", ranks="max")(
        "Largest fraction left.", "About 0.6 above the least.", "1 for long: it is never picked."
    ),
    _MixingRow("stream_mixing/active/modalities/<modality>", "Active readers by modality", unit="readers", ranks="sum")(
        "Active readers of a modality, over all ranks.", "Near its share of the streams.", "0 for long: it starves."
    ),
    _MixingRow("stream_mixing/active/steps_since_pick_max", "Longest wait", unit="picks", ranks="max")(
        "Picks since a reader's last.", "Up to the pool's picks.", "Grows: see pick_surprise_max."
    ),
    _MixingRow("stream_mixing/active/pick_surprise_max", "Pick surprise", unit="nats", ranks="max")(
        "Largest sum of -ln(1 - p) since a pick.", "12 in 200 steps, 21 in a million.", "Above: picked too rarely."
    ),
    _MixingCounter("stream_mixing/refill/exhaust_events", "Exhausted readers", unit="events")(
        "Readers at the end of their slice.", "Ranks over picks per slice, per micro-batch.", "Bursts: the mix narrows."
    ),
    _MixingRow("stream_mixing/refill/absence/<modality>", "Absence of a modality", unit="nats", ranks="max")(
        "-ln of the chance that none of those opened since is of it.", "12 in 200.", "Above: it starves."
    ),
    _MixingCounter("stream_mixing/active/picks", "Picks", unit="picks")(
        "Picks, of a document or a micro-batch.", "Steady.", "0: a source without further documents."
    ),
    _MixingRow("stream_mixing/masked_share", "Masked share", unit="fraction", window="mean", ranks="max")(
        "Micro-batches without a target, on the worst rank.", "Near 0.", "High: data exhausted."
    ),
    _MixingRow("data/fill", "Fill of the rows", unit="fraction", window="weighted_mean", ranks="weighted_mean")(
        "Positions that hold a token over those of full rows.", "Near 1 with full rows.", "Low: padding, small batches."
    ),
    _MixingRow("data/trained", "Trained tokens", unit="fraction", window="weighted_mean", ranks="weighted_mean")(
        "Known targets (loss_mask, NaN) over all tokens in the rows.", "As the data say.", "Near 0: nothing is learnt."
    ),
    _BlendRow("data/documents", "Documents to draw from", unit="documents", ranks="max")(
        "Documents of an epoch, or fewer.", "Above 7 noise scales in rows.", "Fewer: that is too high."
    ),
    *(
        _BlendRow(f"{key}{part}", f"Epochs, {which} of any document", unit="epochs", ranks=ranks)(
            "Times that a document was begun, at least and at most (<source>: metrics.per_source).",
            "Below 4: as good as new tokens.",
            "Far above: memorized.",
        )
        for part in ("", "/<source>")
        for key, which, ranks in ((EPOCHS_LEAST, "least", "min"), (EPOCHS_MOST, "most", "max"))
    ),
    _BlendRow("blend/max_share_error", "Blend share error", unit="fraction")(
        "Largest difference of a share from its weight.", "Shrinks.", "Grows: a source ended."
    ),
    _BlendRow("blend/longest_share", "Longest document", unit="fraction", ranks="max_over_sum")(
        "Longest document over all tokens: a share may be off by twice this.", "Shrinks to 0.", "Large late in the run."
    ),
    _BlendRow("blend/ended_sources", "Exhausted sources", unit="sources", ranks="max")(
        "Sources without data left.", "0 with data.mixing.repeat.", "Above 0 early in the run."
    ),
    _SourceShare("blend/share/<source>", "Share of source")(
        "Share so far (metrics.per_source).", "Near its weight.", "0 although its weight is not."
    ),
    _SourceShare("blend/share_error/<source>", "Share error of source")(
        "Share minus what its weights call for, so far (metrics.per_source).", "Shrinks.", "Grows: the source ended."
    ),
    _BlendRow("blend/weight/<source>", "Weight of source", unit="fraction")(
        "Weight over the sum of all (metrics.per_source).", "As configured.", "Not what you meant."
    ),
    *(
        _SourceMean(f"{part}/<{part}>/loss", f"Loss of {part}")(
            "Loss over its tokens (metrics.per_source).", "Falls.", "Rises alone: starved."
        )
        for part in ("source", "modality")
    ),
    *(
        _Counter(f"ledger/evictions/{mode}", f"Evictions ({mode})", unit="groups")(
            f"Groups whose state was dropped {reason}.", healthy, "Followed by false evictions."
        )
        for mode, reason, healthy in (
            ("lru", "because the ledger was full", "0 if capacity covers the groups in flight."),
            ("stale", "because they were not stored in time", "Only groups that never return."),
        )
    ),
    *(
        _LedgerZero(f"ledger/false_evictions/{mode}", f"False evictions ({mode})", unit="groups")(
            f"Groups restarted after an eviction ({mode}).", pathological=f"Above 0: {fix}."
        )
        for mode, fix in (
            ("lru", "raise the capacity or lower the number of groups in flight"),
            ("stale", "the stale threshold is shorter than the interval between two cells of a group"),
        )
    ),
    _LedgerZero("ledger/cold_starts", "Cold starts", unit="cells")(
        "Cells that continued a group without its state.", pathological="Above 0: a wipe, an eviction or a refused row."
    ),
    _LedgerZero("ledger/refused_rows", "Refused rows", unit="rows")(
        "Non-finite states, never stored.", pathological="Above 0: the recurrence overflows."
    ),
    _Counter("ledger_wipe_count", "Full wipes", unit="wipes")(
        "Wipes of the whole ledger.", "As configured; else 0.", "More than configured."
    ),
    _LedgerRow("ledger/live_groups", "Live groups", unit="groups", window="last", ranks="sum")(
        "Groups with a stored state, over all ranks.", "Near the groups in flight.", "Grows: groups are not released."
    ),
    _LedgerRow(
        "ledger/fill_fraction", "Fill of the ledger", unit="fraction", window="last", ranks="max", band=(None, 0.95)
    )("Live over capacity, on the fullest rank.", "Well below 1.", "1: new groups evict others."),
)

# ---- The gradient noise scale, and layers

_GnsRow = partial(row_of, group="Gradient noise scale", window="last")
_Sequences = partial(_GnsRow, unit="sequences")
_AsBSimple = partial(_GnsRow, healthy="As gns/b_simple.", pathological="As gns/b_simple.")
_Ratio = partial(_GnsRow, unit="ratio")


def _bounds(name: str, title: str, low: str, high: str) -> tuple[MetricSpec, MetricSpec]:
    """The rows of a noise scale's bounds; `low` and `high`: what is pathological of them."""
    return (
        _Sequences(f"{name}_low", f"{title}, lower bound")("Its lower bound (97.5 %).", "Close to it.", low),
        _Sequences(f"{name}_high", f"{title}, upper bound")(
            "Its upper bound (99.99 %).", "Within a factor of two.", high
        ),
    )


GNS_ROWS: tuple[MetricSpec, ...] = (
    _Sequences("gns/b_simple", "Noise scale B_simple")(
        "tr(Sigma) / |G|^2: batch size at which gradient noise equals signal.",
        "Grows slowly as the loss falls.",
        "Far below the batch: averaging wastes compute.",
    ),
    *_bounds(
        "gns/b_simple",
        "Noise scale B_simple",
        "Above ten times gns/b_big: batch too small.",
        "Absent for long: batch far too small.",
    ),
    _Sequences("gns/b_now", "Noise scale now")(
        "The noise scale at this step, by a line through recent ones.",
        "As gns/b_simple, and above it while growing.",
        "As gns/b_simple.",
    ),
    *_bounds("gns/b_now", "Noise scale now", "As gns/b_simple_low.", "As gns/b_simple_high."),
    _Sequences("gns/b_simple_se", "Standard error of B_simple")(
        "Its standard error on the larger side.", "A small part of gns/b_simple.", "As large: average over more steps."
    ),
    _GnsRow("gns/b_now_steps", "Steps behind B now", unit="steps")(
        "Half of the steps without visible curvature.", "Grows with the run.", "Small late: noise or signal changes."
    ),
    _AsBSimple("gns/b_simple_tokens", "Noise scale in tokens", unit="tokens")(
        "gns/b_simple times the target tokens per sequence."
    ),
    _GnsRow("gns/tr_sigma", "Gradient noise tr(Sigma)")(
        "Trace of the covariance of a sequence's gradient.", "Steady.", "Negative for long: dependent micro-batches."
    ),
    _GnsRow("gns/grad_sq", "Gradient signal |G|^2")(
        "Squared norm of the true gradient, averaged.", "Falls.", "Negative for long: tiny batch."
    ),
    _Ratio("gns/consistency", "Consistency", band=(0.5, 2.0))(
        "Noise between over within ranks (or halves).", "1.", "0: same data. Large: ranks differ."
    ),
    _Ratio("gns/consistency_se", "Standard error of consistency")(
        "Its standard error on the larger side.", "Well below 1.", "1 or more: says nothing yet."
    ),
    _Sequences("gns/b_small", "Small batch")(
        "Effective sequences of a micro-batch.", "Constant.", "Far below its rows: uneven weights."
    ),
    _Sequences("gns/b_big", "Big batch")(
        "Effective sequences of the whole step.", "Constant.", "Far below its rows: uneven weights."
    ),
    _Ratio("gns/batch_ratio", "Batch over noise scale", band=(0.1, 4.0))(
        "Sequences of a step over gns/b_simple.", "0.1 to 4.", "Below: grow it. Above: shrink it."
    ),
    _GnsRow("gns/skipped", "Skipped windows", unit="steps", kind="counter", window="sum", ranks="max", band=(0.0, 0.0))(
        "Steps whose measurement failed.", "0.", "Grows: non-finite gradients, hooks run twice."
    ),
    _GnsRow("gns/left_out", "Windows left out", unit="steps", kind="counter", window="sum", ranks="max")(
        "Steps with a document in two micro-batches.", "Absent.", "Most steps: use more documents."
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
        "L2 norm of its gradient before clipping.", "Within a factor of a hundred.", "0, or nearly all of grad_norm."
    ),
    _LayerRow("layer/<name>/update_ratio", "Update over weight by layer", unit="ratio")(
        "Norm of its update over that of its weights.", "1e-4 to 1e-2 at the peak.", "Far below others; above 0.1."
    ),
)
