"""Catalog rows of the ledger of recurrent states."""

from __future__ import annotations

from functools import partial

from trainer.metrics.catalog.spec import MetricSpec

_Row = partial(MetricSpec, group="Ledger")
_Counter = partial(_Row, kind="counter", window="sum", ranks="sum_and_worst", precision=0)
_MustBeZero = partial(_Counter, band=(0.0, 0.0), healthy="0.")

_Probed = partial(_Row, window="last", ranks="mean_and_error")

ROWS: tuple[MetricSpec, ...] = (
    *(
        _Counter(
            name=f"ledger/evictions/{mode}",
            unit="groups",
            title=f"Evictions ({mode})",
            description=f"Groups whose state was dropped since the last logged step {reason}.",
            healthy=healthy,
            pathological="Many, followed by false evictions: the setting is too tight.",
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
            description=f"Groups that continued after {mode} had dropped their state, so that a cell started from zero.",
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
        description="Wipes of the whole ledger since the last logged step, summed over ranks.",
        healthy="As configured; 0 in the other modes.",
        pathological="More than configured.",
    ),
    _Probed(
        name="ledger/state_age",
        unit="steps",
        precision=1,
        title="Age of the states",
        description="Steps since the states of the probed cells were stored, mean.",
        healthy="About the streams in flight per micro-batch of a step.",
        pathological="Grows: more streams are in flight, or their turns come unevenly.",
    ),
    _Probed(
        name="ledger/state_drift",
        unit="ratio",
        title="State drift",
        description="|stored - fresh| / |fresh|, mean over the probed cells; fresh is the state that the current weights give.",
        healthy="Falls with the learning rate; exactly 0 without learning.",
        pathological="Large with a stale gap: the states are those of another model.",
    ),
    _Probed(
        name="ledger/carry_gain",
        unit="nats",
        title="Gain of carrying",
        description="Loss of the probed cells from a zero state minus their loss from the stored state, per token.",
        healthy="Clearly positive, and growing while the model learns to use its state.",
        pathological="0 within its error: the model does not use what is carried.",
    ),
    _Probed(
        name="ledger/stale_gap",
        unit="nats",
        title="Gap of stale states",
        description="Loss of the probed cells from the stored state minus their loss from the fresh one, per token.",
        healthy="0 within its error, or far below the gain.",
        pathological="Negative: training looks better than inference will be. Positive: old states cost loss.",
    ),
    _Row(
        name="ledger/probe_share",
        unit="fraction",
        window="weighted_mean",
        ranks="weighted_mean",
        title="Share of cells probed",
        description="Cells that the probe measured, of those that continue a group in the micro-batches it looked at.",
        healthy="Near 1: the numbers stand for all cells.",
        pathological="Small: groups are longer than ledger.probe_cells, and the numbers stand for their first cells alone.",
    ),
    _Row(
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
    _Row(
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
