"""Catalog rows of the data: stream mixing and blend."""

from __future__ import annotations

from trainer.metrics.catalog_spec import MetricSpec

_MIXING = "Stream mixing"
_BLEND = "Blend"

MIXING_ROWS = (
    MetricSpec(
        name="stream_mixing/active/remaining_min",
        unit="picks",
        window="last",
        ranks="min",
        group=_MIXING,
        precision=0,
        title="Remaining picks, least",
        description="Fewest picks left among the active readers.",
        healthy="Often 1 or 0 in a pool with refill: readers drain together and are replaced.",
        pathological="Never low while others are drained: a reader that is not picked.",
    ),
    MetricSpec(
        name="stream_mixing/active/remaining_max",
        unit="picks",
        window="last",
        ranks="max",
        group=_MIXING,
        precision=0,
        title="Remaining picks, most",
        description="Most picks left among the active readers.",
        healthy="At most the picks of a whole slice.",
        pathological="Stays at one value: that reader is stuck.",
    ),
    MetricSpec(
        name="stream_mixing/active/remaining_fraction_min",
        unit="fraction",
        window="last",
        ranks="min",
        group=_MIXING,
        title="Remaining fraction, least",
        description="Smallest share of its slice that an active reader has left.",
        healthy="Between 0 and 1, low most of the time with refill.",
        pathological="Outside 0 to 1: a cursor is wrong.",
    ),
    MetricSpec(
        name="stream_mixing/active/remaining_fraction_max",
        unit="fraction",
        window="last",
        ranks="max",
        group=_MIXING,
        title="Remaining fraction, most",
        description="Largest share of its slice that an active reader has left.",
        healthy="Spread to the least of about 0.6 with refill; within 3/sqrt(picks per slice) in a closed pool.",
        pathological="1 for long: a reader that is never picked.",
    ),
    MetricSpec(
        name="stream_mixing/active/modalities/<modality>",
        unit="readers",
        window="last",
        ranks="sum",
        group=_MIXING,
        precision=0,
        title="Active readers by modality",
        description="Active readers of one modality over all ranks; zero is reported too.",
        healthy="Near its share of the streams.",
        pathological="0 for long: that modality starves.",
    ),
    MetricSpec(
        name="stream_mixing/active/steps_since_pick_max",
        unit="picks",
        window="last",
        ranks="max",
        group=_MIXING,
        precision=0,
        title="Longest wait",
        description="Most picks that an active reader has waited for its next one.",
        healthy="Up to the remaining picks of the whole pool; no fixed threshold holds.",
        pathological="Grows without end: see pick_surprise_max, which says how improbable the wait is.",
    ),
    MetricSpec(
        name="stream_mixing/active/pick_surprise_max",
        unit="nats",
        window="last",
        ranks="max",
        group=_MIXING,
        precision=2,
        title="Pick surprise",
        description="Largest sum of -ln(1 - p) over an active reader's picks since its last one; a unit exponential.",
        healthy="Below ln(steps / alpha): about 12 for 200 steps, 21 for a million.",
        pathological="Above that: a reader is passed over more often than its weight explains.",
    ),
    MetricSpec(
        name="stream_mixing/refill/exhaust_events",
        unit="events",
        kind="counter",
        window="sum",
        ranks="sum",
        group=_MIXING,
        precision=0,
        title="Exhausted readers",
        description="Readers that came to the end of their slice since the last logged step, over all ranks.",
        healthy="Per micro-batch about ranks over picks per slice.",
        pathological="Bursts: all readers end together and the mix narrows.",
    ),
)

BLEND_ROWS = (
    MetricSpec(
        name="blend/max_share_error",
        unit="fraction",
        window="last",
        ranks="max",
        group=_BLEND,
        title="Blend share error",
        description="Largest distance between a source's realised and configured share of the samples so far.",
        healthy="Shrinks as one over the square root of the batches.",
        pathological="Level or growing: a source is exhausted or a weight is not followed.",
    ),
    MetricSpec(
        name="blend/share/<source>",
        unit="fraction",
        window="last",
        ranks="mean",
        group=_BLEND,
        title="Share of source",
        description="Realised share of one source (only with metrics.per_source).",
        healthy="Near its configured weight.",
        pathological="0 though its weight is not.",
    ),
)

ROWS: tuple[MetricSpec, ...] = MIXING_ROWS + BLEND_ROWS
