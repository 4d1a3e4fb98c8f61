"""Charts that combine several keys: the pool, the ledger, the noise scale against the batch, layers, the time of a step."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from trainer.metrics.catalog.lookup import family, keys_under, lookup
from trainer.metrics.catalog.rows_gns import LAYER_ROWS
from trainer.tools.diagnostics.rule import batches_through
from trainer.tools.report.charts import (
    Chart,
    Columns,
    Line,
    Reference,
    Style,
    family_of,
    is_error,
    make_facts,
    variant_of,
)
from trainer.tools.report.curves import Curve, band_curve, make_curve, running_total
from trainer.tools.runs.noise_scale import B_BIG, READINGS, noise_scale_of
from trainer.wording import counted

# One healthy run in a thousand exceeds the bound on the pick surprise (docs/mixing.md).
SURPRISE_ALPHA: Final = 1e-3


@dataclass(frozen=True, kw_only=True)
class View:
    """Keys that are read together.

    Attributes:
        rows: names of catalog rows; a pattern stands for all its keys.
        what, healthy, trouble: the facts of the chart.
        style: for a single run; several runs are drawn as lines.
        is_total: draw running totals.
        is_log: logarithmic scale.
        max_keys: lines of one color that are readable if colors stand for runs; beyond, the keys get separate charts.
        references: horizontal lines.
        spread_rows: lower and upper bound of the first row, drawn as a band around it.
    """

    title: str
    rows: tuple[str, ...]
    what: str
    healthy: str = ""
    trouble: str = ""
    style: Style = "line"
    is_total: bool = False
    is_log: bool = False
    max_keys: int = 1
    references: Callable[[Columns], tuple[Reference, ...]] = lambda columns: ()
    spread_rows: tuple[str, ...] = ()


def _capacity(columns: Columns) -> tuple[Reference, ...]:
    found = []
    for number, run in enumerate(columns.runs):
        capacity, ranks = run.setting("ledger.capacity"), run.world_size
        if isinstance(capacity, int) and ranks is not None:
            found.append(Reference(f"capacity of {counted(ranks, 'rank')}", float(capacity * ranks), number))
    return tuple(found)


def _surprise_bound(columns: Columns) -> tuple[Reference, ...]:
    found = []
    for number, run in enumerate(columns.runs):
        if run.steps:
            picks = batches_through(run, run.steps[-1])
            found.append(Reference("ln(picks / 0.001)", math.log(max(picks, 1) / SURPRISE_ALPHA), number))
    return tuple(found)


VIEWS: Final = (
    View(
        title="Step time by phase (share)",
        rows=("time/data_share", "time/forward_backward_share", "time/optimizer_share"),
        what="Share of step time in each phase, on the slowest rank.",
        healthy="Nearly all of it in forward and backward, and constant.",
        trouble="Waiting for data above a few percent: data loading is the bottleneck.",
        style="area",
    ),
    View(
        title="Step time by phase (seconds)",
        rows=("time/data_sec", "time/forward_backward_sec", "time/optimizer_sec"),
        what="Host time of the logged step in each phase, on the slowest rank.",
    ),
    View(
        title="Device memory",
        rows=("gpu/allocated_gb", "gpu/peak_gb", "gpu/reserved_gb", "gpu/total_gb"),
        what="Memory of the device with the highest use.",
        trouble="Allocated memory that grows from step to step is a leak.",
    ),
    View(
        title="Pool: active readers by modality",
        rows=("stream_mixing/active/modalities/<modality>",),
        what="Active readers over all ranks, stacked by modality.",
        healthy="Each modality close to its share of the streams.",
        trouble="A modality that stays at 0 is starved.",
        style="area",
    ),
    View(
        title="Pool: remaining picks per reader",
        rows=("stream_mixing/active/remaining_min", "stream_mixing/active/remaining_max"),
        what="Fewest and most remaining picks among the active readers.",
        healthy="The minimum is often near 0 in a pool with refill; the maximum is at most a whole slice.",
        trouble="A line that stays at one value: that reader is stuck.",
        max_keys=2,
    ),
    View(
        title="Pool: remaining fraction of the slice per reader",
        rows=("stream_mixing/active/remaining_fraction_min", "stream_mixing/active/remaining_fraction_max"),
        what="Smallest and largest remaining fraction of its slice among the active readers.",
        max_keys=2,
    ),
    View(
        title="Pool: surprise of the longest wait",
        rows=("stream_mixing/active/pick_surprise_max",),
        what="How improbable the longest wait for a pick is, in nats, and the bound for a run of this length.",
        healthy="Below the bound, which one healthy run in a thousand exceeds.",
        trouble="Above it: a reader is passed over more often than its weight explains.",
        references=_surprise_bound,
    ),
    View(
        title="Ledger: live groups",
        rows=("ledger/live_groups",),
        what="Groups with a stored state over all ranks, and the capacity.",
        healthy="Constant, with room to spare.",
        trouble="At the capacity: each new group evicts the state of another.",
        references=_capacity,
    ),
    View(
        title="Ledger: lost state, running total",
        rows=(*keys_under("ledger/false_evictions/"), "ledger/cold_starts"),
        what="Groups that continued after their state was evicted, and cells that started from zero state, since the start.",
        healthy="0 throughout.",
        trouble="A rising line: recurrent state is lost while it is needed.",
        is_total=True,
        max_keys=3,
    ),
    View(
        title="Ledger: evictions, running total",
        rows=keys_under("ledger/evictions/"),
        what="Groups whose state was evicted since the start, whether still needed or not.",
        is_total=True,
        max_keys=2,
    ),
    View(
        title="Ledger: what carrying is worth",
        rows=("ledger/carry_gain", "ledger/stale_gap"),
        what="Gain: loss from a zero state minus loss from the stored one. Gap: loss from the stored state minus loss from "
        "the one that the current weights give. Bands of two standard errors.",
        healthy="A gain clearly above 0, and a gap whose band holds 0 or that is far smaller than the gain.",
        trouble="A gain of 0: the ledger is overhead. A gap that is not small against the gain: states are stale.",
        max_keys=2,
    ),
    *(
        View(
            title=spec.title,
            rows=(spec.name,),
            what=spec.description,
            healthy=spec.healthy,
            trouble=spec.pathological,
            style="heat",
        )
        for spec in LAYER_ROWS
    ),
)


def _noise_scale_views(columns: Columns) -> list[View]:
    """A view of each key that the noise scale of a run is read from (`noise_scale_of`), the first where none can be read."""
    scales = [scale for run in columns.runs if (scale := noise_scale_of(run)) is not None]
    read = sorted({scale.key for scale in scales}, key=READINGS.index) or ["gns/b_now"]
    return [
        View(
            title="Noise scale and batch size" + (f" ({key})" if len(read) > 1 else ""),
            rows=(key, f"{key}_low", B_BIG),
            what=f"The noise scale ({key}, which the tile and the diagnosis read in the last row) with its bounds, and the "
            "number of sequences per step. Where it has no upper bound, only the lower.",
            healthy="A batch between a tenth of the noise scale and the noise scale.",
            trouble="A batch far above it wastes compute on averaging; far below, gradient noise dominates the steps.",
            is_log=True,
            max_keys=3,
            spread_rows=(f"{key}_low", f"{key}_high"),
        )
        for key in read
    ]


def make_views(columns: Columns, keys: Sequence[str]) -> tuple[list[Chart], set[str]]:
    """(charts, the keys that they show). Skips views with too many lines for several runs."""
    charts, used = [], set[str]()
    for view in (*_noise_scale_views(columns), *VIEWS):
        shown = [key for row in view.rows for key in keys if _belongs(key, row) and columns.curves(key)]
        if not shown or (not columns.is_single and len(shown) > view.max_keys):
            continue
        if view.style == "heat":
            shown.sort(key=_natural_order)
        charts.append(_chart(view, columns, shown))
        used.update(shown)
        used.update(view.spread_rows)
    return charts, used


def _natural_order(key: str) -> list[tuple[int, str]]:
    """So that `blocks.10` follows `blocks.9`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", key)]


