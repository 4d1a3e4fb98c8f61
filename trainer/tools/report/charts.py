"""From runs to charts: which keys share one, and how plotly draws it.

A figure is JSON: colors name CSS variables of the page, which puts the look of assets/layout.json
under every figure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonpath
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainer.metrics.catalog import CATALOG, ERROR_SUFFIX, ERRORS_SHOWN, family, is_known, lookup
from trainer.tools.runs.load import RunRecord
from trainer.tools.runs.readings import CROSS_ENTROPY, DepthCurve, Number, depth_set, in_words, last_curves, loss_unit
from trainer.wording import few

MOST_POINTS: Final = 500  # of a curve: a page of 300 curves is below 15 MB, 5 of them plotly
NUM_COLORS: Final = 8
DASHES: Final = ("solid", "dot", "dash", "dashdot")
OTHER_GROUP: Final = "Not in the catalog"
DEPTH_GROUP: Final = "Is context worth its cost?"
BUCKETS: Final = "points are buckets: the line is the mean, the shade the range"
HEIGHT, ROW_HEIGHT, DEPTH_HEIGHT = 228, 20, 380  # pixels; of a row of the legend, of about 70 characters
PLACES: Final = {spec.name: place for place, spec in enumerate(CATALOG)}
DEPTH_LAYOUT: Final = {  # x is logarithmic
    "xaxis": {"type": "log", "anchor": "y2", "title": {"text": "tokens of the document before"}},
    "yaxis": {"title": {"text": "loss per token"}, "domain": [0.42, 1.0]},
    "yaxis2": {"title": {"text": "gain per token"}, "domain": [0.0, 0.34], "zeroline": True},
    "hovermode": "closest",
}
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


def make_curve(steps: ArrayLike, values: ArrayLike, *, limit: int = MOST_POINTS) -> Curve:
    """A curve of at most `limit` points from ascending steps [V]. More values are put into buckets
    of nearly equal size, whose lowest and highest keep an outlier visible in a run of any length."""
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


@dataclass(frozen=True)
class Chart:
    """A figure, and what stands around it."""

    keys: Sequence[str]
    figure: Json
    title: str
    notes: Sequence[str]
    unit: str
    group: str
    about: str  # the meaning, with the good and bad signs
    height: int


def _row(key: str) -> str:
    """Name of the key's row in the catalog; the key itself if it is in no row."""
    return family(key) if is_known(key) else key


def make_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """The loss against depth, and charts of every other key in the order of the catalog.

    One chart shows all keys of a row of the catalog, also those of evaluations and worst ranks, and
    the bounds of the values.
    """
    curves = [last_curves(run)[1] for run in runs]
    keys = dict.fromkeys(
        key for run, drawn in zip(runs, curves, strict=True) for key in run.keys if depth_set(key) not in drawn
    )
    shared: dict[tuple[str, bool], list[str]] = {}
    for key in sorted(keys, key=lambda key: PLACES.get(_row(key), len(PLACES))):
        # Next to the values, standard errors would lie on the axis.
        chart = _row(key).removesuffix("_low").removesuffix("_high"), key.endswith(ERROR_SUFFIX)
        shared.setdefault(chart, []).append(key)
    return [*_depth_charts(runs, curves)] + [_make_chart(runs, together) for together in shared.values()]


