"""Catalog rows of the data (stream mixing and blending) and of the ledger of recurrent states."""

from __future__ import annotations

from functools import partial
from typing import Final

from trainer.metrics.catalog.spec import MetricSpec, row_of

EPOCHS: Final = "data/epochs/"
"""A data set reports what was read since its last report, the tracker the total since the start."""

_MixingRow = partial(row_of, group="Stream mixing", window="last")
_BlendRow = partial(row_of, group="Blend", window="last")
_TokenMean = partial(_BlendRow, unit="nats/token", window="weighted_mean", ranks="weighted_mean")
_LedgerRow = partial(row_of, group="Ledger")
_Counter = partial(_LedgerRow, kind="counter", window="sum", ranks="sum_and_worst")
_MustBeZero = partial(_Counter, band=(0.0, 0.0), healthy="0.")

ROWS: tuple[MetricSpec, ...] = (
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
        _TokenMean(f"{part}/<{part}>/loss", f"Loss of {part}")(
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
        _MustBeZero(f"ledger/false_evictions/{mode}", f"False evictions ({mode})", unit="groups")(
            f"Groups that continued from zero after an eviction ({mode}).", pathological=f"Above 0: {fix}."
        )
        for mode, fix in (
            ("lru", "raise the capacity or lower the number of groups in flight"),
            ("stale", "the stale threshold is shorter than the interval between two cells of a group"),
        )
    ),
    _MustBeZero("ledger/cold_starts", "Cold starts", unit="cells")(
        "Cells that continued a group but found no state.",
        pathological="Above 0: wipe, eviction, refused row, or resume without ledger.",
    ),
    _MustBeZero("ledger/refused_rows", "Refused rows", unit="rows")(
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
