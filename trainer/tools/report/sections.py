"""The sections of the page, from plain data to HTML."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from trainer.config.load import flatten
from trainer.tools.diagnostics.diagnose import Diagnosis, Ruling
from trainer.tools.report.charts import Chart, Line
from trainer.tools.report.curves import Curve
from trainer.tools.report.markup import Html, element, join, table, value_text
from trainer.tools.report.run_summary import SummaryRow, config_differences, heading, rows_text, summarize
from trainer.tools.report.undrawn import distinct_values, is_undrawn, short_list, undrawn_lists, words_of
from trainer.tools.runs.load import RunRecord
from trainer.tools.runs.settings import settings_by_step
from trainer.wording import counted, number_text

_MOST_STEP_BUTTONS: Final = 6
_MOST_EVENTS: Final = 200
_MOST_ENDS: Final = 4
_NUM_COLORS: Final = 8
_NUM_DASHES: Final = 4


def slug(text: str) -> str:
    """A heading as an id."""
    return "".join(letter if letter.isalnum() else "-" for letter in text.lower())


def swatch(color: int | None, dash: int = 0) -> Html:
    """A sample of a line: its color (None: neutral) and its dash style."""
    name = "x" if color is None else color % _NUM_COLORS
    return element("i", class_=f"swatch c{name} d{dash % _NUM_DASHES}", aria_hidden="true")


def section(title: str, *children: str, id: str | None = None, class_: str | None = None) -> Html:
    """A section of the page with its heading."""
    name = id or slug(title)
    head = element("h2", title, id=f"{name}-head")
    return element("section", head, *children, id=name, aria_labelledby=f"{name}-head", class_=class_)


def _optional(tag: str, text: str, class_: str | None = None) -> Html:
    """An element, or nothing if the text is empty."""
    return element(tag, text, class_=class_) if text else Html("")


def verdict_section(diagnoses: Sequence[Diagnosis]) -> Html:
    """The verdict on each run."""
    cards = []
    for number, diagnosis in enumerate(diagnoses):
        heading = element("h3", swatch(number), diagnosis.run.name) if len(diagnoses) > 1 else ""
        cards.append(_verdict_card(heading, diagnosis))
    return section("Verdict" if len(diagnoses) == 1 else "Verdicts", *cards, id="verdict")


def _verdict_card(heading: str, diagnosis: Diagnosis) -> Html:
    if diagnosis.verdict is None:
        return element("div", heading, element("p", diagnosis.summary), class_="verdict")
    line = element("p", _mark(diagnosis), diagnosis.summary)
    items = [_finding(ruling) for ruling in diagnosis.by_severity]
    found = element("ol", *items) if items else ""
    rows = [
        (
            element("code", ruling.rule.name),
            ruling.result,
            ruling.outcome.sentence,
            element("small", f"{ruling.rule.threshold} ({ruling.rule.why})"),
        )
        for ruling in diagnosis.rulings
    ]
    head = ("Rule", "Result", "Measured", "Condition for a finding")
    rules = element("details", element("summary", f"All {len(rows)} rules"), table(head, rows, caption="Rules"))
    checked = element("p", f"Checked on {rows_text(diagnosis.run.steps)}.", class_="note")
    state = {"healthy": " good", "findings": " bad"}.get(diagnosis.verdict, "")
    return element("div", heading, line, checked, found, rules, class_=f"verdict{state}")


def _mark(diagnosis: Diagnosis) -> Html:
    sign = {"healthy": "✓", "no_findings": "?"}.get(str(diagnosis.verdict), "!")
    return element("span", sign, class_="mark", aria_hidden="true")


def _finding(ruling: Ruling) -> Html:
    badge = element("span", str(ruling.severity), class_=f"badge {ruling.severity}")
    parts: list[str] = [element("h4", ruling.title, " ", badge), element("p", ruling.outcome.sentence)]
    if ruling.outcome.knob is not None and ruling.has_config:
        knob = ruling.outcome.knob
        parts.append(element("p", "Try ", element("code", knob.setting), knob.remark))
    elif ruling.fix:
        parts.append(element("p", f"{ruling.fix[0].upper()}{ruling.fix[1:]}"))
    if ruling.steps:
        parts.append(_step_buttons(ruling.steps))
    return element("li", *parts)


def _step_buttons(steps: Sequence[int]) -> Html:
    """Buttons that zoom all charts to the steps of the evidence."""
    shown = steps[:_MOST_STEP_BUTTONS]
    buttons = [
        element("button", f"step {step:,}", type="button", class_="step", data_step=step, title="Show in the charts")
        for step in shown
    ]
    more = f" and {len(steps) - len(shown):,} more" if len(steps) > len(shown) else ""
    return element("p", "Seen at ", *buttons, more, class_="evidence")


def notes_section(runs: Sequence[RunRecord]) -> Html:
    """Problems of the files, if there are any."""
    items = []
    for run in runs:
        front = f"{run.name}: " if len(runs) > 1 else ""
        items += [element("li", f"{front}{note}") for note in run.notes]
    return section("About the record", element("ul", *items, class_="notes")) if items else Html("")


def changes_section(runs: Sequence[RunRecord]) -> Html:
    """The settings that a resume changed, if there are any."""
    rows = [
        [element("code", key), *([run.name] if len(runs) > 1 else []), element("code", value_text(value))]
        for run in runs
        for key, value in settings_by_step(run).items()
        if isinstance(value, Mapping)
    ]
    head = ["Setting", *(["Run"] if len(runs) > 1 else []), "Value"]
    return section("Settings changed on a resume", table(head, rows, caption="Changed settings")) if rows else Html("")


def summary_tiles(run: RunRecord) -> Html:
    """The results of one run as tiles; of those that it does not have, the ones that say why."""
    tiles = [_tile(row) for row in summarize(run) if row.value is not None or row.note]
    return section("Outcome", element("dl", *tiles, class_="tiles"))


def _tile(row: SummaryRow) -> Html:
    value = element(
        "dd", row.text, " ", _optional("span", "" if row.value is None else row.unit, "unit"), class_="value"
    )
    return element("div", element("dt", row.words or row.label), value, _optional("dd", row.note, "note"))


def summary_tables(diagnoses: Sequence[Diagnosis]) -> Html:
    """The results of several runs side by side, and the settings in which they differ."""
    runs = [diagnosis.run for diagnosis in diagnoses]
    head = ["", *(join([swatch(number), run.name]) for number, run in enumerate(runs))]
    verdicts = [
        element("span", _mark(diagnosis), " ", diagnosis.summary) if diagnosis.verdict else "not diagnosed"
        for diagnosis in diagnoses
    ]
    rows: list[list[str]] = [["Verdict", *verdicts]]
    for results in zip(*map(summarize, runs), strict=True):
        cells = [join([result.text, _optional("small", result.note)]) for result in results]
        rows.append([heading(results), *cells])
    different = [
        [element("code", key), *(element("code", value_text(value)) for value in values)]
        for key, values in config_differences(runs)
    ]
    settings: Html = element("p", "All settings and recorded versions are the same.")
    if different:
        settings = table(["Setting", *head[1:]], different, caption="Settings that differ")
    outcome = section("Outcome", table(head, rows, caption="Outcome of each run", class_="numbers"))
    return join([outcome, section("What differs", settings)])


def chart_groups(charts: Sequence[Chart], *, is_single: bool) -> Html:
    """Charts, sorted by group, under the headings of the catalog; undrawn ones in lists at the end of their group."""
    parts = []
    for group, members in groupby(enumerate(charts), key=lambda pair: pair[1].group):
        views: list[Html] = []
        drawn: list[Html] = []
        undrawn: list[Chart] = []
        for number, chart in members:
            if is_undrawn(chart):
                undrawn.append(chart)
            else:
                (views if chart.is_wide else drawn).append(_card(number, chart, is_single=is_single))
        wide = element("div", *views, class_="grid views") if views else ""
        small = element("div", *drawn, class_="grid") if drawn else ""
        parts.append(section(group, wide, small, undrawn_lists(undrawn), class_="charts"))
    return join(parts)


def _card(number: int, chart: Chart, *, is_single: bool) -> Html:
    head = element("h3", chart.title, " ", _optional("span", chart.unit, "unit"), id=f"chart-{number}")
    keys = element("p", element("code", ", ".join(short_list(chart.keys))), class_="keys")
    plot = element(
        "div",
        class_="plot",
        data_chart=number,
        tabindex="0",
        role="group",
        aria_roledescription="chart",
        aria_labelledby=f"chart-{number}",
        aria_describedby="keys-help",
    )
    readout = element("p", _last_values(chart), class_="readout", aria_live="polite")
    facts = [element("div", element("dt", name), element("dd", text)) for name, text in chart.facts]
    about = element("details", element("summary", "About"), element("dl", *facts)) if facts else ""
    return element(
        "article",
        element("header", head, keys),
        _legend(chart, is_single=is_single),
        plot,
        readout,
        _small_print(chart),
        about,
        class_="card wide" if chart.is_wide else "card",
        data_name=f"{chart.group}: {chart.title}",
        data_words=words_of(chart),
    )


def _legend(chart: Chart, *, is_single: bool) -> Html:
    """Buttons that hide lines. For several runs, the legend of the page has the colors and this one the dashes."""
    entries: dict[tuple[str, int | None, int], list[int]] = {}
    for position, line in enumerate(chart.lines):
        entry = (line.label, line.color, line.dash) if is_single else (line.variant, None, line.dash)
        entries.setdefault(entry, []).append(position)
    items = [
        element(
            "button",
            swatch(color, dash),
            label,
            type="button",
            aria_pressed="true",
            data_lines=" ".join(map(str, positions)),
        )
        for (label, color, dash), positions in entries.items()
        if len(entries) > 1 and chart.style != "heat"  # whose rows are labeled
    ]
    for label in dict.fromkeys(reference.label for reference in chart.references):
        levels = [reference.value for reference in chart.references if reference.label == label]
        sample = element("i", class_="swatch reference", aria_hidden="true")
        words = f"{label}: {distinct_values(levels)}"
        items.append(element("span", sample, words, data_references=" ".join(map(repr, levels))))
    return element("div", *items, class_="legend") if items else Html("")


def _last_values(chart: Chart) -> str:
    """Last, lowest and highest value of a single line; the last values of several. All with their steps."""
    drawn = [(line.label, line.curve) for line in chart.lines if len(line.curve.mean)]
    if not drawn:
        return "no finite value"
    if len(drawn) == 1:
        curve = drawn[0][1]
        ends = ("min", curve.low, curve.low.argmin()), ("max", curve.high, curve.high.argmax())
        extremes = [f"{word} {number_text(float(values[at]))} {_at(curve, int(at))}" for word, values, at in ends]
        return " · ".join([f"last {number_text(float(curve.mean[-1]))} {_at(curve, -1)}", *extremes])
    ends_at = {_at(curve, -1) for _, curve in drawn}
    shown = [
        f"{label} {number_text(float(curve.mean[-1]))}" + (f" {_at(curve, -1)}" if len(ends_at) > 1 else "")
        for label, curve in (drawn[:_MOST_ENDS] if len(drawn) > _MOST_ENDS + 1 else drawn)
    ]
    more = f" · {len(drawn) - len(shown)} more" if len(drawn) > len(shown) else ""
    return f"last{f' {ends_at.pop()}' if len(ends_at) == 1 else ''}: {' · '.join(shown)}{more}"


def _at(curve: Curve, point: int) -> str:
    """The step of a point, or the steps of its bucket."""
    first, last = int(curve.first[point]), int(curve.last[point])
    return f"at step {first:,}" if first == last else f"in steps {first:,}–{last:,}"


def _small_print(chart: Chart) -> Html:
    """What the chart leaves out: buckets, values that cannot be drawn; and values outside the healthy band."""
    notes = []
    reduced = [line.curve for line in chart.lines if line.curve.is_reduced]
    if reduced:
        most = max(reduced, key=lambda curve: curve.num_values)
        notes.append(
            f"{most.num_values:,} values in {len(most.mean):,} buckets: the line is the mean, the shade the range"
        )
    num_bad = sum(len(line.curve.bad_steps) for line in chart.lines)
    if num_bad:
        notes.append(f"{counted(num_bad, 'value')} not finite, marked by ×")
    if chart.band is not None:
        notes.append(_band_text(chart.band, chart.lines))
    return element("p", *(element("span", note) for note in notes), class_="small") if notes else Html("")


def _band_text(band: tuple[float | None, float | None], lines: Sequence[Line]) -> str:
    low, high = band
    if low is not None and low == high:
        words = f"{low:g}"
    elif low is None:
        words = f"at most {high:g}"
    elif high is None:
        words = f"at least {low:g}"
    else:
        words = f"{low:g} to {high:g}"
    bottom, top = -float("inf") if low is None else low, float("inf") if high is None else high
    outside = sum(int(((line.curve.low < bottom) | (line.curve.high > top)).sum()) for line in lines)
    total = sum(len(line.curve.mean) for line in lines)
    where = f"{outside:,} of {total:,} points outside" if outside else "no point outside"
    return f"healthy: {words} (shaded); {where}"


def events_section(runs: Sequence[RunRecord]) -> Html:
    """The first lines of events.jsonl of each run."""
    rows = []
    for run in runs:
        for event in run.events[:_MOST_EVENTS]:
            rest = {key: value for key, value in event.items() if key not in ("time", "event", "global_step", "step")}
            step = event.get("global_step", event.get("step", ""))
            details = json.dumps(rest, ensure_ascii=False)
            rows.append([str(event.get("event", "?")), *([run.name] if len(runs) > 1 else []), str(step), details])
    if not rows:
        return Html("")
    head = ["Event", *(["Run"] if len(runs) > 1 else []), "Step", "Details"]
    num_all = sum(len(run.events) for run in runs)
    more = f"The first {_MOST_EVENTS} of each run; {num_all:,} in total." if len(rows) < num_all else ""
    return section("Events", table(head, rows, caption="Events"), _optional("p", more))


def config_sections(runs: Sequence[RunRecord]) -> Html:
    """Every setting and the environment of each run, collapsed if there are several."""
    config = _settings("Config", "config.resolved.toml", [(run.name, run.config) for run in runs])
    return join([config, _settings("Environment", "env.json", [(run.name, run.environment) for run in runs])])


def _settings(title: str, file: str, runs: Sequence[tuple[str, Mapping[str, Any]]]) -> Html:
    tables = []
    for name, values in runs:
        if values:
            rows = [[element("code", key), element("code", value_text(v))] for key, v in flatten(values).items()]
            inner = table(("Key", "Value"), rows, caption=f"{title} of {name}")
            summary = element("summary", f"{name}: {counted(len(rows), 'value')}")
            tables.append(element("details", summary, inner, open=len(runs) == 1))
    return section(title, *(tables or [element("p", f"No {file} beside metrics.jsonl.")]))
