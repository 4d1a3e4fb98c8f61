"""The whole page in one string: HTML, styles, data, plotly.js and the script that draws. It asks the network for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Final

from trainer.errors import UserError
from trainer.report.charts import Chart, Columns, catalog_charts, group_order
from trainer.report.encode import encode_charts
from trainer.report.markup import Html, element, join
from trainer.report.sections import (
    chart_groups,
    config_sections,
    events_section,
    notes_section,
    outcome_table,
    outcome_tiles,
    slug,
    swatch,
    verdict_section,
)
from trainer.report.verdict import Verdict
from trainer.report.views import make_views
from trainer.runs.load import Run

# Points of all curves together: about 25 bytes each, so that the page stays below 15 MB with plotly's 5 MB.
POINT_BUDGET: Final = 150_000
MOST_POINTS: Final = 1_500
FEWEST_POINTS: Final = 100
# The page may run what stands in it and load nothing: a browser enforces that there is no network request.
_POLICY: Final = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_KEYS_HELP: Final = (
    "Arrow keys move along the curve, Home and End go to its ends, plus and minus zoom, 0 shows everything again."
)


def plotly_script() -> str:
    """plotly.js as it ships with the Python package.

    Raises:
        UserError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError("train report", "needs plotly", "pip install 'trainer[report]'") from None
    return str(get_plotlyjs())


def points_per_curve(runs: Sequence[Run]) -> int:
    """Points that each curve may have, so that all together stay within the budget."""
    num_curves = max(sum(len(run.keys) for run in runs), 1)
    return min(max(POINT_BUDGET // num_curves, FEWEST_POINTS), MOST_POINTS)


def make_charts(runs: Sequence[Run]) -> list[Chart]:
    """Every key of every run in some chart: the views first, then what they leave, under the headings of the catalog."""
    columns = Columns(runs, points_per_curve(runs))
    keys = columns.keys()
    views, used = make_views(columns, keys)
    charts = [*views, *catalog_charts(columns, [key for key in keys if key not in used])]
    order = group_order()
    return sorted(charts, key=lambda chart: order.index(chart.group))


def render_page(runs: Sequence[Run], verdicts: Sequence[Verdict | None], *, plotly: str) -> str:
    """The report of one run, or of several overlaid.

    Args:
        runs: at least one; their order gives the colours.
        verdicts: what a diagnosis found in each, None where there was none.
        plotly: the source of plotly.js, from `plotly_script`.
    """
    is_single = len(runs) == 1
    charts = make_charts(runs)
    outcome = outcome_tiles(runs[0]) if is_single else outcome_table(runs, verdicts)
    groups = list(dict.fromkeys(chart.group for chart in charts))
    body = [
        element("a", "Skip to the charts", href="#charts", class_="skip"),
        _header(runs),
        element("nav", _contents(groups, runs), aria_label="Contents"),
        element(
            "main",
            verdict_section(runs, verdicts),
            notes_section(runs),
            outcome,
            element("div", _toolbar(), id="charts", class_="toolbar", role="group", aria_label="Charts"),
            _run_switches(runs) if not is_single else "",
            element("p", _KEYS_HELP, id="keys-help", class_="unseen"),
            element("p", "", id="no-match", hidden=True),
            chart_groups(charts, group_order(), is_single=is_single),
            events_section(runs),
            config_sections(runs),
        ),
        element("footer", "Made by ", element("code", "train report"), " from metrics.jsonl. ", _KEYS_HELP),
    ]
    title = runs[0].name if is_single else f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    scripts = [
        f'<script type="application/json" id="data">{encode_charts(charts, runs)}</script>',
        f"<script>{plotly}</script>",
        f"<script>{_asset('report.js')}</script>",
    ]
    return "\n".join(
        ["<!doctype html>", '<html lang="en">', _head(title), "<body>", *body, *scripts, "</body>", "</html>", ""]
    )


def _asset(name: str) -> str:
    return (resources.files("trainer.report") / "assets" / name).read_text(encoding="utf-8")


def _head(title: str) -> str:
    return join(
        [
            Html("<head>"),
            Html('<meta charset="utf-8">'),
            Html(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
            Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            Html('<meta name="color-scheme" content="light dark">'),
            element("title", f"{title} · run report"),
            Html(f"<style>{_asset('report.css')}</style>"),
            Html("</head>"),
        ]
    )


def _header(runs: Sequence[Run]) -> Html:
    if len(runs) == 1:
        names: Html | str = runs[0].name
        facts = _run_facts(runs[0])
    else:
        names, facts = f"{len(runs)} runs", ", ".join(run.name for run in runs)
    theme = element("button", "Theme: auto", type="button", id="theme")
    return element(
        "header",
        element("div", element("p", "Run report", class_="kicker"), element("h1", names), element("p", facts)),
        theme,
        class_="top",
    )


def _run_facts(run: Run) -> str:
    devices = run.environment.get("devices")
    kind = str(devices[0]) if isinstance(devices, list) and devices else "CPU"
    ranks = f"{run.world_size} rank{'s' if run.world_size != 1 else ''} on {kind}" if run.world_size else ""
    packages = run.environment.get("packages")
    torch = f"torch {packages['torch']}" if isinstance(packages, dict) and packages.get("torch") else ""
    configured = str(run.setting("run.name", ""))
    return " · ".join(word for word in (configured if configured != run.name else "", ranks, torch) if word)


def _contents(groups: Sequence[str], runs: Sequence[Run]) -> Html:
    names = ["Verdict" if len(runs) == 1 else "Verdicts", "Outcome", *groups]
    names += ["Events"] if any(run.events for run in runs) else []
    names += ["Config", "Environment"]
    targets = {"Verdicts": "verdict"}
    links = [element("li", element("a", name, href=f"#{targets.get(name, slug(name))}")) for name in names]
    return element("ul", *links)


def _toolbar() -> Html:
    smoothing = [
        element("button", word, type="button", data_smoothing=level, aria_pressed="true" if level == 0 else "false")
        for level, word in enumerate(("Off", "Light", "Strong"))
    ]
    # A finger scrolls the page, so zooming needs buttons there.
    moves = [
        element("button", sign, type="button", data_move=name, aria_label=words, title=words)
        for name, sign, words in (
            ("earlier", "◀", "Earlier steps"),
            ("out", "−", "More steps"),
            ("in", "+", "Fewer steps"),
            ("later", "▶", "Later steps"),
        )
    ]
    parts = [
        element("span", "Smoothing", *smoothing, class_="choice", role="group", aria_label="Smoothing"),
        element("button", "Log scale", type="button", id="log", aria_pressed="false"),
        element("span", "Steps", *moves, class_="choice", role="group", aria_label="Shown steps"),
        element("button", "Show all", type="button", id="reset", disabled=True),
        element(
            "label",
            element("span", "Find a chart", class_="unseen"),
            Html('<input id="find" type="search" placeholder="Find a chart: loss, ledger/, gns …" autocomplete="off">'),
        ),
    ]
    return join(parts)


def _run_switches(runs: Sequence[Run]) -> Html:
    """The legend of the page where colours mean runs; each entry hides its run."""
    switches = [
        element("button", swatch(number), run.name, type="button", aria_pressed="true", data_switch=number)
        for number, run in enumerate(runs)
    ]
    return element("div", *switches, class_="runs legend", role="group", aria_label="Runs")
