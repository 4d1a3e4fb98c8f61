"""From runs to charts: which keys share one, and how plotly draws it.

A figure is JSON: colors name CSS variables of the page, which puts the look of assets/layout.json
under every figure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from os.path import commonpath
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainer.metrics.catalog import CATALOG, ERROR_SUFFIX, ERRORS_SHOWN, family, is_known, lookup
from trainer.tools.runs.load import RunRecord
from trainer.tools.runs.readings import B_BIG, DepthCurve, Number, in_words, is_by_depth, last_curves
from trainer.wording import few

# Over all curves: the page stays below 15 MB, including the 5 MB of plotly.
POINT_BUDGET: Final = 150_000
MOST_POINTS, FEWEST_POINTS = 1_500, 100  # of a curve
MOST_MARKS: Final = 100  # of restarts
NUM_COLORS: Final = 8
DASHES: Final = ("solid", "dot", "dash", "dashdot")
OTHER_GROUP: Final = "Not in the catalog"
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


@dataclass
class Chart:
    """The lines of some keys over the steps, of one run or of several."""

    keys: list[str]
    title: str
    figure: Json
    unit: str = ""
    group: str = OTHER_GROUP
    notes: list[str] = field(default_factory=list)

    @property
    def facts(self) -> dict[str, str]:
        """The meaning of each row of the catalog, with its good and bad signs, and its title."""
        found: dict[str, str] = {}
        for spec in map(lookup, filter(is_known, self.keys)):
            text = f"{spec.description} Healthy: {spec.healthy} Trouble: {spec.pathological}"
            found.setdefault(text, spec.title)
        return found


def _row(key: str) -> str:
    """Name of the key's row in the catalog; the key itself if it is in no row."""
    return family(key)[0] if is_known(key) else key


def make_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Charts of every key, but for the loss against depth, in the order of the catalog.

    One chart shows all keys of a row of the catalog, also those of evaluations and worst ranks, or
    of the rows of a view.
    """
    every = dict.fromkeys(key for run in runs for key in run.keys)
    # The loss against depth has a drawing of its own, and all rows of a key may have been replaced.
    keys = [key for key in every if not is_by_depth(key) and any(run.column(key)[0] for run in runs)]
    num_curves = max(len(keys) * len(runs), 1)
    limit = min(max(POINT_BUDGET // num_curves, FEWEST_POINTS), MOST_POINTS)
    shared: dict[tuple[str, bool], list[str]] = {}
    for key in sorted(keys, key=lambda key: PLACES.get(_row(key), len(PLACES))):
        row = _row(key)
        # Next to the values, standard errors would lie on the axis.
        chart = VIEW_OF.get(row, row), key.endswith(ERROR_SUFFIX)
        shared.setdefault(chart, []).append(key)
    return [_make_chart(runs, name, together, limit) for (name, _), together in shared.items()]


def _make_chart(runs: Sequence[RunRecord], name: str, keys: list[str], limit: int) -> Chart:
    figure: Json = {"data": [], "layout": {"shapes": [], "showlegend": len(keys) > 1}}
    chart = Chart(keys, keys[0], figure)
    if is_known(keys[0]):
        spec = lookup(keys[0])
        chart = Chart(keys, spec.title, figure, spec.unit, spec.group)
        if name in VIEWS:
            chart.title = name
        elif spec.band is not None:
            low, high = spec.band  # None ends at the axis
            band = {"type": "rect", "xref": "paper", "x0": 0, "x1": 1, "y0": low, "y1": high}
            figure["layout"]["shapes"] = [{**band, "fillcolor": "good/0.11", "line": {"width": 0}}]
    bad: set[int] = set()
    folder = commonpath(keys)
    for place, key in enumerate(keys):
        for number, run in enumerate(runs):
            # The legend is that of the first run; the others have its dashes in their own colors.
            line: Json = {"name": key.removeprefix(f"{folder}/"), "legendgroup": key, "showlegend": not number}
            meta, color, dash = {"run": number, "name": ""}, place, DASHES[0]
            if len(runs) > 1:
                meta["name"], color, dash = run.name, number, DASHES[place % len(DASHES)]
            curve = make_curve(*run.column(key), limit=limit)
            if len(curve.steps):
                traces = _traces(curve, f"c{color % NUM_COLORS}", dash)
                figure["data"] += [{**line, "meta": meta, **trace} for trace in traces]
            bad.update(curve.bad_steps)
            if curve.is_reduced:
                chart.notes = ["points are buckets: the line is the mean, the shade the range"]
    if bad:
        chart.notes.insert(0, f"not finite at step {few([f'{step:,}' for step in sorted(bad)])}")
    figure["layout"]["yaxis"] = {"title": {"text": chart.unit or "no unit"}}
    figure["layout"]["hovermode"] = "x unified" if len(keys) * len(runs) <= NUM_COLORS else "closest"
    return chart


def _traces(curve: Curve, color: str, dash: str) -> list[Json]:
    """The line, below it the range of its buckets: a polygon there and back."""
    traces: list[Json] = []
    if curve.is_reduced:
        shade: Json = {"fill": "toself", "fillcolor": f"{color}/0.2", "line": {"width": 0}}
        shade["x"] = _numbers([*curve.steps, *curve.steps[::-1]])
        shade["y"] = _numbers([*curve.high, *curve.low[::-1]])
        traces.append({**shade, "mode": "lines", "hoverinfo": "skip", "showlegend": False})
    points = {"x": _numbers(curve.steps), "y": _numbers(curve.mean)}
    look = {"line": {"color": color, "dash": dash}, "marker": {"color": color}}
    traces.append({**points, **look, "hovertemplate": "%{y:,.6~g} %{meta.name}"})
    return traces


def restart_marks(runs: Sequence[RunRecord]) -> list[Json]:
    """The lines of all charts at restarts, each named by the index of its run."""
    marks: list[Json] = []
    for number, run in enumerate(runs):
        look = {"color": f"c{number % NUM_COLORS}", "width": 1.2, "dash": "dot"}
        for step in sorted({each.global_step for each in run.restarts[-MOST_MARKS:]}):
            ends = {"x0": step, "x1": step, "y0": 0, "y1": 1, "yref": "paper"}
            marks.append({"type": "line", "name": str(number), "line": look, **ends})
    return marks


def _numbers(values: Iterable[float]) -> list[float]:
    """Numbers of JSON that are no longer than a chart can show."""
    return [float(f"{value:.8g}") for value in values]


def depth_figures(run: RunRecord) -> list[tuple[str, str, Json]]:
    """(name of the set, what carrying is worth, the figure) for each set of the last evaluation."""
    cell, (_, curves) = run.setting("data.seq_len", 0), last_curves(run)
    return [(name or "held out", in_words(curve, cell), depth_figure(curve)) for name, curve in curves.items()]


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
