"""Views that put several keys beside each other: the pool, the ledger, the noise scale against the batch, time in a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from trainer.metrics.catalog.lookup import UnknownMetric, family, lookup
from trainer.report.charts import Chart, Columns, Line, Reference, Style, variant_of
from trainer.report.curves import Curve, make_curve, running_total

# Bound of the pick surprise: it is exceeded once in a thousand healthy runs of this length (docs/mixing.md).
SURPRISE_ALPHA: Final = 1e-3


@dataclass(frozen=True)
class View:
    """Keys that are read together. `rows` are names of catalog rows, so that a pattern takes all its keys.

    `max_keys_a_run` is how many lines of one colour are still readable where colours mean runs; with more, the keys get
    charts of their own.
    """

    title: str
    rows: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    style: Style = "line"
    is_total: bool = False
    is_log: bool = False
    max_keys_a_run: int = 1
    references: Callable[[Columns], tuple[Reference, ...]] = lambda columns: ()
    spread_row: str | None = None


def _capacity(columns: Columns) -> tuple[Reference, ...]:
    found = []
    for number, run in enumerate(columns.runs):
        capacity, ranks = run.setting("ledger.capacity"), run.world_size
        if isinstance(capacity, int) and ranks is not None:
            found.append(Reference(f"capacity of {ranks} rank(s)", float(capacity * ranks), number))
    return tuple(found)


def _surprise_bound(columns: Columns) -> tuple[Reference, ...]:
    found = []
    for number, run in enumerate(columns.runs):
        if len(run.steps):
            picks = run.steps[-1] * max(int(run.setting("train.micro_batches", 1)), 1)
            found.append(Reference("ln(picks / 0.001)", math.log(max(picks, 1) / SURPRISE_ALPHA), number))
    return tuple(found)


VIEWS: Final = (
    View(
        "Where the time of a step goes",
        ("time/data_share", "time/forward_backward_share", "time/optimizer_share"),
        (
            ("What", "Share of a step's time in each of its parts, on the slowest rank."),
            ("Healthy", "Nearly all of it in forward and backward, and level."),
            ("Trouble", "Waiting for data above a few percent: reading is the brake."),
        ),
        style="area",
    ),
    View(
        "Seconds of a step",
        ("time/data_sec", "time/forward_backward_sec", "time/optimizer_sec"),
        (("What", "Host time of the logged step in each of its parts, on the slowest rank."),),
    ),
    View(
        "Device memory",
        ("gpu/allocated_gb", "gpu/peak_gb", "gpu/reserved_gb", "gpu/total_gb"),
        (("What", "Memory of the fullest device."), ("Trouble", "Allocated that grows step by step is a leak.")),
    ),
    View(
        "The pool: active readers by modality",
        ("stream_mixing/active/modalities/<modality>",),
        (
            ("What", "Active readers over all ranks, stacked by modality."),
            ("Healthy", "Each modality near its share of the streams."),
            ("Trouble", "A modality at 0 for long starves."),
        ),
        style="area",
    ),
    View(
        "The pool: picks that readers have left",
        ("stream_mixing/active/remaining_min", "stream_mixing/active/remaining_max"),
        (
            ("What", "Fewest and most picks left among the active readers."),
            ("Healthy", "The least is often near 0 in a pool with refill; the most is at most a whole slice."),
            ("Trouble", "One that stays at a value is stuck."),
        ),
        max_keys_a_run=2,
    ),
    View(
        "The pool: share of the slice that readers have left",
        ("stream_mixing/active/remaining_fraction_min", "stream_mixing/active/remaining_fraction_max"),
        (("What", "Smallest and largest share of its slice that an active reader has left."),),
        max_keys_a_run=2,
    ),
    View(
        "The pool: is a reader stuck?",
        ("stream_mixing/active/pick_surprise_max",),
        (
            (
                "What",
                "How improbable the longest wait for a pick is, in nats, against its bound for a run of this length.",
            ),
            ("Healthy", "Below the bound, which one healthy run in a thousand crosses."),
            ("Trouble", "Above it: a reader is passed over more often than its weight explains."),
        ),
        references=_surprise_bound,
    ),
    View(
        "The ledger: groups held",
        ("ledger/live_groups",),
        (
            ("What", "Groups whose state is held over all ranks, against the capacity."),
            ("Healthy", "Level, with room to spare."),
            ("Trouble", "At the capacity: each new group drops another one's state."),
        ),
        references=_capacity,
    ),
    View(
        "The ledger: state lost, running total",
        ("ledger/false_evictions/lru", "ledger/false_evictions/stale", "ledger/cold_starts"),
        (
            (
                "What",
                "Groups that went on after their state was dropped, and cells that began from zero, since the start.",
            ),
            ("Healthy", "0 throughout."),
            ("Trouble", "A rising line: recurrent state is lost while it is needed."),
        ),
        is_total=True,
        max_keys_a_run=3,
    ),
    View(
        "The ledger: evictions, running total",
        ("ledger/evictions/lru", "ledger/evictions/stale"),
        (("What", "Groups whose state was dropped since the start, needed later or not."),),
        is_total=True,
        max_keys_a_run=2,
    ),
    View(
        "Noise scale against the batch",
        ("gns/b_simple", "gns/b_big"),
        (
            ("What", "B_simple with two standard errors, and the sequences of a step that it is compared with."),
            ("Healthy", "The batch at a tenth of B_simple up to B_simple."),
            ("Trouble", "The batch far above it: compute goes into averaging. Far below: noise decides the steps."),
        ),
        is_log=True,
        max_keys_a_run=2,
        spread_row="gns/b_simple_se",
    ),
)


def make_views(columns: Columns, keys: Sequence[str]) -> tuple[list[Chart], set[str]]:
    """(charts, the keys that they show). A view that has too many lines for several runs is left to single charts."""
    charts, used = [], set[str]()
    for view in VIEWS:
        shown = [key for row in view.rows for key in keys if _is_of(key, row) and columns.runs_with(key)]
        if not shown or (len(columns.runs) > 1 and len(shown) > view.max_keys_a_run):
            continue
        charts.append(_chart(view, columns, shown))
        used.update(shown)
        if view.spread_row is not None:
            used.add(view.spread_row)
    return charts, used


def _is_of(key: str, row: str) -> bool:
    try:
        return variant_of(key)[1] == "train" and family(key)[0] == row
    except UnknownMetric:
        return False


def _chart(view: View, columns: Columns, keys: Sequence[str]) -> Chart:
    is_single = len(columns.runs) == 1
    lines = []
    names = _short_names([family(key)[1] or lookup(key).title for key in keys])
    for number, (key, name) in enumerate(zip(keys, names, strict=True)):
        for run in columns.runs_with(key):
            words = [name] if is_single else [columns.runs[run].name, *([name] if len(keys) > 1 else [])]
            # Totals often lie on each other (each false eviction is a cold start), and then only dashes show both.
            color, dash = (number, number if view.is_total else 0) if is_single else (run, number)
            curve = _total(columns, run, key) if view.is_total else columns.curve(run, key)
            assert curve is not None
            has_spread = view.spread_row is not None and key == keys[0]
            spread = _spread(columns, run, key, view.spread_row) if has_spread and view.spread_row else None
            lines.append(Line(run, ", ".join(words), name, curve, color, dash, spread))
    spec = lookup(keys[0])
    return Chart(
        view.title,
        spec.unit,
        spec.group,
        tuple(keys),
        tuple(lines),
        style=view.style if is_single else "line",
        band=spec.band if len(keys) == 1 else None,
        references=view.references(columns),
        facts=view.facts,
        is_wide=True,
        is_log=view.is_log,
    )


def _short_names(titles: Sequence[str]) -> list[str]:
    """Titles without the words in front that all of them share: the chart's own title says those."""
    if len(titles) < 2:
        return list(titles)
    heads = {title.partition(mark)[0] for mark in (": ", ", ") for title in titles if mark in title}
    for mark in (": ", ", "):
        if len(heads) == 1 and all(mark in title for title in titles):
            return [title.partition(mark)[2] for title in titles]
    return list(titles)


def _total(columns: Columns, run: int, key: str) -> Curve:
    steps, values = columns.runs[run].column(key)
    return make_curve(steps, running_total(values), limit=columns.limit)


def _spread(columns: Columns, run: int, key: str, se_key: str) -> Curve | None:
    """Two standard errors around the values of a key, where both are known."""
    steps, values = columns.runs[run].column(key)
    se_steps, errors = columns.runs[run].column(se_key)
    both, here, there = np.intersect1d(steps, se_steps, assume_unique=True, return_indices=True)
    if not len(both):
        return None
    value, width = np.asarray(values)[here], 2 * np.asarray(errors)[there]
    middle, low, high = (make_curve(both, v, limit=columns.limit) for v in (value, value - width, value + width))
    is_whole = len(low.mean) == len(middle.mean) == len(high.mean)
    return replace(middle, low=low.mean, high=high.mean) if is_whole else None
