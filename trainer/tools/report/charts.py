"""From runs to charts: which keys share one, and how plotly draws it.

A figure is JSON: colors name CSS variables of the page, which puts the look of assets/layout.json
under every figure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainer.metrics.catalog import (
    CATALOG,
    ERRORS_SHOWN,
    EVAL_PREFIX,
    WORST_SUFFIX,
    family,
    is_known,
    lookup,
)
from trainer.metrics.catalog_rows import MetricSpec
from trainer.tools.runs.load import RunRecord
from trainer.tools.runs.readings import B_BIG, DepthCurve, Number, in_words, is_by_depth, last_curves
from trainer.wording import few, number_text

# Over all curves: the page stays below 15 MB, including the 5 MB of plotly.
POINT_BUDGET: Final = 150_000
MOST_POINTS, FEWEST_POINTS = 1_500, 100  # of a curve
FEW_POINTS: Final = 25  # drawn with markers
MOST_MARKS: Final = 100  # of restarts
NUM_COLORS: Final = 8
OTHER_GROUP: Final = "Not in the catalog"
LAST_GROUPS: Final = ("Smoothed", OTHER_GROUP)
VARIANTS: Final = ("", "held out", "worst rank")
# Rows of the catalog that are read together.
VIEWS: Final = {
    "Noise scale and batch size": ["gns/b_now", "gns/b_now_low", "gns/b_now_high", B_BIG],
    "Step time by phase": [f"time/{part}_sec" for part in ("data", "forward_backward", "optimizer")],
    "Device memory": [f"gpu/{part}_gb" for part in ("allocated", "peak", "reserved", "total")],
}
PLACES: Final = {spec.name: place for place, spec in enumerate(CATALOG)}
VIEW_OF: Final = {key: title for title, keys in VIEWS.items() for key in keys}
Floats = NDArray[np.float64]
Json = dict[str, Any]


@dataclass(frozen=True)
class Curve:
    """Values over steps [N]. A point is one logged value, or a bucket of neighboring ones."""

    steps: Floats  # the mean of each point's
    mean: Floats  # of its finite values
    low: Floats
    high: Floats
    bad_steps: list[int]  # of all other values
    is_reduced: bool  # whether points are buckets

    @property
    def constant(self) -> str | None:
        """The value, if all are the same finite one."""
        if self.bad_steps or self.low.min() < self.high.max():
            return None
        return number_text(float(self.low[0]))


def make_curve(steps: ArrayLike, values: ArrayLike, *, limit: int) -> Curve:
    """A curve of at most `limit` points from ascending steps [V]. More values are put into buckets
    of equal size, whose lowest and highest keep an outlier visible in a run of any length."""
    step, value = np.asarray(steps, np.float64), np.asarray(values, np.float64)
    finite = np.isfinite(value)
    bad = step[~finite].astype(int).tolist()
    step, value = step[finite], value[finite]
    if not len(step):
        return Curve(step, value, value, value, bad, is_reduced=False)
    starts = np.unique(np.linspace(0, len(step), limit, endpoint=False).astype(int))
    counts = np.diff(starts, append=len(step))
    # Dividing before the sum keeps values near the largest float from overflowing.
    shares = np.repeat(counts, counts)
    place, mean = np.add.reduceat(step / shares, starts), np.add.reduceat(value / shares, starts)
    low, high = np.minimum.reduceat(value, starts), np.maximum.reduceat(value, starts)
    return Curve(place, mean, low, high, bad, is_reduced=len(step) > len(starts))


class Line(NamedTuple):
    """One curve of a chart."""

    run: int  # its index
    label: str  # with the name of the run if there are several
    curve: Curve


@dataclass
class Chart:
    """The lines of some keys over the steps, of one run or of several."""

    title: str
    unit: str
    group: str
    keys: list[str]
    figure: Json | None = None  # None if all of its lines are constant: then `values` say it
    values: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def facts(self) -> list[tuple[str, str]]:
        """(title, text): the meaning of each row of the catalog, with its good and bad signs."""
        specs = {family(key)[0]: lookup(_variant(key)[0]) for key in self.keys if is_known(key)}
        return [
            (spec.title, f"{spec.description} Healthy: {spec.healthy} Trouble: {spec.pathological}")
            for spec in specs.values()
        ]


def _variant(key: str) -> tuple[str, str]:
    """(base key, one of `VARIANTS`): `eval_loss` is the evaluation of `loss`."""
    if key.startswith(EVAL_PREFIX):
        return key.removeprefix(EVAL_PREFIX), VARIANTS[1]
    base = key.removesuffix(WORST_SUFFIX)
    # Some keys of the catalog end in _max themselves.
    if base != key and is_known(base) and is_known(key) and lookup(key).title.endswith(VARIANTS[2]):
        return base, VARIANTS[2]
    return key, VARIANTS[0]


def _family(key: str) -> tuple[str, str]:
    """(catalog row, the part of its pattern) of a key; the key itself if it is in no row."""
    return family(key) if is_known(key) else (key, "")


def _in_order(key: str) -> tuple[int, int]:
    """For sorting: as in the catalog, evaluations after training."""
    base, variant = _variant(key)
    return PLACES.get(_family(base)[0], len(PLACES)), VARIANTS.index(variant)


def make_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Charts of every key, but for the loss against depth, under the headings of the catalog.

    Evaluation and worst rank are drawn with the training curve. For a single run the keys of a
    view or a pattern share a chart too; for several runs, colors stand for runs, so each key
    needs its own.
    """
    every = dict.fromkeys(key for run in runs for key in run.keys)
    # The loss against depth has a drawing of its own, and all rows of a key may have been replaced.
    keys = [key for key in every if not is_by_depth(key) and any(run.column(key)[0] for run in runs)]
    num_curves = max(len(keys) * len(runs), 1)
    limit = min(max(POINT_BUDGET // num_curves, FEWEST_POINTS), MOST_POINTS)
    shared: dict[tuple[str, str], list[str]] = {}
    for key in sorted(keys, key=_in_order):
        base, variant = _variant(key)
        row, part = _family(base)
        chart = base, ""
        if len(runs) == 1 and part:
            chart = row, variant
        if len(runs) == 1 and base in VIEW_OF:
            chart = VIEW_OF[base], ""
        shared.setdefault(chart, []).append(key)
    charts = [_make_chart(runs, name, together, limit) for (name, _), together in shared.items()]
    groups = [spec.group for spec in CATALOG if spec.group not in LAST_GROUPS]
    return sorted(charts, key=lambda chart: [*groups, *LAST_GROUPS].index(chart.group))


def _make_chart(runs: Sequence[RunRecord], name: str, keys: list[str], limit: int) -> Chart:
    bases, variants = zip(*map(_variant, keys), strict=True)
    parts = [_family(base)[1] for base in bases]
    chart, spec = Chart(bases[0], "", OTHER_GROUP, keys), None
    if is_known(bases[0]):
        spec = lookup(bases[0])
        chart = Chart(spec.title, spec.unit, spec.group, keys)
    if name in VIEWS:
        chart.title, spec = name, None
    elif len(set(bases)) == 1 and parts[0]:
        chart.title += f": {parts[0]}"
    if len(set(variants)) == 1 and variants[0]:
        chart.title += f", {variants[0]}"
    lines = []
    for key, base, part, label in zip(keys, bases, parts, variants, strict=True):
        if len(set(bases)) > 1:
            label = part or lookup(base).title
        for number, run in enumerate(runs):
            shown = label or "train"
            if len(runs) > 1:
                shown = ", ".join(filter(None, (run.name, label)))
            curve = make_curve(*run.column(key), limit=limit)
            if len(curve.steps) or curve.bad_steps:
                lines.append(Line(number, shown, curve))
    constants = {line.label: line.curve.constant for line in lines}
    if None in constants.values():
        _draw(chart, runs, lines, spec)
    else:
        chart.values = " · ".join(f"{label} {value}" for label, value in constants.items())
        if len({*constants.values()}) == 1:
            chart.values = str(lines[0].curve.constant)
    return chart


def _draw(chart: Chart, runs: Sequence[RunRecord], lines: list[Line], spec: MetricSpec | None) -> None:
    """The figure of a chart. `spec`: its row in the catalog, if it has a healthy band."""
    bad = sorted({step for line in lines for step in line.curve.bad_steps})
    if bad:
        chart.notes.append(f"not finite at step {few([f'{step:,}' for step in bad])}")
    if any(line.curve.is_reduced for line in lines):
        chart.notes.append("points are buckets: the line is the mean, the shade the range")
    shapes: list[Json] = []
    traces: list[Json] = []
    if spec is not None and spec.band is not None:
        low, high = spec.band  # None ends at the axis
        band = {"type": "rect", "xref": "paper", "x0": 0, "x1": 1, "y0": low, "y1": high}
        shapes.append({**band, "fillcolor": "good/0.11", "line": {"width": 0}})
    for number in sorted({line.run for line in lines}):
        color = "mark"
        if len(runs) > 1:
            color = f"c{number % NUM_COLORS}"
        mark: Json = {"type": "line", "name": str(number), "yref": "paper", "y0": 0, "y1": 1}
        mark["line"] = {"color": color, "width": 1.2, "dash": "dot"}
        steps = {each.global_step for each in runs[number].restarts[-MOST_MARKS:]}
        shapes += [{**mark, "x0": step, "x1": step} for step in sorted(steps)]
    for place, line in enumerate(lines):
        hue, dash = place, "solid"
        if len(runs) > 1:  # colors stand for runs
            hue = line.run
            dash = "solid" if place < len(runs) else "dot"
        traces += _traces(line, f"c{hue % NUM_COLORS}", dash)
    chart.figure = {
        "data": traces,
        "layout": {
            "yaxis": {"title": {"text": chart.unit or "no unit"}},
            "hovermode": "closest" if len(lines) > NUM_COLORS else "x unified",
            "showlegend": len(runs) == 1 and len(lines) > 1,
            "shapes": shapes,
        },
        "canBeLog": all(bool((line.curve.low > 0).all()) for line in lines),
        # The first step opens the data and compiles, which may take as long as a hundred others.
        "skipsFirst": chart.unit == "s",
    }


def _traces(line: Line, color: str, dash: str) -> list[Json]:
    """The line, below it the range of its buckets: a polygon there and back."""
    curve, traces = line.curve, []
    common: Json = {"legendgroup": line.label, "meta": {"run": line.run}, "mode": "lines"}
    if curve.is_reduced:
        shade: Json = {"fill": "toself", "fillcolor": f"{color}/0.2", "line": {"width": 0}}
        shade["x"] = _numbers([*curve.steps, *curve.steps[::-1]])
        shade["y"] = _numbers([*curve.high, *curve.low[::-1]])
        traces.append({**common, **shade, "hoverinfo": "skip", "showlegend": False})
    if len(curve.mean) <= FEW_POINTS:
        common["mode"] = "lines+markers"
    look = {"name": line.label, "line": {"color": color, "dash": dash}, "marker": {"color": color}}
    points = {"x": _numbers(curve.steps), "y": _numbers(curve.mean)}
    traces.append({**common, **look, **points, "hovertemplate": "%{y:,.6~g}"})
    return traces


def _numbers(values: Iterable[float]) -> list[float]:
    """Numbers of JSON that are no longer than a chart can show."""
    return [float(f"{value:.8g}") for value in values]


def depth_figures(run: RunRecord) -> list[tuple[str, str, Json]]:
    """(name of the set, what carrying is worth, the figure) for each set of the last evaluation."""
    cell, (_, curves) = run.setting("data.seq_len", 0), last_curves(run)
    found = []
    for name, curve in curves.items():
        found.append((name or "held out", in_words(curve, cell), depth_figure(curve)))
    return found


def depth_figure(curve: DepthCurve) -> Json:
    """Both losses over the depth on a logarithmic axis; below, the gain with its errors.

    The losses have no error bars: how hard documents are cancels in the gain.
    """
    points = [point for point in curve.points if point.start]
    gains = [(point.start, point.gain) for point in points if point.gain]
    from_zero = [(point.start, point.from_zero) for point in points if point.from_zero]
    bars = [ERRORS_SHOWN * gain.error if math.isfinite(gain.error) else None for _, gain in gains]
    errors = {"array": bars, "color": "c2/0.5", "thickness": 1}
    traces = [
        _depth_trace("carried", "c0", [(point.start, point.loss) for point in points]),
        _depth_trace("from zero at each cell", "c1", from_zero),
        _depth_trace("gain of carrying", "c2", gains) | {"yaxis": "y2", "error_y": errors},
    ]
    layout = {
        "xaxis": {"type": "log", "anchor": "y2", "title": {"text": "tokens of the document before"}},
        "yaxis": {"title": {"text": "loss, nats per token"}, "domain": [0.42, 1.0]},
        "yaxis2": {"title": {"text": "gain, nats per token"}, "domain": [0.0, 0.34], "zeroline": True},
        "hovermode": "closest",
    }
    return {"data": traces, "layout": layout, "isOfDepth": True}


def _depth_trace(label: str, color: str, line: Sequence[tuple[int, Number]]) -> Json:
    return {
        "name": label,
        "x": [start * math.sqrt(2) for start, _ in line],  # the geometric middle of a bucket
        "y": [number.value for _, number in line],
        "text": [f"{label}, {start:,} tokens on: {number}" for start, number in line],
        "hovertemplate": "%{text}<extra></extra>",
        "mode": "lines+markers",
        "line": {"color": color},
    }
