"""From runs to charts: which keys share a chart, and under which heading of the catalog."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainer.metrics.catalog.lookup import (
    CATALOG,
    ERROR_SUFFIX,
    EVAL_PREFIX,
    WORST_SUFFIX,
    family,
    is_known,
    keys_under,
    lookup,
)
from trainer.metrics.catalog.rows_training import LAYER_ROWS
from trainer.metrics.catalog.spec import Band
from trainer.tools import limits
from trainer.tools.diagnostics.facts import batches_through
from trainer.tools.runs.depth_curve import is_by_depth
from trainer.tools.runs.load import RunRecord
from trainer.tools.runs.noise_scale import B_BIG, READINGS, noise_scale_of
from trainer.wording import counted

# Over all curves: the page stays below 15 MB, including the 5 MB of plotly.
POINT_BUDGET: Final = 150_000
MOST_POINTS, FEWEST_POINTS = 1_500, 100  # of a curve
MOST_CURVES: Final = POINT_BUDGET // FEWEST_POINTS
OTHER_GROUP: Final = "Not in the catalog"
# "Smoothed" repeats other curves, which the page can smooth by itself.
LAST_GROUPS: Final = ("Smoothed", OTHER_GROUP)
VARIANTS: Final = ("", "held out", "worst rank")

Style = Literal["line", "area", "heat"]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Values over steps. A point is one logged value, or a bucket of neighboring ones."""

    first: Ints  # step of each point [N]
    last: Ints
    mean: Floats  # of its finite values
    low: Floats
    high: Floats
    num_values: int  # the finite ones
    bad_steps: Ints  # of all others

    @property
    def is_reduced(self) -> bool:
        """Whether points are buckets."""
        return self.num_values > len(self.mean)

    @property
    def is_constant(self) -> bool:
        """Whether all values are the same finite number."""
        if not len(self.mean) or len(self.bad_steps):
            return False
        return float(self.low.min()) == float(self.high.max())


def make_curve(steps: ArrayLike, values: ArrayLike, *, limit: int) -> Curve:
    """A curve of at most `limit` points from ascending steps [V]. More values are put into buckets
    of equal width, whose lowest and highest keep an outlier visible in a run of any length."""
    step, value = np.asarray(steps, np.int64), np.asarray(values, np.float64)
    finite = np.isfinite(value)
    bad = step[~finite]
    step, value = step[finite], value[finite]
    if len(step) <= limit:
        return Curve(step, step, value, value, value, len(step), bad)
    width = (int(step[-1]) - int(step[0]) + 1) / limit
    bucket = ((step - step[0]) / width).astype(np.int64)
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    counts = np.diff(starts, append=len(step))
    # Dividing before the sum keeps values near the largest float from overflowing.
    mean = np.add.reduceat(value / np.repeat(counts, counts), starts)
    low, high = np.minimum.reduceat(value, starts), np.maximum.reduceat(value, starts)
    return Curve(step[starts], step[starts + counts - 1], mean, low, high, len(step), bad)


@dataclass(frozen=True)
class Line:
    """One curve of a chart."""

    run: int  # its index
    label: str  # legend text, including the name of the run if there are several
    variant: str  # distinguishes lines of the same run and key
    curve: Curve
    color: int  # an index; it stands for the run if there are several
    dash: int = 0  # an index
    errors: Floats | None = None  # standard error of each point; NaN where unknown


@dataclass(frozen=True)
class Reference:
    """A horizontal line to compare with, such as a capacity, of one run (its index)."""

    label: str
    value: float
    run: int


