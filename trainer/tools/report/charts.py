"""From runs to charts: which keys share a chart, and under which heading of the catalog."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainer.metrics.catalog.lookup import CATALOG, EVAL_PREFIX, WORST_SUFFIX, family, is_known, lookup
from trainer.metrics.catalog.rows_training import LAYER_ROWS
from trainer.metrics.catalog.spec import Band
from trainer.tools.runs.depth_curve import is_by_depth
from trainer.tools.runs.load import RunRecord
from trainer.tools.runs.noise_scale import B_BIG, READINGS, noise_scale_of

# Over all curves: the page stays below 15 MB, including the 5 MB of plotly.
POINT_BUDGET: Final = 150_000
MOST_POINTS, FEWEST_POINTS = 1_500, 100  # of a curve
MOST_CURVES: Final = POINT_BUDGET // FEWEST_POINTS
OTHER_GROUP: Final = "Not in the catalog"
# "Smoothed" repeats other curves, which the page can smooth by itself.
LAST_GROUPS: Final = ("Smoothed", OTHER_GROUP)
VARIANTS: Final = ("", "held out", "worst rank")
POOL: Final = "stream_mixing/active"
# Rows of the catalog that are read together.
VIEWS: Final = {
    "Step time by phase (share)": [f"time/{part}_share" for part in ("data", "forward_backward", "optimizer")],
    "Step time by phase (seconds)": [f"time/{part}_sec" for part in ("data", "forward_backward", "optimizer")],
    "Device memory": [f"gpu/{part}_gb" for part in ("allocated", "peak", "reserved", "total")],
    "Pool: remaining picks per reader": [f"{POOL}/remaining_{end}" for end in ("min", "max")],
    "Pool: remaining fraction of the slice per reader": [f"{POOL}/remaining_fraction_{end}" for end in ("min", "max")],
}

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
    def steps(self) -> Floats:
        """The middle of each point's steps [N]."""
        return (self.first + self.last) / 2

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
    curve: Curve
    color: int  # an index; it stands for the run if there are several
    dash: int = 0  # an index


@dataclass(frozen=True)
class Chart:
    """One chart. In a heat map, a line is a row of cells over steps, with logarithmic colors."""

    title: str
    unit: str
    group: str
    keys: tuple[str, ...]
    lines: tuple[Line, ...]
    band: Band | None = None
    facts: tuple[tuple[str, str], ...] = ()  # (heading, text) pairs shown below it
    is_wide: bool = False  # a combined view
    is_heat: bool = False

    @property
    def is_drawn(self) -> bool:
        """Whether it is drawn: constants are not."""
        return not all(line.curve.is_constant for line in self.lines)


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


def _family(key: str) -> tuple[str, str]:
    """(catalog row, the part of its pattern) of a key; empty for one that is not in the catalog."""
    if not is_known(key):
        return "", ""
    return family(key)


def _in_order(key: str) -> list[tuple[str, int]]:
    """For sorting: `blocks.10` follows `blocks.9`."""
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", key)]


def _chart(columns: Columns, keys: Sequence[str], title: str = "") -> Chart:
    """The chart of keys that share one. `title`: of a view."""
    bases, variants = zip(*map(variant_of, keys), strict=True)
    parts = [_family(base)[1] for base in bases]
    names = [part or lookup(key).title for part, key in zip(parts, keys, strict=True)] if len({*bases}) > 1 else []
    lines = []
    for number, (key, variant) in enumerate(zip(keys, variants, strict=True)):
        name, dash = VARIANTS[variant], variant
        if names:
            name, dash = names[number], 0
        for run, curve in columns.curves(key):
            if columns.is_single:
                lines.append(Line(run, name or "train", curve, number, dash))
            else:  # colors stand for runs
                label = ", ".join(filter(None, (columns.runs[run].name, name)))
                lines.append(Line(run, label, curve, run, number))
    if not is_known(bases[0]):
        return Chart(bases[0], "", OTHER_GROUP, tuple(keys), tuple(lines))
    spec = lookup(bases[0])
    if not title:
        title = spec.title
        if not names and parts[0]:
            title += f": {parts[0]}"
        if len({*variants}) == 1 and variants[0]:
            title += f", {VARIANTS[variants[0]]}"
    rows = {family(base)[0] for base in bases}
    is_heat = columns.is_single and rows <= {row.name for row in LAYER_ROWS}
    return Chart(
        title,
        spec.unit,
        spec.group,
        tuple(keys),
        tuple(lines),
        band=spec.band if len(rows) == 1 else None,
        facts=_facts(bases),
        is_wide=is_heat or len(rows) > 1,
        is_heat=is_heat,
    )


def _facts(keys: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Meaning, good and bad signs of some keys; of several, each with the title of its row."""
    specs = {family(key)[0]: lookup(key) for key in keys}
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
    each key needs its own.
    """
    num_curves = max(sum(len(run.keys) for run in runs), 1)
    columns = Columns(runs, min(max(POINT_BUDGET // num_curves, FEWEST_POINTS), MOST_POINTS))
    drawn, _ = drawn_keys(runs)
    keys = dict.fromkeys(drawn)
    charts: list[Chart] = []
    scale = next((scale.key for scale in map(noise_scale_of, runs) if scale is not None), READINGS[1])
    views = {"Noise scale and batch size": [scale, f"{scale}_low", f"{scale}_high", B_BIG], **VIEWS}
    for title, rows in views.items():
        shown = [key for key in rows if key in keys and columns.curves(key)]
        # More than two lines of a run in one color are not readable.
        if len(shown) > 1 and (columns.is_single or len(shown) == 2):
            charts.append(_chart(columns, shown, title))
            for key in shown:
                del keys[key]
    places = {spec.name: number for number, spec in enumerate(CATALOG)}

    def order(key: str) -> tuple[int, list[tuple[str, int]], int]:
        base, variant = variant_of(key)
        return places.get(_family(base)[0], len(places)), _in_order(base), variant

    shared: dict[tuple[str, int], list[str]] = {}
    for key in sorted(keys, key=order):
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
