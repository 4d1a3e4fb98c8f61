"""The page as one string: HTML, styles, data, plotly.js and the script that draws."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from itertools import groupby
from string import Template
from typing import Any, Final

from trainer.config.load import flatten
from trainer.errors import UserError
from trainer.tools.diagnostics.diagnose import Diagnosis, Ruling
from trainer.tools.report.charts import Chart, drawn_keys, make_charts
from trainer.tools.report.figures import HEIGHT, NUM_COLORS, depth_figures, encode_charts, skipped_step
from trainer.tools.report.run_summary import config_differences, ran, rows_text, summaries, summarize, value_text
from trainer.tools.runs.load import RunRecord, settings_by_step
from trainer.wording import counted, few, number_text

_MOST_STEP_BUTTONS: Final = 6
_MOST_SETTINGS: Final = 2_000  # no file of a run makes a page of any size
FINDINGS: Final = "Findings"
DEPTH: Final = "Is context worth its cost?"
# By verdict: its mark and its class.
LOOKS: Final = {"healthy": ("✓", "verdict good"), "no_findings": ("?", "verdict"), "findings": ("!", "verdict bad")}


class Html(str):
    """Text that is HTML already; `element` escapes any other text."""

    __slots__ = ()


NOTHING: Final = Html()


def element(tag: str, *children: str, **attributes: object) -> Html:
    """One element; all that comes from a run is escaped here.

    Attributes: `class_` means `class`, `_` becomes `-`, None and False are left out.
    """
    words = []
    for name, value in attributes.items():
        key = name.rstrip("_").replace("_", "-")
        if value is True:
            words.append(f" {key}")
        elif value is not None and value is not False:
            words.append(f' {key}="{escape(str(value))}"')
    return Html(f"<{tag}{''.join(words)}>{join(children)}</{tag}>")


def join(children: Iterable[str]) -> Html:
    """The children concatenated, escaped unless they are HTML."""
    return Html("".join(each if isinstance(each, Html) else escape(each) for each in children))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], class_: str | None = None) -> Html:
    """A table with row headers in its first column; it scrolls horizontally on narrow screens."""
    top, body = element("tr", *(element("th", cell, scope="col") for cell in head)), []
    for first, *others in rows:
        cells = [element("td", cell) for cell in others]
        body.append(element("tr", element("th", first, scope="row"), *cells))
    inner = element("table", element("thead", top), element("tbody", *body), class_=class_)
    return element("div", inner, class_="scroll")


def _slug(text: str) -> str:
    return re.sub(r"[\W_]", "-", text.lower())


def _code(text: str) -> Html:
    return element("code", text)


def _swatch(color: int) -> Html:
    return element("i", class_=f"swatch c{color % NUM_COLORS}", aria_hidden="true")


def _optional(tag: str, text: str, class_: str | None = None) -> Html:
    """An element, or nothing if the text is empty."""
    if not text:
        return NOTHING
    return element(tag, text, class_=class_)


# ---- Verdict and outcome


def _verdict_card(number: int, diagnosis: Diagnosis, *, is_single: bool) -> Html:
    """The verdict in a sentence, and of one of several runs its findings too."""
    front = found = NOTHING
    sign, look = LOOKS.get(diagnosis.verdict or "", ("", "verdict"))
    if not is_single:
        front, found = element("h3", _swatch(number), diagnosis.run.name), _findings(diagnosis)
    mark = element("span", sign, class_="mark", aria_hidden="true")
    return element("div", front, element("p", mark, diagnosis.summary), found, class_=look)


def _findings(diagnosis: Diagnosis) -> Html:
    """The findings, and by how many rules; nothing of a run without training rows."""
    if diagnosis.verdict is None:
        return NOTHING
    parts = [element("p", f"Checked on {rows_text(diagnosis.run.steps)}: {diagnosis.coverage}.", class_="note")]
    items = [_finding(ruling) for ruling in (*diagnosis.findings, *diagnosis.advice)]
    if items:
        parts.append(element("ol", *items))
    return join(parts)


def _finding(ruling: Ruling) -> Html:
    badge = element("span", str(ruling.severity), class_=f"badge {ruling.severity}")
    parts: list[str] = [element("h4", ruling.rule.name, " ", badge), element("p", ruling.outcome.sentence)]
    if ruling.fix:
        parts.append(element("p", _code(ruling.fix)))
    look: dict[str, Any] = {"type": "button", "class_": "step", "title": "Show in the charts"}
    shown, num_more = ruling.steps[:_MOST_STEP_BUTTONS], len(ruling.steps) - _MOST_STEP_BUTTONS
    buttons = [element("button", f"step {step:,}", data_step=step, **look) for step in shown]
    if buttons:
        more = f" and {num_more:,} more" if num_more > 0 else ""
        parts.append(element("p", "Seen at ", *buttons, more, class_="evidence"))
    return element("li", *parts)


def _notes(runs: Sequence[RunRecord]) -> Html:
    """Problems of the files and settings that a resume changed, if there are any."""
    items = []
    for run in runs:
        front, notes = f"{run.name}: " if len(runs) > 1 else "", list(run.notes)
        for key, value in settings_by_step(run).items():
            if isinstance(value, Mapping):
                notes.append(f"changed on a resume: {key} = {value_text(value)}")
        items += [element("li", front, note) for note in notes[:_MOST_SETTINGS]]
    if not items:
        return NOTHING
    return element("ul", *items, class_="notes")


def _tiles(run: RunRecord) -> Html:
    """The results of one run; of those that it does not have, the ones that say why."""
    tiles = []
    for row in [*ran(run), *summarize(run)]:
        if row.value is not None or row.note:
            unit = row.unit if row.value is not None else ""
            value = element("dd", row.text, " ", _optional("span", unit, "unit"), class_="value")
            tiles.append(element("div", element("dt", row.label), value, _optional("dd", row.note, "note")))
    return element("dl", *tiles, class_="tiles")


def _head(runs: Sequence[RunRecord]) -> list[Html]:
    return [join([_swatch(number), run.name]) for number, run in enumerate(runs)]


def _outcome_table(runs: Sequence[RunRecord]) -> Html:
    """The results of several runs side by side."""
    rows = []
    for results in summaries(runs):
        cells = [join([each.text, _optional("small", each.note)]) for each in results]
        rows.append([results[0].heading, *cells])
    return _table(["", *_head(runs)], rows, class_="numbers")


def _differences(runs: Sequence[RunRecord]) -> Html:
    """The settings in which several runs differ."""
    rows = [[_code(key), *(_code(value_text(value)) for value in values)] for key, values in config_differences(runs)]
    if not rows:
        return element("p", "All settings and recorded versions are the same.")
    return _table(["Setting", *_head(runs)], rows[:_MOST_SETTINGS])


# ---- Charts


def chart_groups(charts: Sequence[Chart]) -> dict[str, Html]:
    """Charts by heading of the catalog; undrawn ones in words at the end of their group."""
    sections = {}
    for group, members in groupby(enumerate(charts), key=lambda pair: pair[1].group):
        numbered = list(members)
        drawn = [pair for pair in numbered if pair[1].is_drawn]
        grids = []
        for is_wide, look in ((True, "grid views"), (False, "grid")):
            cards = [_card(*pair) for pair in drawn if pair[1].is_wide is is_wide]
            if cards:
                grids.append(element("div", *cards, class_=look))
        still = [_unchanged(chart) for _, chart in numbered if not chart.is_drawn]
        if still:
            items = element("ul", *still)
            grids.append(element("div", element("h3", "The same throughout"), items, class_="still"))
        sections[group] = join(grids)
    return sections


def _unchanged(chart: Chart) -> Html:
    """A chart that is not drawn in words: its value, or its values and the names of its lines."""
    values = [number_text(float(line.curve.mean[0])) for line in chart.lines]
    text = values[0]
    if len({*values}) > 1:
        text = " · ".join(f"{line.label} {value}" for line, value in zip(chart.lines, values, strict=True))
    return element("li", f"{chart.title}: {text} {chart.unit} ", _code(few(chart.keys)))


def _card(number: int, chart: Chart) -> Html:
    title = element("h3", chart.title, " ", _optional("span", chart.unit, "unit"), id=f"chart-{number}")
    facts = [element("div", element("dt", name), element("dd", text)) for name, text in chart.facts]
    about = NOTHING
    if facts:
        about = element("details", element("summary", "About"), element("dl", *facts))
    height = 228 + 20 * (len(chart.lines) // 6)  # of a legend that breaks
    if chart.is_heat:
        height = max(17 * len(chart.lines) + 60, 160)
    return element(
        "article",
        element("header", title, element("p", _code(few(chart.keys)), class_="keys")),
        _plot(number, height),
        _small_print(chart),
        about,
        class_="card wide" if chart.is_wide else "card",
    )


def _plot(number: int, height: int) -> Html:
    """Where the page draws the chart of this number, whose heading has the id `chart-NUMBER`."""
    style, title = f"height: {height}px", f"chart-{number}"
    return element("div", class_="plot", data_chart=number, style=style, role="group", aria_labelledby=title)


def _small_print(chart: Chart) -> Html:
    """Buckets, and values that cannot be drawn or are out of range."""
    curves = [line.curve for line in chart.lines]
    notes = []
    if any(curve.is_reduced for curve in curves):
        notes.append("points are buckets: the line is the mean, the shade the range")
    num_bad = sum(len(curve.bad_steps) for curve in curves)
    if num_bad:
        notes.append(f"{counted(num_bad, 'value')} not finite, marked by ×")
    step = skipped_step(chart)
    if step is not None:
        notes.append(f"scaled without step {step:,.0f}: zoom to see it")
    return _optional("p", " · ".join(notes), "small")


def _depth(runs: Sequence[RunRecord], number: int) -> tuple[Html, list[dict[str, Any]]]:
    """The loss against depth in each set of each run, and its charts, numbered from `number`."""
    parts: list[Html] = []
    figures: list[dict[str, Any]] = []
    for run in runs:
        for name, words, figure in depth_figures(run):
            at = number + len(figures)
            title = element("h3", name if len(runs) == 1 else f"{run.name}, {name}", id=f"chart-{at}")
            parts.append(element("article", title, element("p", words), _plot(at, HEIGHT), class_="card wide"))
            figures.append(figure)
    return element("div", *parts, class_="grid views") if parts else NOTHING, figures


# ---- Settings


def _settings(file: str, runs: Sequence[tuple[str, Mapping[str, Any]]]) -> Html:
    """All values of a file of each run, collapsed if there are several."""
    tables = []
    for name, values in runs:
        rows = [[_code(key), _code(value_text(value))] for key, value in flatten(values).items()]
        if rows:
            summary = element("summary", f"{name}: {counted(len(rows), 'value')}")
            tables.append(
                element("details", summary, _table(("Key", "Value"), rows[:_MOST_SETTINGS]), open=len(runs) == 1)
            )
    return join(tables or [element("p", f"No {file} next to metrics.jsonl.")])


# ---- The page


def plotly_script() -> str:
    """plotly.js from the Python package. Raises UserError: plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError("plotly", "is needed and not installed", "run: pip install '.[report]'") from None
    return str(get_plotlyjs())


