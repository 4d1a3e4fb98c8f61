"""Catalog rows of the ledger of recurrent states."""

from __future__ import annotations

from functools import partial

from trainer.metrics.catalog.spec import MetricSpec

_Row = partial(MetricSpec, group="Ledger")
_Counter = partial(_Row, kind="counter", window="sum", ranks="sum_and_worst", precision=0)
_MustBeZero = partial(_Counter, band=(0.0, 0.0), healthy="0.")

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
