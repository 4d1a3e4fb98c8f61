"""The page as one string: HTML, styles, data, plotly.js and the script that draws. It makes no network request."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Final

from trainer.diagnostics.diagnose import Diagnosis
from trainer.errors import UserError
from trainer.report.charts import Chart, Columns, catalog_charts, group_order
from trainer.report.encode import encode_charts
from trainer.report.markup import Html, element, join
from trainer.report.sections import (
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
from trainer.report.views import make_views
from trainer.runs.load import RunRecord
from trainer.runs.wording import counted

# Over all curves. A point takes about 25 bytes, so that the page stays below 15 MB, including the 5 MB of plotly.
POINT_BUDGET: Final = 150_000
MOST_POINTS: Final = 1_500
FEWEST_POINTS: Final = 100
# Only inline scripts and styles: the browser enforces that the page makes no network request.
_POLICY: Final = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_KEYS_HELP: Final = (
    "Arrow keys move along the curve, Home and End jump to its ends, plus and minus zoom, 0 resets the zoom."
)


def plotly_script() -> str:
    """plotly.js from the Python package.

    Raises:
        UserError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError("train report", "needs plotly", "run: pip install 'trainer[report]'") from None
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
    return sorted(charts, key=lambda chart: order.index(chart.group))


def render_page(diagnoses: Sequence[Diagnosis], *, plotly: str) -> str:
    """The report on one run, or on several overlaid.

    Args:
        diagnoses: of at least one run, in the order of the colors.
        plotly: the source of plotly.js, from `plotly_script`.
    """
    runs = [diagnosis.run for diagnosis in diagnoses]
    is_single = len(runs) == 1
    charts = make_charts(runs)
    groups = list(dict.fromkeys(chart.group for chart in charts))
    body = [
        element("a", "Skip to the charts", href="#charts", class_="skip"),
        _header(runs),
        element("nav", _contents(groups, runs), aria_label="Contents"),
        element(
            "main",
            verdict_section(diagnoses),
            notes_section(runs),
            summary_tiles(runs[0]) if is_single else summary_tables(diagnoses),
            element("div", _toolbar(), id="charts", class_="toolbar", role="group", aria_label="Charts"),
            _run_switches(runs) if not is_single else "",
            element("p", _KEYS_HELP, id="keys-help", class_="unseen"),
            element("p", "", id="no-match", hidden=True),
            chart_groups(charts, is_single=is_single),
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


def _header(runs: Sequence[RunRecord]) -> Html:
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


def _run_facts(run: RunRecord) -> str:
    devices = run.environment.get("devices")
    kind = str(devices[0]) if isinstance(devices, list) and devices else "CPU"
    ranks = f"{counted(run.world_size, 'rank')} on {kind}" if run.world_size else ""
    packages = run.environment.get("packages")
    torch = f"torch {packages['torch']}" if isinstance(packages, dict) and packages.get("torch") else ""
    configured = str(run.setting("run.name", ""))
    return " · ".join(word for word in (configured if configured != run.name else "", ranks, torch) if word)


def _contents(groups: Sequence[str], runs: Sequence[RunRecord]) -> Html:
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
    # On touch screens a drag scrolls the page, so zooming needs buttons.
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


def _run_switches(runs: Sequence[RunRecord]) -> Html:
    """The legend of the runs; each entry is a button that hides its run."""
    switches = [
        element("button", swatch(number), run.name, type="button", aria_pressed="true", data_switch=number)
        for number, run in enumerate(runs)
    ]
    return element("div", *switches, class_="runs legend", role="group", aria_label="Runs")
