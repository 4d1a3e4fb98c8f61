"""A preview as a picture: a page with four charts (extra `report`: plotly)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.tools.pictures import save_picture
from trainer.tools.preview.summary import Preview
from trainer.wording import counted


def draw(preview: Preview, out: Path) -> None:
    """Write the picture: blend, learning rate, picks by modality, longest waits.

    Raises:
        UserError: the file cannot be written, or plotly is not installed.
    """
    curves, ledger = preview.curves, preview.ledger
    views = [(f"{source.name}: {view.name}", view) for source in preview.sources for view in source.modalities]
    names = [name for name, _ in views]
    traces: list[dict[str, Any]] = [
        {"x": curves.batches, "y": shares, "name": name, "stackgroup": "blend", "line": {"shape": "hv"}}
        for name, shares in curves.shares.items()
    ]
    traces.append({"x": curves.steps, "y": curves.lr, "name": "learning rate", **_place(2)})
    for words in ("picks", "exhausts"):
        counts = [getattr(view, words) for _, view in views]
        traces.append({"type": "bar", "orientation": "h", "y": names, "x": counts, "name": words, **_place(3)})
    waits = [view.longest_wait_steps for _, view in views]
    traces.append({"type": "bar", "orientation": "h", "y": names, "x": waits, "name": "counted wait", **_place(4)})
    levels = [] if ledger is None else [("bound 2 K n", ledger.wait_bound_steps), ("stale", ledger.stale_threshold)]
    zeros = [(source.name, source.zero.first) for source in preview.sources if source.zero and source.zero.first > 0]
    shapes = [_vertical(f"weight of {name} is 0", at, 1) for name, at in zeros]
    shapes += [_vertical(name, at, 4) for name, at in levels if at is not None]
    bars = {"autorange": "reversed", "automargin": True}
    layout = {
        "grid": {"rows": 2, "columns": 2, "pattern": "independent", "ygap": 0.25},
        "xaxis": {"title": {"text": "batch"}},
        "yaxis": {"title": {"text": "share of micro-batches"}, "range": [0, 1]},
        "xaxis2": {"title": {"text": "step"}},
        "yaxis2": {"title": {"text": "learning rate"}, "rangemode": "tozero"},
        "xaxis3": {"title": {"text": "picks and exhausts, all ranks"}},
        "yaxis3": bars,
        "xaxis4": {"title": {"text": "longest wait of a reader, steps"}},
        "yaxis4": bars,
        "shapes": shapes,
    }
    title = f"{preview.name}: {counted(preview.steps, 'step')} on {counted(preview.world_size, 'rank')}"
    save_picture(traces, layout, out, title=title)


def _place(number: int) -> dict[str, str]:
    return {"xaxis": f"x{number}", "yaxis": f"y{number}"}


def _vertical(words: str, at: float, number: int) -> dict[str, Any]:
    """A dotted line across a chart, with its words."""
    axes = {"xref": "x" if number == 1 else f"x{number}", "yref": "y domain" if number == 1 else f"y{number} domain"}
    ends = {"x0": at, "x1": at, "y0": 0, "y1": 1}
    return {"type": "line", **axes, **ends, "line": {"dash": "dot"}, "label": {"text": words, "textposition": "end"}}
