"""From runs to charts: which keys share one, under which heading, and as figures of plotly.

Figures are JSON: colors name the page's CSS variables, numbers are base64.
"""

from __future__ import annotations

import json
import math
import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainer.metrics.catalog.lookup import (
    CATALOG,
    ERROR_SUFFIX,
    ERRORS_SHOWN,
    EVAL_PREFIX,
    WORST_SUFFIX,
    family,
    is_known,
    lookup,
)
from trainer.metrics.catalog.spec import Band
from trainer.tools.runs.depth_curve import DepthCurve, Number, in_words, is_by_depth, last_curves
from trainer.tools.runs.load import RunRecord, mix_changes
from trainer.tools.runs.noise_scale import B_BIG, READINGS, noise_scale_of

# Over all curves: the page stays below 15 MB, including the 5 MB of plotly.
POINT_BUDGET: Final = 150_000
MOST_POINTS, FEWEST_POINTS = 1_500, 100  # of a curve
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
    "Ledger: what carrying is worth": ["ledger/carry_gain", "ledger/stale_gap"],
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
    errors: Floats | None = None  # standard error of each point; NaN where unknown


@dataclass(frozen=True)
class Chart:
    title: str
    unit: str
    group: str
    keys: tuple[str, ...]
    lines: tuple[Line, ...]
    band: Band | None = None
    facts: tuple[tuple[str, str], ...] = ()  # (heading, text) pairs shown below it
    is_wide: bool = False  # a combined view

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

    def errors(self, run: int, key: str, curve: Curve) -> Floats | None:
        """The standard error of each point, NaN where unknown; None if there is none to draw."""
        if not _is_error(key + ERROR_SUFFIX) or curve.is_reduced:
            return None
        known = dict(zip(*self.runs[run].column(key + ERROR_SUFFIX), strict=True))
        errors = np.array([known.get(step, math.nan) for step in curve.first.tolist()])
        if not np.isfinite(errors).any():
            return None
        return errors

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
            errors = columns.errors(run, key, curve)
            if columns.is_single:
                lines.append(Line(run, name or "train", curve, number, dash, errors))
            else:  # colors stand for runs
                label = ", ".join(filter(None, (columns.runs[run].name, name)))
                lines.append(Line(run, label, curve, run, number, errors))
    if not is_known(bases[0]):
        return Chart(bases[0], "", OTHER_GROUP, tuple(keys), tuple(lines))
    spec = lookup(bases[0])
    if not title:
        title = spec.title
        if not names and parts[0]:
            title += f": {parts[0]}"
        if len({*variants}) == 1 and variants[0]:
            title += f", {VARIANTS[variants[0]]}"
    return Chart(
        title,
        spec.unit,
        spec.group,
        tuple(keys),
        tuple(lines),
        band=None if len({family(base)[0] for base in bases}) > 1 else spec.band,
        facts=_facts(bases),
        is_wide=len({family(base)[0] for base in bases}) > 1,
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


def make_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Charts of every other key, under the headings of the catalog, in each the views first.

    Evaluation and worst rank are drawn with the training curve. For a single run the keys of a
    pattern share a chart too, one for each variant; for several runs, colors stand for runs, so
    each key needs its own. Standard errors are drawn with their means.
    """
    num_curves = max(sum(len(run.keys) for run in runs), 1)
    columns = Columns(runs, min(max(POINT_BUDGET // num_curves, FEWEST_POINTS), MOST_POINTS))
    # The loss against depth has a drawing of its own.
    keys = dict.fromkeys(key for run in runs for key in run.keys if not is_by_depth(key) and not _is_error(key))
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


# ---- Figures

NUM_COLORS: Final = 8
DASHES: Final = ("solid", "dot", "dash", "dashdot")
_LEAST_SMOOTHED: Final = 12  # points
_FEW_POINTS: Final = 25  # drawn with markers
_MOST_BAD_STEPS: Final = 200  # that are marked; the chart states their number
_MOST_MARKS: Final = 50  # restarts and changed weights, the latest
Json = dict[str, Any]
Mark = tuple[int, int, str]  # run, step, word


class _Columns:
    """Columns of numbers, each distinct one once: most keys of a run share their steps."""

    def __init__(self) -> None:
        self.encoded: list[Json] = []
        self._numbers: dict[bytes, int] = {}

    def number(self, values: Any) -> Json:
        """A reference to a column; in single precision, where that can hold the values."""
        column, kind = np.asarray(values, "<f8"), "f8"
        with np.errstate(over="ignore", under="ignore"):
            single = column.astype("<f4")
        if np.allclose(single, column, rtol=1e-6, atol=0.0, equal_nan=True):
            column, kind = single, "f4"
        data = column.tobytes()
        if data not in self._numbers:
            self._numbers[data] = len(self.encoded)
            self.encoded.append({"dtype": kind, "bdata": b64encode(data).decode()})
        return {"column": self._numbers[data]}


@cache
def asset(name: str) -> Any:
    """The JSON in a file of the assets, which is not to be changed."""
    file = resources.files("trainer.tools.report") / "assets" / name
    return json.loads(file.read_text(encoding="utf-8"))


def look(part: str) -> Json:
    """The part of a figure that is always the same, from traces.json."""
    return dict(asset("traces.json")[part])


def encode_charts(charts: Sequence[Chart], runs: Sequence[RunRecord], *, more: Sequence[Json] = ()) -> str:
    """All charts as JSON for a <script> element, None for undrawn ones; then `more` figures."""
    columns, marks = _Columns(), _marks(runs)
    figures: list[Json | None] = [None for _ in charts]
    for number, chart in enumerate(charts):
        if chart.is_drawn:
            figures[number] = _figure(chart, runs, columns, marks)
    curves = [line.curve for chart in charts for line in chart.lines if len(line.curve.mean)]
    first = min((int(curve.first[0]) for curve in curves), default=0)
    last = max((int(curve.last[-1]) for curve in curves), default=1)
    pad = max((last - first) * 0.015, 0.5)
    template = {"layout": asset("layout.json"), "data": {"scatter": [{"showlegend": False}]}}
    page = {"columns": columns.encoded, "span": [first - pad, last + pad], "template": template}
    # "</script>" in the name of a run would end the element.
    text = json.dumps(page | {"charts": [*figures, *more]}, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _marks(runs: Sequence[RunRecord]) -> list[Mark]:
    """Restarts and changes of the mix, the latest first."""
    found = set[Mark]()
    for number, run in enumerate(runs):
        found |= {(number, each.global_step, "restart") for each in run.restarts}
        found |= {(number, step, "mix") for step, *_ in mix_changes(run)}
    return sorted(found, key=lambda each: -each[1])[:_MOST_MARKS]


def _figure(chart: Chart, runs: Sequence[RunRecord], columns: _Columns, marks: Sequence[Mark]) -> Json:
    can_be_log = all(bool((line.curve.low > 0).all()) for line in chart.lines)
    is_single, traces = len(runs) == 1, []
    for line in chart.lines:
        traces += _line_traces(chart, line, columns, has_legend=is_single and len(chart.lines) > 1)
    layout: Json = {
        "yaxis": {"title": {"text": chart.unit or "no unit"}},
        "hovermode": "x unified",
        "showlegend": True,
        "shapes": _shapes(chart, runs, marks),
        "annotations": _crosses(chart),
    }
    return {
        "name": f"{chart.group}: {chart.title}",
        "data": traces,
        "layout": layout,
        "isLog": B_BIG in chart.keys and can_be_log,
        "canBeLog": can_be_log,
        "skipped": skipped_step(chart),
    }


def _line_traces(chart: Chart, line: Line, columns: _Columns, *, has_legend: bool) -> list[Json]:
    curve, hue = line.curve, f"c{line.color % NUM_COLORS}"
    common: Json = {"name": line.label, "legendgroup": line.label, "x": columns.number(curve.steps)}
    common["meta"] = {"run": line.run, "smooths": len(curve.mean) >= _LEAST_SMOOTHED}
    drawn: Json = {"mode": "lines", "marker": {"color": hue}, "showlegend": has_legend}
    if len(curve.mean) <= _FEW_POINTS:
        drawn["mode"] = "lines+markers"
    drawn["line"] = {"color": hue, "width": 1.8, "dash": DASHES[line.dash % len(DASHES)]}
    drawn |= {"y": columns.number(curve.mean), "hovertemplate": "%{y:,.6~g}"}
    # The page shows the step of the first line.
    if not np.array_equal(curve.first, chart.lines[0].curve.first):
        drawn["hovertemplate"] += " at %{x:,}"
    if line.errors is not None:
        bars = np.nan_to_num(ERRORS_SHOWN * line.errors)
        drawn["error_y"] = look("errors") | {"array": columns.number(bars), "color": f"{hue}/0.5"}
    if curve.is_reduced:
        return [common | _outline(curve, columns) | {"fillcolor": f"{hue}/0.2"}, common | drawn]
    return [common | drawn]


def _outline(curve: Curve, columns: _Columns) -> Json:
    """The area between low and high of buckets: a polygon there and back."""
    steps = np.concatenate([curve.steps, curve.steps[::-1]])
    ends = np.concatenate([curve.high, curve.low[::-1]])
    return look("outline") | {"x": columns.number(steps), "y": columns.number(ends)}


def skipped_step(chart: Chart) -> float | None:
    """The first step of a chart of times, which is out of the range of values until one zooms: data
    is opened in it, which may take as long as a hundred other steps."""
    steps = [float(line.curve.steps[0]) for line in chart.lines if len(line.curve.mean)]
    if chart.unit != "s" or not steps:
        return None
    return min(steps)


def _shapes(chart: Chart, runs: Sequence[RunRecord], marks: Sequence[Mark]) -> list[Json]:
    """The healthy band and marks; None ends at the axis, the name is the run's index."""
    shapes: list[Json] = []
    if chart.band is not None:
        low, high = chart.band
        shapes.append({**look("band"), "y0": low, "y1": high})
    shown = {line.run for line in chart.lines}
    for run, step, word in marks:
        if run in shown:
            color = f"c{run % NUM_COLORS}" if len(runs) > 1 else "mark"
            stroke = {"color": color, "width": 1.2, "dash": "dot"}
            place = {"x0": step, "x1": step, "label": look("label") | {"text": word}}
            shapes.append({**look("mark"), **place, "name": str(run), "line": stroke})
    return shapes


def _crosses(chart: Chart) -> list[Json]:
    """A × where a value was not finite."""
    found = []
    for line in chart.lines:
        steps = line.curve.bad_steps.tolist()
        shown = steps[:: max(-(-len(steps) // _MOST_BAD_STEPS), 1)]
        found += [{"x": step, "name": str(line.run), **look("cross")} for step in shown]
    return found


HEIGHT = 380  # pixels


def depth_figures(run: RunRecord) -> list[tuple[str, str, Json]]:
    """(name of the set, what carrying is worth, the chart) for each set of the last evaluation."""
    cell, curves = run.setting("data.seq_len", 0), last_curves(run)
    return [(name or "held out", in_words(curve, cell), depth_figure(curve)) for name, curve in curves.items()]


def depth_figure(curve: DepthCurve) -> Json:
    """Both losses over the depth on a logarithmic axis; below, the gain with its errors.

    The losses have no error bars: how hard documents are cancels in the gain.
    """
    points = [point for point in curve.points if point.start]
    gains = [(point.start, point.gain) for point in points if point.gain]
    from_zero = [(point.start, point.from_zero) for point in points if point.from_zero]
    errors = {"array": [_bar(gain) for _, gain in gains], "color": "c2/0.5", "thickness": 1, "width": 4}
    traces = [
        _trace("carried", "c0", [(point.start, point.loss) for point in points]),
        _trace("from zero at each cell", "c1", from_zero),
        _trace("gain of carrying", "c2", gains) | {"yaxis": "y2", "error_y": errors},
    ]
    return {"name": "depth", "isOfSteps": False, "data": traces, "layout": look("depth layout")}


def _bar(gain: Number) -> float | None:
    """Half the length of an error bar; None where the error is not known."""
    return ERRORS_SHOWN * gain.error if math.isfinite(gain.error) else None


def _trace(label: str, color: str, line: Sequence[tuple[int, Number]]) -> Json:
    return {
        "name": label,
        "x": [start * math.sqrt(2) for start, _ in line],  # a bucket is drawn at its geometric middle
        "y": [number.value for _, number in line],
        "text": [f"{label}, {start:,} tokens on: {number}" for start, number in line],
        "hovertemplate": "%{text}<extra></extra>",
        "mode": "lines+markers",
        "line": {"color": color, "width": 2},
        "showlegend": True,
    }