@dataclass(frozen=True)
class Chart:
    """One chart. Of style `heat`, a line is a row of cells over steps, with logarithmic colors."""

    title: str
    unit: str
    group: str
    keys: tuple[str, ...]
    lines: tuple[Line, ...]
    style: Style = "line"
    band: Band | None = None
    references: tuple[Reference, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()  # (heading, text) pairs shown below it
    is_wide: bool = False  # a combined view
    is_log: bool = False

    @property
    def axis(self) -> str:
        """Title of the axis of values."""
        if self.group == OTHER_GROUP:
            return self.unit or "unit not known"
        return self.unit or "no unit"

    @property
    def is_drawn(self) -> bool:
        """Whether it is drawn: constants are not, of combined views those of 0 without errors."""
        if not all(line.curve.is_constant for line in self.lines):
            return True
        return self.is_wide and any(line.errors is not None or line.curve.low[0] for line in self.lines)


@dataclass
class Columns:
    """Every key of every run as a curve of at most `limit` points, computed on first use."""

    runs: Sequence[RunRecord]
    limit: int
    _made: dict[str, list[tuple[int, Curve]]] = field(default_factory=dict)

    def curves(self, key: str) -> list[tuple[int, Curve]]:
        """(index of the run, curve) for each run that has the key."""
        if key not in self._made:
            self._made[key] = []
            for run, record in enumerate(self.runs):
                steps, values = record.column(key)
                if len(steps):
                    self._made[key].append((run, make_curve(steps, values, limit=self.limit)))
        return self._made[key]

    def errors(self, run: int, key: str, curve: Curve) -> Floats | None:
        """The standard error of each point, NaN where unknown; None if there is none to draw."""
        if not _is_error(key + ERROR_SUFFIX) or curve.is_reduced:
            return None
        known = dict(zip(*self.runs[run].column(key + ERROR_SUFFIX), strict=True))
        errors = np.array([known.get(step, math.nan) for step in curve.first.tolist()])
        if not np.isfinite(errors).any():
            return None
        return errors

    def total(self, run: int, key: str, curve: Curve) -> Curve:
        """The running total of a counter; values that are not finite count as 0."""
        steps, values = self.runs[run].column(key)
        sums = np.cumsum(np.nan_to_num(np.asarray(values), nan=0.0, posinf=0.0, neginf=0.0))
        return replace(make_curve(steps, sums, limit=self.limit), bad_steps=curve.bad_steps)

    @property
    def is_single(self) -> bool:
        """Whether there is only one run, so that colors stand for lines."""
        return len(self.runs) == 1


def variant_of(key: str) -> tuple[str, int]:
    """(base key, index of `VARIANTS`): `eval_loss` is the evaluation of `loss`."""
    if key.startswith(EVAL_PREFIX):
        return key.removeprefix(EVAL_PREFIX), 1
    base = key.removesuffix(WORST_SUFFIX)
    if base == key or not is_known(base) or not is_known(key):
        return key, 0
    # Some keys of the catalog end in _max themselves.
    return (base, 2) if lookup(key).title == f"{lookup(base).title}, worst rank" else (key, 0)


def _is_error(key: str) -> bool:
    """Whether the key is a standard error, which is drawn as a bar around its mean."""
    base = key.removesuffix(ERROR_SUFFIX)
    return base != key and is_known(base) and lookup(base).ranks == "mean_and_error"


def _family(key: str) -> tuple[str, str]:
    """(catalog row, the part of its pattern) of a key; empty for one that is not in the catalog."""
    if not is_known(key):
        return "", ""
    return family(key)


@dataclass(frozen=True)
class View:
    """Keys that are read together."""

    title: str
    rows: tuple[str, ...]  # names of catalog rows; a pattern stands for all its keys
    style: Style = "line"  # for a single run; several runs are drawn as lines
    is_total: bool = False
    is_log: bool = False
    max_keys: int = 1  # lines of one color that are readable; with more each key has a chart

    def references(self, runs: Sequence[RunRecord]) -> list[Reference]:
        """The levels of the rows that have some."""
        found = []
        for number, run in enumerate(runs):
            capacity, ranks = run.setting("ledger.capacity"), run.world_size
            if "ledger/live_groups" in self.rows and isinstance(capacity, int) and ranks is not None:
                label = f"capacity of {counted(ranks, 'rank')}"
                found.append(Reference(label, float(capacity * ranks), number))
            if "stream_mixing/active/pick_surprise_max" in self.rows and run.steps:
                bound = limits.surprise_bound(max(batches_through(run, run.steps[-1]), 1))
                found.append(Reference(f"ln(picks / {limits.ALPHA:g})", bound, number))
        return found


PLAIN: Final = View("", ())


@cache
def _fixed_views() -> tuple[View, ...]:
    """Those of views.json (`*`: all rows that begin so), and a heat map for each row of layers."""
    file, found = resources.files("trainer.tools.report") / "assets" / "views.json", []
    for fields in json.loads(file.read_text(encoding="utf-8")):
        rows: list[str] = []
        for row in fields.pop("rows"):
            rows += keys_under(row[:-1]) if row.endswith("*") else [row]
        found.append(View(rows=tuple(rows), **fields))
    return (*found, *(View(spec.title, (spec.name,), style="heat") for spec in LAYER_ROWS))


def _views(runs: Sequence[RunRecord]) -> Iterable[View]:
    """Those of the noise scale, one for each key that it is read from, and all others."""
    scales = filter(None, map(noise_scale_of, runs))
    read = sorted({scale.key for scale in scales}, key=READINGS.index) or ["gns/b_now"]
    for key in read:
        title = "Noise scale and batch size"
        if len(read) > 1:
            title += f" ({key})"
        yield View(title, (key, f"{key}_low", f"{key}_high", B_BIG), is_log=True, max_keys=4)
    yield from _fixed_views()


def _keys_of_row(row: str, keys: Sequence[str], columns: Columns) -> list[str]:
    """The training keys of a catalog row that some run has; `blocks.10` follows `blocks.9`."""
    found = [key for key in keys if _family(key)[0] == row and not variant_of(key)[1]]
    found = [key for key in found if not _is_error(key) and columns.curves(key)]
    parts = {key: re.findall(r"(\D*)(\d*)", key) for key in found}
    return sorted(found, key=lambda key: [(text, int(number or 0)) for text, number in parts[key]])


def _chart(columns: Columns, keys: Sequence[str], view: View = PLAIN) -> Chart:
    """The chart of keys that share one."""
    base, variants = variant_of(keys[0])[0], [variant_of(key)[1] for key in keys]
    parts = [_family(variant_of(key)[0])[1] for key in keys]
    names, dashes = [VARIANTS[variant] for variant in variants], variants
    if view.rows and (len(keys) > 1 or parts[0]):
        names = [part or lookup(key).title for part, key in zip(parts, keys, strict=True)]
        dashes = [0] * len(keys)
        # Totals often coincide, as false evictions are cold starts too: dashes show both.
        if view.is_total or not columns.is_single:
            dashes = list(range(len(keys)))
    elif columns.is_single and parts[0]:
        names, dashes = parts, [0] * len(keys)
    lines = []
    for number, (key, name, dash) in enumerate(zip(keys, names, dashes, strict=True)):
        for run, curve in columns.curves(key):
            errors = columns.errors(run, key, curve)
            drawn = columns.total(run, key, curve) if view.is_total else curve
            label, color = name, number
            if not columns.is_single:  # colors stand for runs
                label, color = ", ".join(filter(None, (columns.runs[run].name, name))), run
            lines.append(Line(run, label or "train", name or "train", drawn, color, dash, errors))
    if not is_known(base):
        return Chart(base, "", OTHER_GROUP, tuple(keys), tuple(lines))
    spec = lookup(base)
    title = view.title or spec.title
    if not view.rows and parts[0] and (not columns.is_single or len(keys) == 1):
        title = f"{title}: {parts[0]}"
    if not view.rows and len(set(variants)) == 1 and variants[0]:
        title = f"{title}, {VARIANTS[variants[0]]}"
    return Chart(
        title,
        spec.unit,
        spec.group,
        tuple(keys),
        tuple(lines),
        style=view.style if columns.is_single else "line",
        band=spec.band if len(keys) == 1 or not view.rows else None,
        references=tuple(view.references(columns.runs)),
        facts=_facts(keys if view.rows else [base]),
        is_wide=bool(view.rows),
        is_log=view.is_log,
    )


def _facts(keys: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Meaning, good and bad signs of some keys; of several, each with the title of its row."""
    specs = {family(key)[0]: lookup(key) for key in keys if is_known(key)}
    facts = []
    for spec in specs.values():
        what = spec.description
        if len(specs) > 1:
            what = f"{spec.title}: {what}"
        words = ("What", what), ("Healthy", spec.healthy), ("Trouble", spec.pathological)
        facts += [(name, text) for name, text in words if text]
    return tuple(facts)


def drawn_keys(runs: Sequence[RunRecord]) -> tuple[list[str], int]:
    """The keys that the budget has curves for, known ones first; and how many are left out."""
    # The loss against depth has a drawing of its own.
    keys = list(dict.fromkeys(key for run in runs for key in run.keys if not is_by_depth(key)))
    num_left_out = max(len(keys) - MOST_CURVES // max(len(runs), 1), 0)
    if num_left_out:
        keys = sorted(keys, key=lambda key: not is_known(key))[:-num_left_out]
    return keys, num_left_out


def make_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Charts of every other key, under the headings of the catalog, in each the views first.

    Evaluation and worst rank are drawn with the training curve. For a single run the keys of a
    pattern share a chart too, one for each variant; for several runs, colors stand for runs, so
    each key needs its own. Standard errors are drawn with their means.
    """
    num_curves = max(sum(len(run.keys) for run in runs), 1)
    columns = Columns(runs, min(max(POINT_BUDGET // num_curves, FEWEST_POINTS), MOST_POINTS))
    keys, _ = drawn_keys(runs)
    charts: list[Chart] = []
    used: set[str] = set()
    for view in _views(runs):
        shown = [key for row in view.rows for key in _keys_of_row(row, keys, columns)]
        if shown and (columns.is_single or len(shown) <= view.max_keys):
            charts.append(_chart(columns, shown, view))
            used.update(shown)
    rows = {spec.name: number for number, spec in enumerate(CATALOG)}

    def order(key: str) -> tuple[int, str, int]:
        base, variant = variant_of(key)
        return rows.get(_family(base)[0], len(rows)), base, variant

    shared: dict[tuple[str, int], list[str]] = {}
    for key in sorted((key for key in keys if key not in used and not _is_error(key)), key=order):
        base, variant = variant_of(key)
        row, part = _family(base)
        if not columns.curves(key):
            continue
        chart = base, 0
        if part and columns.is_single:
            chart = row, variant
        shared.setdefault(chart, []).append(key)
    charts += [_chart(columns, together) for together in shared.values()]
    groups = [*(spec.group for spec in CATALOG if spec.group not in LAST_GROUPS), *LAST_GROUPS]
    return sorted(charts, key=lambda chart: groups.index(chart.group))