def render_page(diagnoses: Sequence[Diagnosis], *, plotly: str = "", plotly_file: str = "") -> str:
    """The whole page of one run, or of several to overlay in the order of the colors.
    `plotly`: the source of plotly.js; empty: it is in `plotly_file`, next to the page."""
    runs = [diagnosis.run for diagnosis in diagnoses]
    title, legend, is_single = runs[0].name, NOTHING, len(runs) == 1
    charts = make_charts(runs)
    depth, figures = _depth(runs, len(charts))
    cards = [_verdict_card(*each, is_single=is_single) for each in enumerate(diagnoses)]
    overview = {"Verdict": join(cards), "About the record": _notes(runs)}
    if is_single:
        overview["Outcome"] = _tiles(runs[0])
        found = _findings(diagnoses[0])
        if found:
            overview[FINDINGS] = element("div", found, class_="verdict")
    else:
        overview |= {"Outcome": _outcome_table(runs), "What differs": _differences(runs)}
        title, switches = f"{len(runs)} runs: {', '.join(run.name for run in runs)}", []
        for place, run in enumerate(runs):
            look: dict[str, Any] = {"type": "button", "aria_pressed": "true", "data_switch": place}
            switches.append(element("button", _swatch(place), run.name, **look))
        legend = element("div", *switches, class_="runs legend", role="group", aria_label="Runs")
    overview[DEPTH] = depth
    _, num_left_out = drawn_keys(runs)
    left_out = NOTHING
    if num_left_out:
        left_out = element("p", f"{counted(num_left_out, 'key')} too many for a page: metrics.jsonl has them.")
    details = {
        **chart_groups(charts),
        "Not drawn": left_out,
        "Config": _settings("config.resolved.toml", [(run.name, run.config) for run in runs]),
        "Environment": _settings("env.json", [(run.name, run.environment) for run in runs]),
    }
    script, policy = Html(f"<script>{plotly}</script>"), ""
    if not plotly:
        script, policy = element("script", src=plotly_file), " 'self' file:"
    assets = resources.files("trainer.tools.report") / "assets"
    files = ("page.html", "report.css", "report.js")
    texts = {name: (assets / name).read_text(encoding="utf-8") for name in files}
    names = [name for name, content in (overview | details).items() if content]
    links = [element("li", element("a", name, href=f"#{_slug(name)}")) for name in names]
    return Template(texts["page.html"]).substitute(
        title=escape(title),
        css=texts["report.css"],
        contents=element("ul", *links),
        overview=_sections(overview),
        switches=legend,
        details=_sections(details),
        data=encode_charts(charts, runs, more=figures),
        plotly=script,
        scripts=policy,
        script=texts["report.js"],
    )


def _sections(sections: Mapping[str, Html]) -> Html:
    """Those with content, each under its heading."""
    found = []
    for title, content in sections.items():
        if content:
            found.append(element("section", element("h2", title), content, id=_slug(title), aria_label=title))
    return join(found)
