"""Catalog rows of the data (stream mixing and blending) and of the ledger of recurrent states."""

from __future__ import annotations

from functools import partial

from trainer.metrics.catalog.spec import MetricSpec

_MixingRow = partial(MetricSpec, group="Stream mixing", window="last")
_BlendRow = partial(MetricSpec, group="Blend", window="last")
_TokenMean = partial(_BlendRow, unit="nats/token", window="weighted_mean", ranks="weighted_mean")
_LedgerRow = partial(MetricSpec, group="Ledger")
_Counter = partial(_LedgerRow, kind="counter", window="sum", ranks="sum_and_worst")
_MustBeZero = partial(_Counter, band=(0.0, 0.0), healthy="0.")

_Probed = partial(_LedgerRow, window="last", ranks="mean_and_error")

ROWS: tuple[MetricSpec, ...] = (
    _MixingRow(
        name="stream_mixing/active/remaining_min",
        unit="picks",
        ranks="min",
        title="Remaining picks, minimum",
        description="Fewest picks left of an active reader.",
        healthy="Often 1 or 0 with refill: readers drain together.",
        pathological="Never low while others drain: a reader is not picked.",
    ),
    _MixingRow(
        name="stream_mixing/active/remaining_max",
        unit="picks",
        ranks="max",
        title="Remaining picks, maximum",
        description="Most picks left of an active reader.",
        healthy="At most a whole slice's picks.",
        pathological="Constant: that reader is stuck.",
    ),
    _MixingRow(
        name="stream_mixing/active/remaining_fraction_min",
        unit="fraction",
        ranks="min",
        title="Remaining fraction, minimum",
        description="Smallest fraction of a slice left to an active reader; 0 once a rank has read its part of an open one.",
        healthy="Mostly low with refill.",
        pathological="Outside 0 to 1: a cursor is wrong.",
    ),
    _MixingRow(
        name="stream_mixing/active/remaining_fraction_max",
        unit="fraction",
        ranks="max",
        title="Remaining fraction, maximum",
        description="Largest fraction of a slice left to an active reader.",
        healthy="About 0.6 above the minimum with refill.",
        pathological="1 for long: that reader is never picked.",
    ),
    _MixingRow(
        name="stream_mixing/active/modalities/<modality>",
        unit="readers",
        ranks="sum",
        title="Active readers by modality",
        description="Active readers of one modality over all ranks.",
        healthy="Close to its share of the streams.",
        pathological="0 for long: that modality starves.",
    ),
    _MixingRow(
        name="stream_mixing/active/steps_since_pick_max",
        unit="picks",
        ranks="max",
        title="Longest wait",
        description="Most picks since an active reader was last picked.",
        healthy="Up to the pool's remaining picks.",
        pathological="Grows without bound: see pick_surprise_max.",
    ),
    _MixingRow(
        name="stream_mixing/active/pick_surprise_max",
        unit="nats",
        ranks="max",
        title="Pick surprise",
        description="Largest sum of -ln(1 - p) since a reader was last picked; exponential with mean 1.",
        healthy="Below ln(steps / alpha): about 12 for 200 steps, 21 for a million.",
        pathological="Above: a reader is picked too rarely.",
    ),
    _MixingRow(
        name="stream_mixing/refill/exhaust_events",
        unit="events",
        kind="counter",
        window="sum",
        ranks="sum",
        title="Exhausted readers",
        description="Readers that reached the end of their slice.",
        healthy="About ranks over picks per slice, per micro-batch.",
        pathological="Bursts: the mix narrows.",
    ),
    _MixingRow(
        name="stream_mixing/masked_share",
        unit="fraction",
        window="mean",
        ranks="max",
        title="Masked share",
        description="Share of micro-batches without a target, on the worst rank.",
        healthy="Near 0.",
        pathological="High: data exhausted, or streams with fewer groups than ranks.",
    ),
    _BlendRow(
        name="blend/max_share_error",
        unit="fraction",
        ranks="max",
        title="Blend share error",
        description="Largest difference between a source's actual and configured share so far.",
        healthy="Shrinks with the root of the batches.",
        pathological="Flat or growing: a source is exhausted or a weight ignored.",
    ),
    _BlendRow(
        name="blend/ended_sources",
        unit="sources",
        ranks="max",
        title="Exhausted sources",
        description="Sources without data left, on the worst rank.",
        healthy="0 with data.mixing.repeat.",
        pathological="Above 0 early in the run.",
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
            pathological="Rises while the total falls: starved or in conflict.",
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
            pathological="Followed by false evictions.",
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
        description="Cells that continued a group but found no state.",
        pathological="Above 0: wipe, eviction, refused row, or resume without ledger.",
    ),
    _MustBeZero(
        name="ledger/refused_rows",
        unit="rows",
        title="Refused rows",
        description="Non-finite states, which are not stored.",
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
    *(
        _Counter(
            name=f"ledger/starts/{kind}",
            unit="groups",
            title=f"Starts ({kind})",
            description=f"Groups that began from {what} (ledger.start).",
            healthy="In the configured share.",
            pathological="Only starts from zero: no state is held yet.",
        )
        for kind, what in (("zero", "zero"), ("carried", "another group's state"), ("noise", "noise"))
    ),
    _Probed(
        name="ledger/state_age",
        unit="steps",
        title="Age of the states",
        description="Steps since the probed cells' states were stored.",
        healthy="About the streams in flight per micro-batch.",
        pathological="Grows: more streams, or uneven turns.",
    ),
    _Probed(
        name="ledger/state_drift",
        unit="ratio",
        title="State drift",
        description="|stored - fresh| / |fresh| of the probed states; fresh: by current weights.",
        healthy="Falls with the learning rate; exactly 0 without learning.",
        pathological="Large with a stale gap.",
    ),
    _Probed(
        name="ledger/carry_gain",
        unit="nats",
        title="Gain of carrying",
        description="Probed loss from zero minus that from stored states, per token.",
        healthy="Positive, growing as the model learns to use its state.",
        pathological="0 within its error: carried state is unused.",
    ),
    _Probed(
        name="ledger/stale_gap",
        unit="nats",
        title="Gap of stale states",
        description="Probed loss from stored minus that from fresh states, per token.",
        healthy="0 within its error, or far below the gain.",
        pathological="Negative: inference worse than training. Positive: old states cost loss.",
    ),
    _LedgerRow(
        name="ledger/probe_share",
        unit="fraction",
        window="weighted_mean",
        ranks="weighted_mean",
        title="Share of cells probed",
        description="Share of the continuing cells that the probe could measure.",
        healthy="Near 1.",
        pathological="Small: groups longer than ledger.probe_cells.",
    ),
    _LedgerRow(
        name="ledger/live_groups",
        unit="groups",
        window="last",
        ranks="sum",
        title="Live groups",
        description="Groups with a stored state, over all ranks.",
        healthy="Close to the groups in flight.",
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
        healthy="Well below 1.",
        pathological="1: each new group evicts another one.",
    ),
)
