"""The page as one string: HTML, styles, data, plotly.js and the script that draws."""

from __future__ import annotations

import json
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
# No file of a run makes a page of any size.
_MOST_EVENTS, _MOST_SETTINGS, _MOST_DETAILS = 200, 2_000, 4_000
FINDINGS: Final = "Findings"
DEPTH: Final = "Is context worth its cost?"
# By verdict: its mark and its class.
LOOKS: Final = {
    "healthy": ("✓", "verdict good"),
    "no_findings": ("?", "verdict"),
    "findings": ("!", "verdict bad"),
}


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
    return Html("".join(map(_escaped, children)))


def _escaped(text: str) -> str:
    return text if isinstance(text, Html) else escape(text)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str, class_: str | None = None) -> Html:
    """A table with row headers in its first column; it scrolls horizontally on narrow screens."""
    top, body = element("tr", *(element("th", cell, scope="col") for cell in head)), []
    for first, *others in rows:
        cells = [element("td", cell) for cell in others]
        body.append(element("tr", element("th", first, scope="row"), *cells))
    unseen = element("caption", caption, class_="unseen")
    inner = element("table", unseen, element("thead", top), element("tbody", *body), class_=class_)
    return element("div", inner, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _section(title: str, *children: str, class_: str | None = None) -> Html:
    """A section of the page with its heading."""
    return element("section", element("h2", title), *children, id=_slug(title), aria_label=title, class_=class_)


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
    """The verdict, and of one of several runs its findings too."""
    mark = front = found = NOTHING
    sign, look = LOOKS.get(diagnosis.verdict or "", ("", "verdict"))
    if sign:
        mark = element("span", sign, class_="mark", aria_hidden="true")
    if not is_single:
        front = element("h3", _swatch(number), diagnosis.run.name)
    if sign and not is_single:
        found = _findings(diagnosis)
    return element("div", front, element("p", mark, diagnosis.summary), found, class_=look)


def _findings(diagnosis: Diagnosis) -> Html:
    parts = [element("p", f"Checked on {rows_text(diagnosis.run.steps)}: {diagnosis.coverage}.", class_="note")]
    items = [_finding(ruling) for ruling in (*diagnosis.findings, *diagnosis.advice)]
    if items:
        parts.append(element("ol", *items))
    return join(parts)


def _finding(ruling: Ruling) -> Html:
    badge = element("span", str(ruling.severity), class_=f"badge {ruling.severity}")
    parts: list[str] = [element("h4", ruling.rule.name, " ", badge), element("p", ruling.outcome.sentence)]
    knob = ruling.outcome.knob
    if knob is not None:
        setting = f"{knob.key} = {knob.suggested}"
        parts.append(element("p", "Try ", _code(setting), str(knob).removeprefix(setting)))
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
        items += [element("li", front, note) for note in notes[:_MOST_EVENTS]]
    if not items:
        return NOTHING
    return _section("About the record", element("ul", *items, class_="notes"))


def _tiles(run: RunRecord) -> Html:
    """The results of one run; of those that it does not have, the ones that say why."""
    tiles = []
    for row in [*ran(run), *summarize(run)]:
        if row.value is not None or row.note:
            unit = row.unit if row.value is not None else ""
            value = element("dd", row.text, " ", _optional("span", unit, "unit"), class_="value")
            note = _optional("dd", row.note, "note")
            tiles.append(element("div", element("dt", row.label), value, note))
    return _section("Outcome", element("dl", *tiles, class_="tiles"))


def _outcome_tables(diagnoses: Sequence[Diagnosis]) -> Html:
    """The results of several runs side by side, and the settings in which they differ."""
    runs = [diagnosis.run for diagnosis in diagnoses]
    head = ["", *(join([_swatch(number), run.name]) for number, run in enumerate(runs))]
    rows, different = [], []
    for results in summaries(runs):
        cells = [join([each.text, _optional("small", each.note)]) for each in results]
        rows.append([results[0].heading, *cells])
    for key, values in config_differences(runs):
        different.append([_code(key), *(_code(value_text(value)) for value in values)])
    settings: Html = element("p", "All settings and recorded versions are the same.")
    if different:
        settings = _table(["Setting", *head[1:]], different[:_MOST_SETTINGS], caption="Settings that differ")
    outcome = _table(head, rows, caption="Outcome of each run", class_="numbers")
    return join([_section("Outcome", outcome), _section("What differs", settings)])


# ---- Charts


def chart_groups(charts: Sequence[Chart]) -> Html:
    """Charts under the headings of the catalog; undrawn ones in words at the end of their group."""
    parts = []
    for group, members in groupby(enumerate(charts), key=lambda pair: pair[1].group):
        numbered = list(members)
        grids = []
        for is_wide in (True, False):
            drawn = [pair for pair in numbered if pair[1].is_drawn]
            cards = [_card(*pair) for pair in drawn if pair[1].is_wide is is_wide]
            if cards:
                grids.append(element("div", *cards, class_="grid views" if is_wide else "grid"))
        still = [_unchanged(chart) for _, chart in numbered if not chart.is_drawn]
        if still:
            items = element("ul", *still)
            grids.append(element("div", element("h3", "The same throughout"), items, class_="still"))
        parts.append(_section(group, *grids, class_="charts"))
    return join(parts)


def _unchanged(chart: Chart) -> Html:
    """A chart that is not drawn in words: its value, or its values and the names of its lines."""
    names: dict[str, list[str]] = {}
    for line in chart.lines:
        names.setdefault(number_text(float(line.curve.mean[0])), []).append(line.label)
    values = [f"{', '.join(labels)} {value}" for value, labels in names.items()]
    if len(names) == 1:
        values = list(names)
    return element("li", f"{chart.title}: {' · '.join(values)} {chart.unit} ", _code(few(chart.keys)))


def _card(number: int, chart: Chart) -> Html:
    title = element("h3", chart.title, " ", _optional("span", chart.unit, "unit"), id=f"chart-{number}")
    levels = [f"{level.label}: {number_text(level.value)}" for level in chart.references]
    facts = [element("div", element("dt", name), element("dd", text)) for name, text in chart.facts]
    height, about = 228 + 20 * (len(chart.lines) // 6), NOTHING  # of a legend that breaks
    if chart.style == "heat":
        height = max(17 * len(chart.lines) + 60, 160)
    if facts:
        about = element("details", element("summary", "About"), element("dl", *facts))
    return element(
        "article",
        element("header", title, element("p", _code(few(chart.keys)), class_="keys")),
        _optional("p", " · ".join(dict.fromkeys(levels)), "small levels"),
        _plot(number, height),
        _small_print(chart),
        about,
        class_="card wide" if chart.is_wide else "card",
        data_name=f"{chart.group}: {chart.title}",
    )


def _plot(number: int, height: int) -> Html:
    """Where the page draws the chart of this number, whose heading has the id `chart-NUMBER`."""
    aria = {"aria_roledescription": "chart", "aria_labelledby": f"chart-{number}"}
    aria["aria_describedby"] = "keys-help"
    style = f"height: {height}px"
    return element("div", class_="plot", data_chart=number, style=style, tabindex="0", role="group", **aria)


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
    if not parts:
        return NOTHING, []
    return _section(DEPTH, element("div", *parts, class_="grid views")), figures


# ---- Events, settings


def _events(runs: Sequence[RunRecord]) -> Html:
    """The first lines of events.jsonl of each run."""
    rows = []
    for run in runs:
        for event in run.events[:_MOST_EVENTS]:
            rest = dict(event)
            name, step = rest.pop("event", "?"), rest.pop("step", "")
            step = rest.pop("global_step", step)
            rest.pop("time", None)
            details = json.dumps(rest, ensure_ascii=False)[:_MOST_DETAILS]
            rows.append([str(name)[:_MOST_DETAILS], run.name, str(step), details])
    if not rows:
        return NOTHING
    parts = [_table(("Event", "Run", "Step", "Details"), rows, caption="Events")]
    if any(len(run.events) > _MOST_EVENTS for run in runs):
        parts.append(element("p", f"The first {_MOST_EVENTS} of each run; events.jsonl has all."))
    return _section("Events", *parts)


def _settings(title: str, file: str, runs: Sequence[tuple[str, Mapping[str, Any]]]) -> Html:
    """All values of a file of each run, collapsed if there are several."""
    tables = []
    for name, values in runs:
        rows = [[_code(key), _code(value_text(value))] for key, value in flatten(values).items()]
        if rows:
            inner = _table(("Key", "Value"), rows[:_MOST_SETTINGS], caption=f"{title} of {name}")
            summary = element("summary", f"{name}: {counted(len(rows), 'value')}")
            tables.append(element("details", summary, inner, open=len(runs) == 1))
    return _section(title, *(tables or [element("p", f"No {file} next to metrics.jsonl.")]))


# ---- The page


def render_parts(diagnoses: Sequence[Diagnosis]) -> dict[str, str]:
    """The parts of the page that show its runs: HTML by id, and the charts under `data`.
    `diagnoses`: of one run, or of several to overlay in the order of the colors."""
    runs = [diagnosis.run for diagnosis in diagnoses]
    is_single = len(runs) == 1
    charts = make_charts(runs)
    cards = [_verdict_card(*each, is_single=is_single) for each in enumerate(diagnoses)]
    events, (depth, figures) = _events(runs), _depth(runs, len(charts))
    outcome, names = _outcome_tables(diagnoses), ["Verdict", "Outcome"]
    if is_single:
        outcome = _tiles(runs[0])
    if is_single and diagnoses[0].verdict is not None:
        findings = element("div", _findings(diagnoses[0]), class_="verdict")
        outcome = join([outcome, _section(FINDINGS, findings)])
        names.append(FINDINGS)
    # The contents name no section that is not there.
    if depth:
        names.append(DEPTH)
    names += dict.fromkeys(chart.group for chart in charts)
    if events:
        names.append("Events")
    links = [element("a", name, href=f"#{_slug(name)}") for name in [*names, "Config", "Environment"]]
    details = [chart_groups(charts)]
    _, num_left_out = drawn_keys(runs)
    if num_left_out:
        text = f"{counted(num_left_out, 'key')} too many for a page: metrics.jsonl has them."
        details.append(element("p", text))
    details += [
        events,
        _settings("Config", "config.resolved.toml", [(run.name, run.config) for run in runs]),
        _settings("Environment", "env.json", [(run.name, run.environment) for run in runs]),
    ]
    return {
        "contents": element("ul", *(element("li", link) for link in links)),
        "overview": join([_section("Verdict", *cards), _notes(runs), outcome, depth]),
        "details": join(details),
        "data": encode_charts(charts, runs, more=figures),
    }


def plotly_script() -> str:
    """plotly.js from the Python package. Raises UserError: plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError("plotly", "is needed and not installed", "run: pip install '.[report]'") from None
    return str(get_plotlyjs())


def render_page(names: Sequence[str], parts: Mapping[str, str], *, plotly: str = "", plotly_file: str = "") -> str:
    """The whole page.

    Args:
        names: of the runs, in the order of the colors.
        parts: from `render_parts`.
        plotly: the source of plotly.js; empty: it is in `plotly_file`, next to the page.
    """
    title, legend = names[0], NOTHING
    if len(names) > 1:
        title, switches = f"{len(names)} runs: {', '.join(names)}", []
        for place, name in enumerate(names):
            look: dict[str, Any] = {"type": "button", "aria_pressed": "true", "data_switch": place}
            switches.append(element("button", _swatch(place), name, **look))
        legend = element("div", *switches, class_="runs legend", role="group", aria_label="Runs")
    script, policy = f"<script>{plotly}</script>", ""
    if not plotly:
        script, policy = element("script", src=plotly_file), " 'self' file:"
    assets = resources.files("trainer.tools.report") / "assets"
    files = ("page.html", "report.css", "report.js")
    texts = {name: (assets / name).read_text(encoding="utf-8") for name in files}
    return Template(texts["page.html"]).substitute(
        parts,
        title=escape(title),
        css=texts["report.css"],
        switches=legend,
        plotly=script,
        scripts=policy,
        script=texts["report.js"],
    )
