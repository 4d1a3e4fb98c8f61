"""The page as one string: HTML, styles, data, plotly.js and the script that draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from string import Template
from typing import Final

from trainer.errors import UserError
from trainer.tools.diagnostics.diagnose import Diagnosis
from trainer.tools.report.charts import Chart, Columns, catalog_charts, group_order, not_flattened
from trainer.tools.report.encode import encode_charts
from trainer.tools.report.markup import Html, element, join
from trainer.tools.report.profile_section import profile_section
from trainer.tools.report.sections import (
    changes_section,
    chart_groups,
    config_sections,
    events_section,
    notes_section,
    slug,
    summary_tables,
    summary_tiles,
    swatch,
    verdict_section,
)
from trainer.tools.report.views import make_views
from trainer.tools.runs.load import RunRecord
from trainer.wording import counted

# Over all curves. A point takes about 25 bytes, so that the page stays below 15 MB, including the 5 MB of plotly.
POINT_BUDGET: Final = 150_000
MOST_POINTS: Final = 1_500
FEWEST_POINTS: Final = 100


def plotly_script() -> str:
    """plotly.js from the Python package.

    Raises:
        UserError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError("train report", "needs plotly", "run: pip install plotly") from None
    return str(get_plotlyjs())


def points_per_curve(runs: Sequence[RunRecord]) -> int:
    """The number of points per curve that keeps the page within the budget."""
    num_curves = max(sum(len(run.keys) for run in runs), 1)
    return min(max(POINT_BUDGET // num_curves, FEWEST_POINTS), MOST_POINTS)


def make_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """Charts with every key of every run, sorted by the headings of the catalog; in each group the views come first."""
    columns = Columns(runs, points_per_curve(runs))
    keys = columns.keys()
    views, used = make_views(columns, keys)
    charts = [*views, *catalog_charts(columns, [key for key in keys if key not in used])]
    order = group_order()
    return sorted(map(not_flattened, charts), key=lambda chart: order.index(chart.group))


@dataclass(frozen=True)
class Parts:
    """What on the page changes with the rows of its runs.

    Attributes:
        html: by the id of the element that holds it.
        data: the charts as JSON.
    """

    html: Mapping[str, str]
    data: str


def render_parts(diagnoses: Sequence[Diagnosis]) -> Parts:
    """The report on one run, or on several overlaid. `diagnoses`: of at least one run, in the order of the colors."""
    runs = [diagnosis.run for diagnosis in diagnoses]
    is_single = len(runs) == 1
    charts = make_charts(runs)
    summary = summary_tiles(runs[0]) if is_single else summary_tables(diagnoses)
    html = {
        "subheading": join([_run_facts(runs[0]) if is_single else ", ".join(run.name for run in runs)]),
        "contents": _contents(charts, runs),
        "overview": join([verdict_section(diagnoses), notes_section(runs), summary, changes_section(runs)]),
        "details": join(
            [
                chart_groups(charts, is_single=is_single),
                profile_section(runs),
                events_section(runs),
                config_sections(runs),
            ]
        ),
    }
    return Parts(html, encode_charts(charts, runs))


def render_page(
    diagnoses: Sequence[Diagnosis],
    *,
    plotly: str,
    parts: Parts | None = None,
    version: str | None = None,
    line: str = "",
) -> str:
    """The whole page.

    Args:
        diagnoses: of at least one run, in the order of the colors.
        plotly: the source of plotly.js, from `plotly_script`.
        parts: of these diagnoses, if they have been rendered already.
        version: of the parts. Given, the page asks its server for newer ones; otherwise it makes no network request.
        line: how the runs stand, for a page that asks.
    """
    runs = [diagnosis.run for diagnosis in diagnoses]
    parts = render_parts(diagnoses) if parts is None else parts
    names = ", ".join(run.name for run in runs)
    bar = element("p", line, id="live", class_="live", data_version=version) if version is not None else ""
    return Template(_asset("page.html")).substitute(
        parts.html,
        title=escape(names if len(runs) == 1 else f"{len(runs)} runs: {names}"),
        css=_asset("report.css"),
        connect="" if version is None else "; connect-src 'self'",
        heading=escape(names if len(runs) == 1 else f"{len(runs)} runs"),
        bar=bar,
        switches="" if len(runs) == 1 else _run_switches(runs),
        data=parts.data,
        plotly=plotly,
        script=_asset("report.js") + ("" if version is None else _asset("live.js")),
    )


def _asset(name: str) -> str:
    return (resources.files("trainer.tools.report") / "assets" / name).read_text(encoding="utf-8")


def _run_facts(run: RunRecord) -> str:
    devices = run.environment.get("devices")
    kind = str(devices[0]) if isinstance(devices, list) and devices else "CPU"
    ranks = f"{counted(run.world_size, 'rank')} on {kind}" if run.world_size else ""
    packages = run.environment.get("packages")
    torch = f"torch {packages['torch']}" if isinstance(packages, dict) and packages.get("torch") else ""
    configured = str(run.setting("run.name", ""))
    return " · ".join(word for word in (configured if configured != run.name else "", ranks, torch) if word)


def _contents(charts: Sequence[Chart], runs: Sequence[RunRecord]) -> Html:
    groups = dict.fromkeys(chart.group for chart in charts)
    names = ["Outcome", *groups, *(["Events"] if any(run.events for run in runs) else []), "Config", "Environment"]
    verdict = "Verdict" if len(runs) == 1 else "Verdicts"
    links = [(verdict, "verdict"), *((name, slug(name)) for name in names)]
    return element("ul", *(element("li", element("a", name, href=f"#{target}")) for name, target in links))


def _run_switches(runs: Sequence[RunRecord]) -> Html:
    """The legend of the runs; each entry is a button that hides its run."""
    switches = [
        element("button", swatch(number), run.name, type="button", aria_pressed="true", data_switch=number)
        for number, run in enumerate(runs)
    ]
    return element("div", *switches, class_="runs legend", role="group", aria_label="Runs")
