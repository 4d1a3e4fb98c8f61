"""Catalog rows of the data (stream mixing and blending) and of the ledger of recurrent states."""

from __future__ import annotations

from functools import partial

from trainer.metrics.catalog.spec import MetricSpec

_MixingRow = partial(MetricSpec, group="Stream mixing", window="last")
_MixingCount = partial(_MixingRow, precision=0)
_BlendRow = partial(MetricSpec, group="Blend", window="last")
_TokenMean = partial(_BlendRow, unit="nats/token", window="weighted_mean", ranks="weighted_mean")
_LedgerRow = partial(MetricSpec, group="Ledger")
_Counter = partial(_LedgerRow, kind="counter", window="sum", ranks="sum_and_worst", precision=0)
_MustBeZero = partial(_Counter, band=(0.0, 0.0), healthy="0.")

_Probed = partial(_LedgerRow, window="last", ranks="mean_and_error")

ROWS: tuple[MetricSpec, ...] = (
    _MixingCount(
        name="stream_mixing/active/remaining_min",
        unit="picks",
        ranks="min",
        title="Remaining picks, minimum",
        description="Fewest remaining picks among the active readers.",
        healthy="Often 1 or 0 with refill: readers drain together.",
        pathological="Never low while others are drained: some reader is not picked.",
    ),
    _MixingCount(
        name="stream_mixing/active/remaining_max",
        unit="picks",
        ranks="max",
        title="Remaining picks, maximum",
        description="Most remaining picks among the active readers.",
        healthy="At most the picks of a whole slice.",
        pathological="Constant: that reader is stuck.",
    ),
    _MixingRow(
        name="stream_mixing/active/remaining_fraction_min",
        unit="fraction",
        ranks="min",
        title="Remaining fraction, minimum",
        description="Smallest remaining fraction of a slice among the active readers.",
        healthy="Between 0 and 1, low most of the time with refill.",
        pathological="Outside 0 to 1: a cursor is wrong.",
    ),
    _MixingRow(
        name="stream_mixing/active/remaining_fraction_max",
        unit="fraction",
        ranks="max",
        title="Remaining fraction, maximum",
        description="Largest remaining fraction of a slice among the active readers.",
        healthy="About 0.6 above the minimum with refill.",
        pathological="1 for long: that reader is never picked.",
    ),
    _MixingCount(
        name="stream_mixing/active/modalities/<modality>",
        unit="readers",
        ranks="sum",
        title="Active readers by modality",
        description="Active readers of one modality over all ranks.",
        healthy="Close to its share of the streams.",
        pathological="0 for long: that modality starves.",
    ),
    _MixingCount(
        name="stream_mixing/active/steps_since_pick_max",
        unit="picks",
        ranks="max",
        title="Longest wait",
        description="Most picks since an active reader was last picked.",
        healthy="Up to the remaining picks of the whole pool.",
        pathological="Grows without bound: see pick_surprise_max.",
    ),
    _MixingRow(
        name="stream_mixing/active/pick_surprise_max",
        unit="nats",
        ranks="max",
        precision=2,
        title="Pick surprise",
        description="Largest sum of -ln(1 - p) since a reader was last picked; exponential with mean 1.",
        healthy="Below ln(steps / alpha): about 12 for 200 steps, 21 for a million.",
        pathological="Above: a reader is picked less often than its weight implies.",
    ),
    _MixingCount(
        name="stream_mixing/refill/exhaust_events",
        unit="events",
        kind="counter",
        window="sum",
        ranks="sum",
        title="Exhausted readers",
        description="Readers that reached the end of their slice.",
        healthy="About ranks over picks per slice, per micro-batch.",
        pathological="Bursts: all readers end together and the mix narrows.",
    ),
    _MixingRow(
        name="stream_mixing/masked_share",
        unit="fraction",
        window="mean",
        ranks="max",
        title="Masked share",
        description="Share of the micro-batches without a target, on the worst rank.",
        healthy="Near 0; ranks of a shared pool wait at the end of a stream.",
        pathological="High: its data are exhausted, or streams have fewer groups than there are ranks.",
    ),
    _BlendRow(
        name="blend/max_share_error",
        unit="fraction",
        ranks="max",
        title="Blend share error",
        description="Largest difference between a source's actual and configured share so far.",
        healthy="Shrinks with the root of the number of batches.",
        pathological="Flat or growing: a source is exhausted or a weight is not followed.",
    ),
    _BlendRow(
        name="blend/ended_sources",
        unit="sources",
        ranks="max",
        precision=0,
        title="Exhausted sources",
        description="Sources that have no data left, on the worst rank.",
        healthy="0, or growing towards the end without data.mixing.repeat.",
        pathological="Above 0 early: only other sources are left.",
    ),
    _BlendRow(
        name="blend/share/<source>",
        unit="fraction",
        title="Share of source",
        description="Actual share of one source (metrics.per_source).",
        healthy="Close to its configured weight.",
        pathological="0 although its weight is positive.",
    ),
    *(
        _TokenMean(
            name=f"{part}/<{part}>/loss",
            title=f"Loss of {part}",
            description=f"Cross-entropy over the tokens of one {part} (metrics.per_source).",
            healthy="Falls.",
            pathological="Rises while the total falls: starved, or in conflict with the others.",
        )
        for part in ("source", "modality")
    ),
    *(
        _Counter(
            name=f"ledger/evictions/{mode}",
            unit="groups",
            title=f"Evictions ({mode})",
            description=f"Groups whose state was dropped {reason}.",
            healthy=healthy,
            pathological="Followed by false evictions: the setting is too tight.",
        )
        for mode, reason, healthy in (
            ("lru", "because the ledger was full", "0 if the capacity covers the groups in flight."),
            ("stale", "because they were not stored in time", "Only groups that never return."),
        )
    ),
    *(
        _MustBeZero(
            name=f"ledger/false_evictions/{mode}",
            unit="groups",
            title=f"False evictions ({mode})",
            description=f"Groups that continued from zero after an eviction ({mode}).",
            pathological=f"Above 0: {fix}.",
        )
        for mode, fix in (
            ("lru", "raise the capacity or lower the number of groups in flight"),
            ("stale", "the stale threshold is shorter than the interval between two cells of a group"),
        )
    ),
    _MustBeZero(
        name="ledger/cold_starts",
        unit="cells",
        title="Cold starts",
        description="Cells that continued a group but found no state, for any reason.",
        pathological="Above 0: a wipe, an eviction, a refused row, or a resume without the ledger.",
    ),
    _MustBeZero(
        name="ledger/refused_rows",
        unit="rows",
        title="Refused rows",
        description="States that were not stored because they were not finite.",
        pathological="Above 0: the recurrence overflows.",
    ),
    _Counter(
        name="ledger_wipe_count",
        unit="wipes",
        title="Full wipes",
        description="Wipes of the whole ledger.",
        healthy="As configured; 0 in the other modes.",
        pathological="More than configured.",
    ),
    _Probed(
        name="ledger/state_age",
        unit="steps",
        precision=1,
        title="Age of the states",
        description="Steps since the probed cells' states were stored.",
        healthy="About the streams in flight per micro-batch.",
        pathological="Grows: more streams, or uneven turns.",
    ),
    _Probed(
        name="ledger/state_drift",
        unit="ratio",
        title="State drift",
        description="|stored - fresh| / |fresh| of the probed cells' states; fresh: by the current weights.",
        healthy="Falls with the learning rate; exactly 0 without learning.",
        pathological="Large with a stale gap: the states are those of another model.",
    ),
    _Probed(
        name="ledger/carry_gain",
        unit="nats",
        title="Gain of carrying",
        description="Loss of the probed cells from a zero state minus that from the stored one, per token.",
        healthy="Positive, and growing while the model learns to use its state.",
        pathological="0 within its error: the model does not use what is carried.",
    ),
    _Probed(
        name="ledger/stale_gap",
        unit="nats",
        title="Gap of stale states",
        description="Loss of the probed cells from the stored state minus that from the fresh one, per token.",
        healthy="0 within its error, or far below the gain.",
        pathological="Negative: inference will be worse than training. Positive: old states cost loss.",
    ),
    _LedgerRow(
        name="ledger/probe_share",
        unit="fraction",
        window="weighted_mean",
        ranks="weighted_mean",
        title="Share of cells probed",
        description="Share of the continuing cells it looked at that the probe could measure.",
        healthy="Near 1: the numbers stand for all cells.",
        pathological="Small: groups are longer than ledger.probe_cells; only first cells count.",
    ),
    _LedgerRow(
        name="ledger/live_groups",
        unit="groups",
        window="last",
        ranks="sum",
        precision=0,
        title="Live groups",
        description="Groups with a stored state, over all ranks.",
        healthy="Close to the number of groups in flight.",
        pathological="Grows to the capacity: groups are not released.",
    ),
    _LedgerRow(
        name="ledger/fill_fraction",
        unit="fraction",
        window="last",
        ranks="max",
        title="Fill of the ledger",
        description="Live groups divided by capacity, on the fullest rank.",
        band=(None, 0.95),
        healthy="Below 1 with room to spare.",
        pathological="1: each new group evicts another one.",
    ),
)
