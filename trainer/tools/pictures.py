"""Pages that open from disk, with plotly.js inside: pictures, and the file of a report (extra `report`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from trainer.cli.terminal import writing
from trainer.errors import UserError
from trainer.files import write_file


def plotly_script() -> str:
    """plotly.js from the Python package.

    Raises:
        UserError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError("plotly", "is needed and not installed", "run: pip install plotly") from None
    return str(get_plotlyjs())


def check_page(out: str) -> Path:
    """The file that `--out` names.

    Raises:
        UserError: its name does not end in .html, or plotly is not installed.
    """
    if Path(out).suffix.lower() not in (".html", ".htm"):
        raise UserError("--out", f"must end in .html, got {out}", "name an .html file")
    plotly_script()
    return Path(out)


def save_picture(traces: Sequence[Mapping[str, Any]], layout: Mapping[str, Any], out: Path, *, title: str) -> None:
    """Write a plotly figure as a page, the same bytes for the same figure.

    Raises:
        UserError: the file cannot be written, or plotly is not installed.
    """
    style = {"title": {"text": title}, "plot_bgcolor": "#f4f5f7", "legend": {"orientation": "h"}}
    # "</script>" in a name would end the element.
    figure = json.dumps([traces, style | dict(layout)], allow_nan=False).replace("<", "\\u003c")
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<div id="figure" style="height: 95vh"></div><script>{plotly_script()}</script>'
        f'<script>Plotly.newPlot("figure", ...{figure}, {{ responsive: true, displaylogo: false }});</script></html>\n'
    )
    write_page(page, out)


def write_page(page: str, out: Path) -> int:
    """Write a page atomically; its size in bytes.

    Raises:
        UserError: the file cannot be written.
    """
    content = page.encode("utf-8", "backslashreplace")  # names of files may hold any bytes
    with writing("--out"):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_file(out, content, follow=True)
    return len(content)
