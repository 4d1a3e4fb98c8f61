"""Charts as plotly figures, in JSON: colors name the page's CSS variables, numbers are base64."""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any, Final

import numpy as np

from trainer.metrics.catalog.lookup import ERRORS_SHOWN
from trainer.tools.report.charts import Chart, Curve, Line
from trainer.tools.runs.depth_curve import DepthCurve, Number, in_words, last_curves
from trainer.tools.runs.load import RunRecord
from trainer.tools.runs.noise_scale import B_BIG
from trainer.wording import number_text

NUM_COLORS: Final = 8
HEIGHT: Final = 380  # of the loss against depth, in pixels
DASHES: Final = ("solid", "dot", "dash", "dashdot")
_LEAST_SMOOTHED: Final = 12  # points
_FEW_POINTS: Final = 25  # drawn with markers
_MOST_BAD_STEPS: Final = 200  # that are marked; the chart states their number
_MARK_BUDGET: Final = 10_000  # of restarts, over all charts
_MOST_WORDS: Final = 6  # more would overlap; the lines are still drawn
_WORD: Final = 0.14  # of the width of a chart
_FLATTENED: Final = 3.0
Json = dict[str, Any]
Mark = tuple[int, int]  # run, step


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
    columns, marks = _Columns(), _marks(runs, len(charts))
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


def _marks(runs: Sequence[RunRecord], num_charts: int) -> list[Mark]:
    """Restarts, the latest first; of too many, those alone."""
    found = {(number, each.global_step) for number, run in enumerate(runs) for each in run.restarts}
    most = max(_MARK_BUDGET // max(num_charts, 1), 1)
    return sorted(found, key=lambda each: -each[1])[:most]


def _figure(chart: Chart, runs: Sequence[RunRecord], columns: _Columns, marks: Sequence[Mark]) -> Json:
    can_be_log = not chart.is_heat and all(bool((line.curve.low > 0).all()) for line in chart.lines)
    is_single, traces = len(runs) == 1, []
    layout: Json = {
        "yaxis": {"title": {"text": chart.unit or "no unit"}},
        "hovermode": "x unified",
        "showlegend": True,
        "shapes": _shapes(chart, runs, marks),
        "annotations": _crosses(chart),
    }
    if chart.is_heat:
        traces, layout = [_heat_map(chart, columns)], look("heat layout")
    else:
        for line in chart.lines:
            traces += _line_traces(chart, line, columns, has_legend=is_single and len(chart.lines) > 1)
    return {
        "name": f"{chart.group}: {chart.title}",
        "data": traces,
        "layout": layout,
        "isHeat": chart.is_heat,
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
    if curve.is_reduced:
        return [common | _outline(curve, columns) | {"fillcolor": f"{hue}/0.2"}, common | drawn]
    return [common | drawn]


def _outline(curve: Curve, columns: _Columns) -> Json:
    """The area between low and high of buckets: a polygon there and back."""
    steps = np.concatenate([curve.steps, curve.steps[::-1]])
    ends = np.concatenate([curve.high, curve.low[::-1]])
    return look("outline") | {"x": columns.number(steps), "y": columns.number(ends)}


def _heat_map(chart: Chart, columns: _Columns) -> Json:
    """A row of cells for each line. A value of 0 or below takes the color of the lowest."""
    places = [line.curve.steps for line in chart.lines]
    steps = np.unique(np.concatenate(places))
    values = np.full((len(places), len(steps)), np.nan)
    for row, (place, line) in enumerate(zip(places, chart.lines, strict=True)):
        values[row, np.searchsorted(steps, place)] = line.curve.mean
    positive = values[values > 0]
    low, high = -1.0, 0.0
    if len(positive):
        low, high = math.log10(positive.min()), math.log10(positive.max())
    cells = np.log10(np.where(values <= 0, 10**low, values))
    ticks: list[float] = list(range(math.ceil(low), math.floor(high) + 1))
    if len(ticks) < 2:  # less than a decade
        ticks = [low, high]
    bar = look("color bar") | {"tickvals": ticks}
    bar["ticktext"] = [number_text(10**tick, 2) for tick in ticks]
    bar["title"] = {"text": chart.unit or "no unit", "side": "right", "font": bar["tickfont"]}
    return look("heat") | {
        "x": columns.number(steps),
        "y": [line.label for line in chart.lines],
        "z": [columns.number(row) for row in cells],
        "customdata": [columns.number(row) for row in values],
        "zmin": low,
        "zmax": max(high, low + 1e-9),
        "colorbar": bar,
    }


def skipped_step(chart: Chart) -> float | None:
    """The first step of a chart of lines, if it is out of the range of values until one zooms.

    Alone it would take most of the height; or the values are times, since data is opened in it,
    which may take as long as a hundred other steps.
    """
    curves = [line.curve for line in chart.lines if len(line.curve.mean)]
    if chart.is_heat or not curves:
        return None
    steps = np.concatenate([each.steps for each in curves])
    low, high = (np.concatenate([getattr(each, end) for each in curves]) for end in ("low", "high"))
    later = steps > steps.min()
    is_alone = False
    if np.count_nonzero(later) >= _LEAST_SMOOTHED:
        whole = float(high.max()) - float(low.min())
        rest = float(high[later].max()) - float(low[later].min())
        is_alone = 0 < rest * _FLATTENED < whole
    if chart.unit == "s" or is_alone:
        return float(steps.min())
    return None


def _shapes(chart: Chart, runs: Sequence[RunRecord], marks: Sequence[Mark]) -> list[Json]:
    """The healthy band and marks; None ends at the axis, the name is the run's index."""
    shapes: list[Json] = []
    if chart.band is not None:
        low, high = chart.band
        shapes.append({**look("band"), "y0": low, "y1": high})
    ends = [step for run in runs for step in (*run.steps[:1], *run.steps[-1:])]
    last = max(ends, default=0)
    apart = (last - min(ends, default=0)) * _WORD
    free = math.inf  # up to where the next word has room
    shown = {line.run for line in chart.lines}
    for run, step in marks:
        if run in shown:
            color = f"c{run % NUM_COLORS}" if len(runs) > 1 else "mark"
            label = look("label")
            if len(marks) <= _MOST_WORDS and step + apart <= free:
                label |= {"text": "restart", "xanchor": "left"}
                free = step
                if step + apart > last:  # no room behind the line
                    label["xanchor"], free = "right", step - apart
            stroke = {"color": color, "width": 1.2, "dash": "dot"}
            place = {"x0": step, "x1": step, "label": label}
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


def depth_figures(run: RunRecord) -> list[tuple[str, str, Json]]:
    """(name of the set, what carrying is worth, the chart) for each set of the last evaluation."""
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
    errors = {"array": bars, "color": "c2/0.5", "thickness": 1, "width": 4}
    traces = [
        _trace("carried", "c0", [(point.start, point.loss) for point in points]),
        _trace("from zero at each cell", "c1", from_zero),
        _trace("gain of carrying", "c2", gains) | {"yaxis": "y2", "error_y": errors},
    ]
    return {"name": "depth", "isOfSteps": False, "data": traces, "layout": look("depth layout")}


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
