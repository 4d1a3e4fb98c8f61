"""Charts as the JSON that the page's script draws."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from trainer.report.charts import Chart, Line
from trainer.report.curves import Curve, Floats, Ints
from trainer.runs.load import Run

_DIGITS: Final = 6
# More marks than this tell nothing; the chart still says how many there are.
_MOST_BAD_STEPS: Final = 200
JsonObject = dict[str, Any]


def encode_charts(charts: Sequence[Chart], runs: Sequence[Run]) -> str:
    """All charts as JSON that can stand inside a <script> element; equal lists of steps are written once."""
    steps = _StepLists()
    encoded = [_chart(chart, steps) for chart in charts]
    described = [
        {"name": run.name, "restarts": sorted({restart.global_step for restart in run.restarts})} for run in runs
    ]
    page = {"runs": described, "charts": encoded, "steps": steps.lists}
    # "</script>" in a run's name would end the element.
    return json.dumps(page, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


class _StepLists:
    """Lists of steps by their content: most keys of a run share one."""

    def __init__(self) -> None:
        self.lists: list[JsonObject] = []
        self._numbers: dict[tuple[bytes, bytes], int] = {}

    def number_of(self, curve: Curve) -> int:
        key = curve.first.tobytes(), curve.last.tobytes()
        if key not in self._numbers:
            self._numbers[key] = len(self.lists)
            middle = (curve.first + curve.last) / 2
            entry: JsonObject = {"x": _short(middle)}
            if curve.is_reduced:
                entry |= {"first": curve.first.tolist(), "last": curve.last.tolist()}
            self.lists.append(entry)
        return self._numbers[key]


def _chart(chart: Chart, steps: _StepLists) -> JsonObject:
    references = [{"label": ref.label, "value": _number(ref.value), "run": ref.run} for ref in chart.references]
    return {
        "title": chart.title,
        "unit": chart.unit,
        "style": chart.style,
        "log": chart.is_log,
        "band": chart.band,
        "references": references,
        "lines": [_line(line, steps) for line in chart.lines],
    }


def _line(line: Line, steps: _StepLists) -> JsonObject:
    curve = line.curve
    found: JsonObject = {
        "run": line.run,
        "label": line.label,
        "color": line.color,
        "dash": line.dash,
        "steps": steps.number_of(curve),
        "y": _short(curve.mean),
    }
    if curve.is_reduced:
        found |= {"low": _short(curve.low), "high": _short(curve.high)}
    if line.spread is not None:
        found["spread"] = {
            "steps": steps.number_of(line.spread),
            "low": _short(line.spread.low),
            "high": _short(line.spread.high),
        }
    if len(curve.bad_steps):
        found["bad"] = _some(curve.bad_steps)
    return found


def _some(steps: Ints) -> list[int]:
    stride = -(-len(steps) // _MOST_BAD_STEPS)
    return [int(step) for step in steps[::stride]]


def _number(value: float) -> float:
    rounded = float(f"{value:.{_DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def _short(values: Floats) -> list[float]:
    """The values with six digits: a screen shows three."""
    return [_number(value) for value in values.tolist()]
