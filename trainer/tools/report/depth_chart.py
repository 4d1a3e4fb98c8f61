"""Is context worth its cost? A chart of the loss against depth, carried and from zero."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trainer.metrics.catalog.lookup import ERRORS_SHOWN
from trainer.tools.diagnostics.depth import last_curves
from trainer.tools.report.figures import look
from trainer.tools.runs.depth_curve import DepthCurve, Number, in_words
from trainer.tools.runs.load import RunRecord

HEIGHT = 380  # pixels
MOST_TICKS = 7
BEFORE = 2  # buckets before the first carried one
Json = dict[str, Any]


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
