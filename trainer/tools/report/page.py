"""The page as one string: HTML, styles, figures, plotly.js and the script that draws."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources

from jinja2 import Environment, PackageLoader
from plotly.offline import get_plotlyjs

from trainer.config.load import flatten
from trainer.tools.diagnostics.diagnose import Diagnosis
from trainer.tools.report.charts import NUM_COLORS, Chart, make_charts, restart_marks
from trainer.tools.report.run_summary import config_differences, over_seeds, rows_text, summaries, value_text
from trainer.wording import few


def render_page(diagnoses: Sequence[Diagnosis]) -> str:
    """The whole page of one run, or of several to overlay in the order of the colors."""
    # All that comes from a run is escaped by jinja.
    loader = PackageLoader("trainer.tools.report", "assets")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"rows": rows_text, "value": value_text, "few": few, "flat": flatten}
    runs = [diagnosis.run for diagnosis in diagnoses]
    groups: dict[str, list[Chart]] = {}
    for chart in make_charts(runs):
        groups.setdefault(chart.group, []).append(chart)
    figures = [chart.figure for group in groups.values() for chart in group]
    title = ", ".join(run.name for run in runs)
    assets = resources.files("trainer.tools.report") / "assets"
    layout = json.loads((assets / "layout.json").read_text())
    return environment.get_template("page.html").render(
        diagnoses=diagnoses,
        num_colors=NUM_COLORS,
        title=title,
        notes=[(run.name, note) for run in runs for note in run.notes],
        results=summaries(runs),
        differences=config_differences(runs),
        seeds=over_seeds(runs) if len(runs) > 1 else [],
        groups=groups,
        page={"title": title, "figures": figures, "layout": layout, "marks": restart_marks(runs)},
        css=(assets / "report.css").read_text(encoding="utf-8"),
        script=(assets / "report.js").read_text(encoding="utf-8"),
        plotly=get_plotlyjs(),
    )
