"""Catalog rows of the ledger of recurrent states."""

from __future__ import annotations

from trainer.metrics.catalog.spec import MetricSpec

_LEDGER = "Ledger"

ROWS: tuple[MetricSpec, ...] = (
    *(
        MetricSpec(
            name=f"ledger/evictions/{mode}",
            unit="groups",
            kind="counter",
            window="sum",
            ranks="sum_and_worst",
            group=_LEDGER,
            precision=0,
            title=f"Evictions ({mode})",
            description=f"Groups whose state was dropped {reason} since the last logged step.",
            healthy=healthy,
            pathological="Many while false evictions follow: the setting is too tight.",
        )
        for mode, reason, healthy in (
            ("lru", "for want of capacity", "0 where the capacity covers the groups in flight."),
            ("stale", "for not being stored in time", "Only groups that never come back."),
        )
    ),
    *(
        MetricSpec(
            name=f"ledger/false_evictions/{mode}",
            unit="groups",
            kind="counter",
            window="sum",
            ranks="sum_and_worst",
            group=_LEDGER,
            precision=0,
            title=f"False evictions ({mode})",
            description=f"Groups that went on after {mode} had dropped their state, so that a cell began from zero.",
            band=(0.0, 0.0),
            healthy="0.",
            pathological=pathological,
        )
        for mode, pathological in (
            ("lru", "Above 0: raise the capacity or lower the groups in flight."),
            ("stale", "Above 0: the stale threshold is shorter than the wait between two cells of a group."),
        )
    ),
    MetricSpec(
        name="ledger/cold_starts",
        unit="cells",
        kind="counter",
        window="sum",
        ranks="sum_and_worst",
        group=_LEDGER,
        precision=0,
        title="Cold starts",
        description="Cells that were not the start of a group and found no state, for whatever reason.",
        band=(0.0, 0.0),
        healthy="0.",
        pathological="Above 0: a wipe, an eviction, a refused row, or a resume without the ledger.",
    ),
    MetricSpec(
        name="ledger/refused_rows",
        unit="rows",
        kind="counter",
        window="sum",
        ranks="sum_and_worst",
        group=_LEDGER,
        precision=0,
        title="Refused rows",
        description="States that were not stored because they were not finite.",
        band=(0.0, 0.0),
        healthy="0.",
        pathological="Above 0: the recurrence overflows.",
    ),
    MetricSpec(
        name="ledger_wipe_count",
        unit="wipes",
        kind="counter",
        window="sum",
        ranks="sum_and_worst",
        group=_LEDGER,
        precision=0,
        title="Full wipes",
        description="Wipes of the whole ledger since the last logged step, by rank.",
        healthy="As configured; 0 in the other modes.",
        pathological="More than configured.",
    ),
    MetricSpec(
        name="ledger/live_groups",
        unit="groups",
        window="last",
        ranks="sum",
        group=_LEDGER,
        precision=0,
        title="Live groups",
        description="Groups whose state is held, over all ranks.",
        healthy="Near the groups in flight.",
        pathological="Grows to the capacity: groups are not released.",
    ),
    MetricSpec(
        name="ledger/fill_fraction",
        unit="fraction",
        window="last",
        ranks="max",
        group=_LEDGER,
        title="Fill of the ledger",
        description="Live groups over capacity, on the fullest rank.",
        band=(None, 0.95),
        healthy="Below 1 with room to spare.",
        pathological="1: each new group drops another one.",
    ),
)
