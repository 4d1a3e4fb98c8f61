"""Catalog rows of the data: stream mixing and blending."""

from __future__ import annotations

from functools import partial

from trainer.metrics.catalog.spec import MetricSpec

_MixingRow = partial(MetricSpec, group="Stream mixing", window="last")
_MixingCount = partial(_MixingRow, precision=0)
_BlendRow = partial(MetricSpec, group="Blend", window="last")
_TokenMean = partial(_BlendRow, unit="nats/token", window="weighted_mean", ranks="weighted_mean")

ROWS: tuple[MetricSpec, ...] = (
    _MixingCount(
        name="stream_mixing/active/remaining_min",
        unit="picks",
        ranks="min",
        title="Remaining picks, minimum",
        description="Fewest remaining picks among the active readers.",
        healthy="Often 1 or 0 in a pool with refill: readers drain together and are replaced.",
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
        healthy="About 0.6 above the minimum with refill; within 3/sqrt(picks per slice) of it in a closed pool of one rank.",
        pathological="1 for long: a reader is never picked.",
    ),
    _MixingCount(
        name="stream_mixing/active/modalities/<modality>",
        unit="readers",
        ranks="sum",
        title="Active readers by modality",
        description="Active readers of one modality over all ranks; zero is reported too, once its source was drawn.",
        healthy="Close to its share of the streams.",
        pathological="0 for long: that modality starves.",
    ),
    _MixingCount(
        name="stream_mixing/active/steps_since_pick_max",
        unit="picks",
        ranks="max",
        title="Longest wait",
        description="Most picks since an active reader was last picked.",
        healthy="Up to the remaining picks of the whole pool; there is no fixed threshold.",
        pathological="Grows without bound: see pick_surprise_max for how improbable the wait is.",
    ),
    _MixingRow(
        name="stream_mixing/active/pick_surprise_max",
        unit="nats",
        ranks="max",
        precision=2,
        title="Pick surprise",
        description="Largest sum of -ln(1 - p) since an active reader was last picked; exponential with mean 1.",
        healthy="Below ln(steps / alpha): about 12 for 200 steps, 21 for a million.",
        pathological="Above that: a reader is picked less often than its weight implies.",
    ),
    _MixingCount(
        name="stream_mixing/refill/exhaust_events",
        unit="events",
        kind="counter",
        window="sum",
        ranks="sum",
        title="Exhausted readers",
        description="Readers that reached the end of their slice since the last logged step, over all ranks.",
        healthy="About ranks divided by picks per slice, per micro-batch.",
        pathological="Bursts: all readers end together and the mix narrows.",
    ),
    _MixingRow(
        name="stream_mixing/masked_share",
        unit="fraction",
        window="mean",
        ranks="max",
        title="Masked share",
        description="Share of the micro-batches since the last logged step in which a rank had no target; the worst rank's.",
        healthy="Near 0. With a shared pool, ranks wait at the end of a stream, since slices differ by up to a group.",
        pathological="High: that rank has little to read. Streams have fewer groups than there are ranks, or its data "
        "are exhausted.",
    ),
    _BlendRow(
        name="blend/max_share_error",
        unit="fraction",
        ranks="max",
        title="Blend share error",
        description="Largest difference between a source's actual and configured share of the micro-batches so far.",
        healthy="Shrinks as one over the square root of the number of batches.",
        pathological="Flat or growing: a source is exhausted or a weight is not followed.",
    ),
    _BlendRow(
        name="blend/ended_sources",
        unit="sources",
        ranks="max",
        precision=0,
        title="Exhausted sources",
        description="Sources of the blend that have no data left; the worst rank's.",
        healthy="0; with data.mixing.repeat = false it grows towards the end.",
        pathological="Above 0 early: the rest of the run is trained on the other sources.",
    ),
    _BlendRow(
        name="blend/share/<source>",
        unit="fraction",
        title="Share of source",
        description="Actual share of one source (only with metrics.per_source).",
        healthy="Close to its configured weight.",
        pathological="0 although its weight is positive.",
    ),
    _TokenMean(
        name="source/<source>/loss",
        title="Loss of source",
        description="Cross-entropy over the tokens of one source (only with metrics.per_source).",
        healthy="Falls for each source that is read.",
        pathological="Rises for one source while the total falls: it is starved, or conflicts with the others.",
    ),
    _TokenMean(
        name="modality/<modality>/loss",
        title="Loss of modality",
        description="Cross-entropy over the tokens of one modality (only with metrics.per_source).",
        healthy="Falls for each modality that is read.",
        pathological="Rises for one modality while the total falls.",
    ),
)
