"""Is context worth its cost? A chart of the loss against depth, carried and from zero, for each set of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trainer.metrics.catalog.lookup import ERRORS_SHOWN
from trainer.tools.diagnostics.depth import all_last_curves
from trainer.tools.runs.depth_curve import DepthCurve, Number, in_words
from trainer.tools.runs.load import RunRecord

HEIGHT = 380  # pixels
MOST_TICKS = 7
BEFORE = 2  # buckets before the first carried one
Json = dict[str, Any]


def depth_figures(run: RunRecord) -> list[tuple[str, str, Json]]:
    """(name of the set, what carrying is worth in words, the chart) for each set of the last evaluation."""
    _, curves = all_last_curves(run)
    cell = run.setting("data.seq_len", 0)
    return [(name or "held out", in_words(curve, cell), depth_figure(curve)) for name, curve in curves.items()]


def depth_figure(curve: DepthCurve) -> Json:
    """Both losses over the depth on a logarithmic axis; below, their difference, the gain, with its errors.

    The losses have no error bars: their errors are mostly of how hard the documents are, which cancels in the gain.
    """
    first = next(index for index, point in enumerate(curve.points) if point.gain)
    points = curve.points[max(first - BEFORE, 0) :]
    starts = [point.start for point in points][:: -(-len(points) // MOST_TICKS)]
    gain = _trace("gain of carrying", "c2", [(point.start, point.gain) for point in points if point.gain])
    bars = [ERRORS_SHOWN * point.gain.error for point in points if point.gain]
    # Where the error is not known there is no bar.
    shown = [error if math.isfinite(error) else None for error in bars]
    gain |= {"yaxis": "y2", "error_y": {"array": shown, "color": "c2/0.5", "thickness": 1, "width": 4}}
    from_zero = [(point.start, point.from_zero) for point in points if point.from_zero]
    axis: Json = {"type": "log", "tickvals": starts, "ticktext": [f"{start:,}" for start in starts], "anchor": "y2"}
    axis |= {"title": {"text": "tokens of the document before the target"}, "unifiedhovertitle": {"text": ""}}
    zero = {"zeroline": True, "zerolinecolor": "muted"}
    return {
        "name": "depth",
        "isOfSteps": False,
        "data": [
            _trace("carried", "c0", [(point.start, point.loss) for point in points]),
            _trace("from zero at each cell", "c1", from_zero, dash="dash"),
            gain,
        ],
        "layout": {
            "xaxis": axis,
            "yaxis": {"title": {"text": "loss, nats per token"}, "domain": [0.42, 1.0]},
            "yaxis2": {"title": {"text": "gain, nats per token"}, "domain": [0.0, 0.34]} | zero,
            "hovermode": "closest",
            "showlegend": True,
        },
    }


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
