"""Charts as the JSON that report.js draws."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from trainer.tools.report.charts import Chart, Line
from trainer.tools.report.curves import Curve, Floats, Ints
from trainer.tools.runs.load import RunRecord

_DIGITS: Final = 6
# Enough marks to see where they are; the chart states their number.
_MOST_BAD_STEPS: Final = 200
JsonObject = dict[str, Any]


def encode_charts(charts: Sequence[Chart], runs: Sequence[RunRecord]) -> str:
    """All charts as JSON for a <script> element."""
    steps = _StepLists()
    page = {
        "runs": [
            {"name": run.name, "restarts": sorted({restart.global_step for restart in run.restarts})} for run in runs
        ],
        "charts": [_chart(chart, steps) for chart in charts],
        "steps": steps.lists,
    }
    # "</script>" in the name of a run would end the element.
    return json.dumps(page, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


class _StepLists:
    """The steps of curves, each distinct list once: most keys of a run share theirs."""

    def __init__(self) -> None:
        self.lists: list[JsonObject] = []
        self._numbers: dict[tuple[bytes, bytes], int] = {}

    def number_of(self, curve: Curve) -> int:
        """Index of the curve's steps in `lists`."""
        key = curve.first.tobytes(), curve.last.tobytes()
        if key not in self._numbers:
            self._numbers[key] = len(self.lists)
            entry: JsonObject = {"x": _rounded((curve.first + curve.last) / 2)}
            if curve.is_reduced:
                entry |= {"first": curve.first.tolist(), "last": curve.last.tolist()}
            self.lists.append(entry)
        return self._numbers[key]


def _chart(chart: Chart, steps: _StepLists) -> JsonObject:
    return {
        "title": chart.title,
        "axis": chart.axis,
        "style": chart.style,
        "log": chart.is_log,
        "band": chart.band,
        "top": chart.top,
        "references": [{"label": ref.label, "value": _round(ref.value), "run": ref.run} for ref in chart.references],
        "lines": [_line(line, steps) for line in chart.lines],
    }


def _line(line: Line, steps: _StepLists) -> JsonObject:
    curve, spread = line.curve, line.spread
    found: JsonObject = {
        "run": line.run,
        "label": line.label,
        "color": line.color,
        "dash": line.dash,
        "steps": steps.number_of(curve),
        "y": _rounded(curve.mean),
    }
    if curve.is_reduced:
        found |= {"low": _rounded(curve.low), "high": _rounded(curve.high)}
    if spread is not None:
        found["spread"] = {"steps": steps.number_of(spread), "low": _rounded(spread.low), "high": _rounded(spread.high)}
    if len(curve.bad_steps):
        found["bad"] = curve.bad_steps[:: -(-len(curve.bad_steps) // _MOST_BAD_STEPS)].tolist()
    return found


def _round(value: float) -> float:
    rounded = float(f"{value:.{_DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def _rounded(values: Floats | Ints) -> list[float]:
    """The values with six digits: a screen shows three."""
    return [_round(value) for value in values.tolist()]
