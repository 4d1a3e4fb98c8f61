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
from trainer.tools.report.charts import Chart, Curve, Floats, Line, Reference
from trainer.tools.runs.depth_curve import DepthCurve, Number, in_words, last_curves
from trainer.tools.runs.load import RunRecord, mix_changes
from trainer.wording import number_text

NUM_COLORS: Final = 8
DASHES: Final = ("solid", "dot", "dash", "dashdot")
# In units of the median distance between points; randomly sparse keys stay below it.
WIDEST_GAP: Final = 12
FEWEST_POINTS: Final = 12  # for a median distance, and to smooth
_FEW_POINTS: Final = 25  # drawn with markers
_MOST_BAD_STEPS: Final = 200  # that are marked; the chart states their number
_MARK_BUDGET: Final = 10_000  # of restarts and changed weights, over all charts
_MOST_WORDS: Final = 6  # more would overlap; the lines are still drawn
_WORD: Final = 0.14  # of the width of a chart
_FLATTENED: Final = 3.0
SMALLEST_SPAN: Final = 1e-9  # of the colors of cells that are all alike
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
    """Restarts and changes of the mix, the latest first; some of them, if they are too many."""
    found = set[Mark]()
    for number, run in enumerate(runs):
        found |= {(number, each.global_step, "restart") for each in run.restarts}
        found |= {(number, step, "mix") for step, *_ in mix_changes(run)}
    most = max(_MARK_BUDGET // max(num_charts, 1), 1)
    return sorted(found, key=lambda each: -each[1])[:: _stride(len(found), most)]


def _stride(number: int, most: int) -> int:
    """The stride with which at most `most` of so many are shown."""
    return max(-(-number // most), 1)


def _figure(chart: Chart, runs: Sequence[RunRecord], columns: _Columns, marks: Sequence[Mark]) -> Json:
    curves = [line.curve for line in chart.lines]
    can_be_log = chart.style == "line" and all(bool((curve.low > 0).all()) for curve in curves)
    highest = max((float(curve.high.max()) for curve in curves if len(curve.high)), default=0.0)
    yaxis: Json = {"title": {"text": chart.axis}}
    if highest >= 1e4:
        yaxis["exponentformat"] = "SI"
    layout: Json = {"yaxis": yaxis, "hovermode": "x unified"}
    if chart.style == "heat":
        traces = [_heat_map(chart, columns)]
        layout = look("heat layout")
    else:
        is_single, traces = len(runs) == 1, []
        for line in chart.lines:
            traces += _line_traces(chart, line, columns, is_single=is_single)
        traces += _legend(chart, is_single=is_single)
        layout |= {"showlegend": True, "shapes": _shapes(chart, runs, marks)}
        layout["annotations"] = _crosses(chart)
    return {
        "name": f"{chart.group}: {chart.title}",
        "data": traces,
        "layout": layout,
        "levels": [level.value for level in chart.references if _is_near(chart, level)],
        "isHeat": chart.style == "heat",
        "isStacked": chart.style == "area",
        "isLog": chart.is_log and can_be_log,
        "canBeLog": can_be_log,
        "skipped": skipped_step(chart),
    }


def _legend(chart: Chart, *, is_single: bool) -> list[Json]:
    """Traces without points: an entry for each group of lines that can be hidden."""
    lines = [(line.variant, "muted", line.dash) for line in chart.lines]
    if is_single:  # of several runs, the page's legend has the colors
        lines = [(line.label, f"c{line.color % NUM_COLORS}", line.dash) for line in chart.lines]
    entries = list(dict.fromkeys(lines))
    if len(entries) < 2:
        return []
    found = []
    for label, color, dash in entries:
        stroke = {"color": color, "dash": DASHES[dash % len(DASHES)]}
        found.append({"name": label, "legendgroup": label, "line": stroke, **look("legend")})
    return found


def _broken(curve: Curve, *columns: Floats) -> list[Floats]:
    """The middle of each point's steps, and columns, with NaN where the key was absent for long."""
    steps = (curve.first + curve.last) / 2
    spacing, most = np.diff(steps), math.inf
    if len(steps) >= FEWEST_POINTS:
        most = WIDEST_GAP * float(np.median(spacing))
    gaps = np.flatnonzero(spacing > most) + 1
    return [np.insert(column.astype(np.float64), gaps, np.nan) for column in (steps, *columns)]


def _line_traces(chart: Chart, line: Line, columns: _Columns, *, is_single: bool) -> list[Json]:
    curve, hue = line.curve, f"c{line.color % NUM_COLORS}"
    common: Json = {"name": line.label, "legendgroup": line.label if is_single else line.variant}
    smooths = chart.style == "line" and len(curve.mean) >= FEWEST_POINTS
    common["meta"] = {"run": line.run, "smooths": smooths}
    stroke: Json = {"color": hue, "width": 1.8, "dash": DASHES[line.dash % len(DASHES)]}
    if line.dash:
        stroke["width"] = 1.6
    steps, mean = _broken(curve, curve.mean)
    drawn: Json = {"mode": "lines", "marker": {"color": hue}}
    if len(curve.mean) <= _FEW_POINTS:
        drawn["mode"] = "lines+markers"
    if chart.style == "area":
        steps, mean, stroke["width"] = (curve.first + curve.last) / 2, curve.mean, 1
        drawn = {**look("area"), "fillcolor": f"{hue}/0.45"}
    drawn |= {"x": columns.number(steps), "y": columns.number(mean), "line": stroke}
    drawn["hovertemplate"] = "%{y:,.6~g}"
    # The page shows the step of the first line.
    if not np.array_equal(curve.first, chart.lines[0].curve.first):
        drawn["hovertemplate"] += " at %{x:,}"
    if line.errors is not None:
        bars = np.nan_to_num(_broken(curve, ERRORS_SHOWN * line.errors)[1])
        shade = {"array": columns.number(bars), "color": f"{hue}/0.5"}
        drawn["error_y"] = look("errors") | shade
    if curve.is_reduced and chart.style == "line":
        return [common | _outline(curve, columns) | {"fillcolor": f"{hue}/0.2"}, common | drawn]
    return [common | drawn]


def _outline(curve: Curve, columns: _Columns) -> Json:
    """The area between low and high of buckets: a polygon for each range without a gap."""
    steps, low, high = _broken(curve, curve.low, curve.high)
    cuts = np.flatnonzero(np.isnan(steps))

    def there_and_back(there: Floats, back: Floats) -> Json:
        pieces = zip(np.split(there, cuts), np.split(back, cuts), strict=True)
        return columns.number(np.concatenate([np.concatenate([up, down[::-1]]) for up, down in pieces]))

    return look("outline") | {"x": there_and_back(steps, steps), "y": there_and_back(high, low)}


def _heat_map(chart: Chart, columns: _Columns) -> Json:
    """A row of cells for each line. A value of 0 or below takes the color of the lowest."""
    places = [(line.curve.first + line.curve.last) / 2 for line in chart.lines]
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
    bar["title"] = {"text": chart.axis, "side": "right", "font": bar["tickfont"]}
    return look("heat") | {
        "x": columns.number(steps),
        "y": [line.label for line in chart.lines],
        "z": [columns.number(row) for row in cells],
        "customdata": [columns.number(row) for row in values],
        "zmin": low,
        "zmax": max(high, low + SMALLEST_SPAN),
        "colorbar": bar,
    }


def skipped_step(chart: Chart) -> float | None:
    """The first step of a chart of lines, if it is out of the range of values until one zooms.

    Alone it would take most of the height; or the values are times, since data is opened in it,
    which may take as long as a hundred other steps.
    """
    curves = [line.curve for line in chart.lines if len(line.curve.mean)]
    if chart.style != "line" or not curves:
        return None
    steps = np.concatenate([(each.first + each.last) / 2 for each in curves])
    low, high = (np.concatenate([getattr(each, end) for each in curves]) for end in ("low", "high"))
    later = steps > steps.min()
    is_alone = False
    if np.count_nonzero(later) >= FEWEST_POINTS:
        whole = float(high.max()) - float(low.min())
        rest = float(high[later].max()) - float(low[later].min())
        is_alone = 0 < rest * _FLATTENED < whole
    if chart.unit == "s" or is_alone:
        return float(steps.min())
    return None


def _is_near(chart: Chart, reference: Reference) -> bool:
    """Whether the level is drawn: one that is far from the values would flatten them."""
    curves = [line.curve for line in chart.lines if len(line.curve.mean)]
    low = min((float(curve.low.min()) for curve in curves), default=0.0)
    high = max((float(curve.high.max()) for curve in curves), default=0.0)
    return low - 3 * (high - low) <= reference.value <= 4 * high


def _shapes(chart: Chart, runs: Sequence[RunRecord], marks: Sequence[Mark]) -> list[Json]:
    """The healthy band, levels, and marks; None ends at the axis, the name is the run's index."""
    shapes: list[Json] = []
    across = look("across")
    if chart.band is not None:
        low, high = chart.band
        kind = "band of no height" if low == high else "band"
        shapes.append({**look(kind), **across, "y0": low, "y1": high, "layer": "below"})

    def line_of(run: int, width: float, dash: str) -> Json:
        color = f"c{run % NUM_COLORS}" if len(runs) > 1 else "mark"
        return {"type": "line", "name": str(run), "line": {"color": color, "width": width, "dash": dash}}

    for level in chart.references:
        height = {"y0": level.value, "y1": level.value}
        if _is_near(chart, level):
            shapes.append(line_of(level.run, 1.5, "dash") | across | height)
    ends = [step for run in runs for step in (*run.steps[:1], *run.steps[-1:])]
    last = max(ends, default=0)
    apart = (last - min(ends, default=0)) * _WORD
    free = math.inf  # up to where the next word has room
    shown = {line.run for line in chart.lines}
    for run, step, word in marks:
        if run in shown:
            label = look("label")
            if len(marks) <= _MOST_WORDS and step + apart <= free:
                label |= {"text": word, "xanchor": "left"}
                free = step
                if step + apart > last:  # no room behind the line
                    label["xanchor"], free = "right", step - apart
            place = {**look("upright"), "x0": step, "x1": step}
            shapes.append(line_of(run, 1.2, "dot") | place | {"label": label})
    return shapes


def _crosses(chart: Chart) -> list[Json]:
    """A × where a value was not finite."""
    found = []
    for line in chart.lines:
        steps = line.curve.bad_steps
        shown = steps[:: _stride(len(steps), _MOST_BAD_STEPS)].tolist()
        found += [{"x": step, "name": str(line.run), **look("cross")} for step in shown]
    return found


HEIGHT = 380  # pixels
MOST_TICKS = 7
BEFORE = 2  # buckets before the first carried one


def depth_figures(run: RunRecord) -> list[tuple[str, str, Json]]:
    """(name of the set, what carrying is worth, the chart) for each set of the last evaluation."""
    _, curves = last_curves(run)
    cell = run.setting("data.seq_len", 0)
    return [(name or "held out", in_words(curve, cell), depth_figure(curve)) for name, curve in curves.items()]


def depth_figure(curve: DepthCurve) -> Json:
    """Both losses over the depth on a logarithmic axis; below, the gain with its errors.

    The losses have no error bars: how hard documents are cancels in the gain.
    """
    first = next(index for index, point in enumerate(curve.points) if point.gain)
    points = curve.points[max(first - BEFORE, 0) :]
    starts = [point.start for point in points][:: -(-len(points) // MOST_TICKS)]
    gains = [(point.start, point.gain) for point in points if point.gain]
    from_zero = [(point.start, point.from_zero) for point in points if point.from_zero]
    errors = {"array": [_bar(gain) for _, gain in gains], "color": "c2/0.5", "thickness": 1, "width": 4}
    layout = look("depth layout")
    ticks = {"tickvals": starts, "ticktext": [f"{start:,}" for start in starts]}
    layout["xaxis"] = layout["xaxis"] | ticks
    traces = [
        _trace("carried", "c0", [(point.start, point.loss) for point in points]),
        _trace("from zero at each cell", "c1", from_zero, dash="dash"),
        _trace("gain of carrying", "c2", gains) | {"yaxis": "y2", "error_y": errors},
    ]
    return {"name": "depth", "isOfSteps": False, "data": traces, "layout": layout}


def _bar(gain: Number) -> float | None:
    """Half the length of an error bar; None where the error is not known."""
    return ERRORS_SHOWN * gain.error if math.isfinite(gain.error) else None


def _trace(label: str, color: str, line: Sequence[tuple[int, Number]], *, dash: str = "solid") -> Json:
    return {
        "name": label,
        "x": [start * math.sqrt(2) for start, _ in line],  # a bucket is drawn at its geometric middle
        "y": [number.value for _, number in line],
        "text": [f"{label}, {start:,} tokens on: {number}" for start, number in line],
        "hovertemplate": "%{text}<extra></extra>",
        "mode": "lines+markers",
        "marker": {"color": color},
        "line": {"color": color, "width": 2, "dash": dash},
        "showlegend": True,
    }