def _belongs(key: str, row: str) -> bool:
    return variant_of(key)[1] == "train" and family_of(key)[0] == row and not is_error(key)


def _chart(view: View, columns: Columns, keys: Sequence[str]) -> Chart:
    lines = []
    names = _short_names([family(key)[1] or lookup(key).title for key in keys])
    for number, (key, name) in enumerate(zip(keys, names, strict=True)):
        for run, curve in columns.curves(key):
            words = [name] if columns.is_single else [columns.runs[run].name, *([name] if len(keys) > 1 else [])]
            # Totals often coincide (each false eviction is also a cold start): only dashes make both visible.
            color, dash = (number, number if view.is_total else 0) if columns.is_single else (run, number)
            drawn = _total(columns, run, key) if view.is_total else curve
            is_between = view.spread_rows and key == keys[0]
            spread = _spread(columns, run, (key, *view.spread_rows)) if is_between else columns.errors(run, key)
            lines.append(Line(run, ", ".join(words), name, drawn, color, dash, spread))
    spec = lookup(keys[0])
    return Chart(
        view.title,
        spec.unit,
        spec.group,
        tuple(keys),
        tuple(lines),
        style=view.style if columns.is_single else "line",
        band=spec.band if len(keys) == 1 else None,
        references=view.references(columns),
        facts=make_facts(view.what, view.healthy, view.trouble),
        is_wide=True,
        is_log=view.is_log,
    )


def _short_names(titles: Sequence[str]) -> list[str]:
    """Titles without the leading words that all of them share: they are in the title of the chart."""
    heads = {title.partition(mark)[0] for mark in (": ", ", ") for title in titles if mark in title}
    for mark in (": ", ", "):
        if len(titles) > 1 and len(heads) == 1 and all(mark in title for title in titles):
            return [title.partition(mark)[2] for title in titles]
    return list(titles)


def _total(columns: Columns, run: int, key: str) -> Curve:
    steps, values = columns.runs[run].column(key)
    bad = np.asarray(steps, np.int64)[~np.isfinite(np.asarray(values))]
    return replace(make_curve(steps, running_total(values), limit=columns.limit), bad_steps=bad)


def _spread(columns: Columns, run: int, keys: Sequence[str]) -> Curve | None:
    """A value with its lower and upper bound (the keys), at the steps that have all three."""
    found = [columns.runs[run].column(key) for key in keys]
    common = np.array(sorted(set(found[0][0]).intersection(*(steps for steps, _ in found[1:]))), dtype=np.int64)
    if not len(common):
        return None
    middle, low, high = (np.asarray(values)[np.isin(np.asarray(steps), common)] for steps, values in found)
    return band_curve(common, middle, low, high, limit=columns.limit)
