"""The page as one string: HTML, styles, figures, plotly.js and the script that draws."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from itertools import groupby
from typing import Final

from trainer.config.load import flatten
from trainer.errors import UserError
from trainer.tools.diagnostics.diagnose import Diagnosis
from trainer.tools.report.charts import NUM_COLORS, depth_figures, make_charts
from trainer.tools.report.run_summary import (
    config_differences,
    rows_text,
    summaries,
    value_text,
)
from trainer.wording import few

# By verdict: its mark and its class.
LOOKS: Final = {"healthy": ("✓", "good"), "no_findings": ("?", ""), "findings": ("!", "bad")}


def render_page(diagnoses: Sequence[Diagnosis], *, plotly: str) -> str:
    """The whole page of one run, or of several to overlay in the order of the colors.

    `plotly`: the source of plotly.js.
    Raises UserError: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, PackageLoader
    except ImportError:
        raise needed("jinja2") from None
    # All that comes from a run is escaped by jinja.
    loader = PackageLoader("trainer.tools.report", "assets")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"rows": rows_text, "value": value_text, "few": few, "flat": flatten}
    runs = [diagnosis.run for diagnosis in diagnoses]
    charts = make_charts(runs)
    depth = [(run.name, *figure) for run in runs for figure in depth_figures(run)]
    figures = [figure for *_, figure in depth] + [chart.figure for chart in charts if chart.figure]
    assets = resources.files("trainer.tools.report") / "assets"
    return environment.get_template("page.html").render(
        diagnoses=diagnoses,
        looks=LOOKS,
        num_colors=NUM_COLORS,
        title=", ".join(run.name for run in runs),
        notes=[(run.name, note) for run in runs for note in run.notes],
        results=summaries(runs),
        differences=config_differences(runs),
        groups={group: list(members) for group, members in groupby(charts, key=lambda chart: chart.group)},
        depth=depth,
        page={"figures": figures, "layout": json.loads((assets / "layout.json").read_text())},
        css=(assets / "report.css").read_text(encoding="utf-8"),
        script=(assets / "report.js").read_text(encoding="utf-8"),
        plotly=plotly,
    )


def plotly_script() -> str:
    """plotly.js from the Python package. Raises UserError: plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise needed("plotly") from None
    return str(get_plotlyjs())


def needed(package: str) -> UserError:
    return UserError(package, "is needed and not installed", "run: pip install '.[report]'")