def _make_chart(runs: Sequence[RunRecord], keys: list[str]) -> Chart:
    data: list[Json] = []
    bad: set[int] = set()
    is_reduced, folder, shown, are_many = False, commonpath(keys), set[str](), len(runs) > 1
    for place, key in enumerate(keys):
        for number, run in enumerate(runs):
            curve = make_curve(*run.column(key))
            bad.update(curve.bad_steps)
            is_reduced = is_reduced or curve.is_reduced
            color, dash = place, DASHES[place // NUM_COLORS % len(DASHES)]
            if are_many:
                color, dash = number, DASHES[place % len(DASHES)]
            line: Json = {"name": key.removeprefix(f"{folder}/"), "legendgroup": key}
            line["meta"] = [run.name * are_many, "of several steps" * curve.is_reduced]
            # The legend is of the first run with the key; others have its dashes, in their colors.
            line["showlegend"] = key not in shown
            if len(curve.steps):
                shown.add(key)
                data += [{**line, **trace} for trace in _traces(curve, f"c{color % NUM_COLORS}", dash)]
    notes = [BUCKETS] * is_reduced
    if bad:
        notes.insert(0, f"not finite at step {few([f'{step:,}' for step in sorted(bad)])}")
    layout: Json = {"shapes": [], "showlegend": len(keys) > 1}
    layout["hovermode"] = "x unified" if len(keys) * len(runs) <= NUM_COLORS else "closest"
    title, unit, group, about = keys[0], "", OTHER_GROUP, ""
    if is_known(keys[0]):
        spec = lookup(keys[0])
        title, unit, group = spec.title, spec.unit, spec.group
        about = f"{spec.description} Healthy: {spec.healthy} Trouble: {spec.pathological}"
        if unit == CROSS_ENTROPY:
            unit = loss_unit(*runs)
        if spec.band is not None:
            low, high = spec.band  # None ends at the axis
            band = {"type": "rect", "xref": "paper", "x0": 0, "x1": 1, "y0": low, "y1": high}
            layout["shapes"] = [{**band, "fillcolor": "good/0.11", "line": {"width": 0}}]
    layout["yaxis"] = {"title": {"text": unit or "no unit"}}
    height = HEIGHT + ROW_HEIGHT * (sum(len(key) + 6 for key in keys) // 70)
    return Chart(keys, {"data": data, "layout": layout}, title, notes, unit, group, about, height)


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
    traces.append({**points, **look, "hovertemplate": "%{y:,.6~g} %{meta[0]}"})
    return traces


def restart_marks(runs: Sequence[RunRecord]) -> list[Json]:
    """The lines of all charts at restarts, in the color of the run."""
    marks: list[Json] = []
    for number, run in enumerate(runs):
        look = {"color": f"c{number % NUM_COLORS}", "width": 1.2, "dash": "dot"}
        mark = {"type": "line", "line": look, "y0": 0, "y1": 1, "yref": "paper"}
        marks += [{**mark, "x0": step, "x1": step} for step in sorted({each.global_step for each in run.restarts})]
    return marks


def _numbers(values: Iterable[float]) -> list[float]:
    """Numbers of JSON that are no longer than a chart can show."""
    return [float(f"{value:.8g}") for value in values]


def _depth_charts(runs: Sequence[RunRecord], every: Sequence[Mapping[str, DepthCurve]]) -> Iterator[Chart]:
    """What carrying is worth: a chart of each set of the last evaluations, with all runs."""
    for name in dict.fromkeys(name for curves in every for name in curves):
        traces, notes = list[Json](), list[str]()
        for number, (run, curves) in enumerate(zip(runs, every, strict=True)):
            if name not in curves:
                continue
            words, colors = in_words(curves[name], run.setting("data.seq_len", 0)), ["c0", "c1", "c2"]
            if len(runs) > 1:
                words, colors = f"{run.name}: {words}", [f"c{number % NUM_COLORS}"] * 3
            notes.append(words)
            shift = 1.03**number  # so that error bars do not cover each other
            for trace in _depth_traces(curves[name], colors, shift):
                traces.append({**trace, "meta": [run.name], "showlegend": len(notes) == 1})
        figure = {"data": traces, "layout": DEPTH_LAYOUT, "isOfDepth": True}
        yield Chart((), figure, name or "held out", notes, "", DEPTH_GROUP, "", DEPTH_HEIGHT)


def _depth_traces(curve: DepthCurve, colors: Sequence[str], shift: float) -> Iterator[Json]:
    """Both losses over the depth, and below them the gain. The errors of the losses are mostly how
    hard documents are, which cancels in the gain."""
    points = [point for point in curve.points if point.start]
    lines: list[tuple[str, str, str, list[tuple[int, Number]]]] = [
        ("carried", "solid", "y", [(point.start, point.loss) for point in points]),
        ("from zero at each cell", "dot", "y", [(each.start, each.from_zero) for each in points if each.from_zero]),
        ("gain of carrying", "solid", "y2", [(point.start, point.gain) for point in points if point.gain]),
    ]
    for color, (label, dash, axis, line) in zip(colors, lines, strict=True):
        bars = [ERRORS_SHOWN * each.error if math.isfinite(each.error) else None for _, each in line]
        yield {
            "name": label,
            "legendgroup": label,
            "x": [start * math.sqrt(2) * shift for start, _ in line],  # the geometric middle of a bucket
            "customdata": [start for start, _ in line],
            "y": [number.value for _, number in line],
            "yaxis": axis,
            "error_y": {"array": bars, "color": f"{color}/0.5", "thickness": 1},
            "text": [f"{label}, {start:,} tokens on: {number}" for start, number in line],
            "hovertemplate": "%{text} %{meta[0]}<extra></extra>",
            "mode": "lines+markers",
            "line": {"color": color, "dash": dash},
        }
