"""The parts of the page, each from plain data to HTML."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from trainer.report.charts import Chart, Line
from trainer.report.markup import Html, element, fact_text, join, plain_number, table, value_text
from trainer.report.outcome import Fact, config_differences, flatten, make_outcome
from trainer.report.verdict import Remark, Verdict
from trainer.runs.load import Run

_MOST_STEP_BUTTONS: Final = 6
_MOST_EVENTS: Final = 200
_MOST_ENDS: Final = 4


def slug(text: str) -> str:
    """A heading as an id."""
    return "".join(letter if letter.isalnum() else "-" for letter in text.lower())


def swatch(color: int, dash: int = 0) -> Html:
    """The sample of a line's colour (-1: none of its own) and dash."""
    return element("i", class_=f"swatch c{color % 8 if color >= 0 else 'x'} d{dash % 4}", aria_hidden="true")


def section(title: str, *children: str, id: str | None = None, class_: str | None = None) -> Html:
    """A part of the page with its heading."""
    name = id or slug(title)
    head = element("h2", title, id=f"{name}-head")
    return element("section", head, *children, id=name, aria_labelledby=f"{name}-head", class_=class_)


def verdict_section(runs: Sequence[Run], verdicts: Sequence[Verdict | None]) -> Html:
    """The verdict of each run."""
    cards = []
    for number, (run, verdict) in enumerate(zip(runs, verdicts, strict=True)):
        heading = [swatch(number), run.name] if len(runs) > 1 else []
        cards.append(_verdict_card(heading, verdict))
    return section("Verdict" if len(runs) == 1 else "Verdicts", *cards, id="verdict")


def _verdict_card(heading: Sequence[str], verdict: Verdict | None) -> Html:
    if verdict is None:
        return element("div", *heading, element("p", "Not diagnosed."), class_="verdict unknown")
    if not verdict.checks:
        return element("div", *heading, element("p", "Not diagnosed: there are no training rows."), class_="verdict")
    state = "bad" if verdict.findings else "good"
    line = element("p", _mark(state), verdict.sentence)
    title = element("h3", *heading) if heading else ""
    remarks = element("ol", *(_remark(remark) for remark in verdict.remarks)) if verdict.remarks else ""
    return element("div", title, line, remarks, _checks(verdict), class_=f"verdict {state}")


def _mark(state: str) -> Html:
    return element("span", "✓" if state == "good" else "!", class_="mark", aria_hidden="true")


def _remark(remark: Remark) -> Html:
    badge = element("span", remark.severity, class_=f"badge {remark.severity}")
    parts: list[str] = [element("h4", remark.title, " ", badge), element("p", remark.text)]
    if remark.setting:
        parts.append(element("p", "Try ", element("code", remark.setting)))
    if remark.steps:
        parts.append(_step_buttons(remark.steps))
    return element("li", *parts)


def _step_buttons(steps: Sequence[int]) -> Html:
    """Buttons that show the steps of the evidence in all charts."""
    shown = steps[:_MOST_STEP_BUTTONS]
    buttons = [
        element("button", f"step {step:,}", type="button", class_="step", data_step=step, title="Show in the charts")
        for step in shown
    ]
    more = f" and {len(steps) - len(shown):,} more" if len(steps) > len(shown) else ""
    return element("p", "Seen at ", *buttons, more, class_="evidence")


def _checks(verdict: Verdict) -> Html:
    if not verdict.checks:
        return Html("")
    rows = [
        (element("code", check.rule), check.result, check.text, element("small", check.threshold))
        for check in verdict.checks
    ]
    summary = element("summary", f"All {len(rows)} rules that were checked")
    head = ("Rule", "Result", "What was seen", "Fires when")
    return element("details", summary, table(head, rows, caption="Rules checked"))


def notes_section(runs: Sequence[Run]) -> Html:
    """What a reader should know about the files; nothing if there is nothing."""
    items = []
    for run in runs:
        front = f"{run.name}: " if len(runs) > 1 else ""
        items += [element("li", f"{front}{note}") for note in run.notes]
    return section("About the record", element("ul", *items, class_="notes")) if items else Html("")


def outcome_tiles(run: Run) -> Html:
    """The outcome of one run as tiles; what it does not have is left out."""
    tiles = [_tile(fact) for fact in make_outcome(run) if fact.value is not None]
    return section("Outcome", element("dl", *tiles, class_="tiles"))


def _tile(fact: Fact) -> Html:
    unit = element("span", fact.unit, class_="unit") if fact.unit else ""
    note = element("dd", fact.note, class_="note") if fact.note else ""
    return element("div", element("dt", fact.label), element("dd", fact_text(fact), " ", unit, class_="value"), note)


def outcome_table(runs: Sequence[Run], verdicts: Sequence[Verdict | None]) -> Html:
    """The outcomes of several runs side by side, and the settings in which they differ."""
    outcomes = [make_outcome(run) for run in runs]
    words = [
        element("span", _mark("bad" if verdict.findings else "good"), " ", verdict.sentence)
        if verdict and verdict.checks
        else "not diagnosed"
        for verdict in verdicts
    ]
    head = ["", *(join([swatch(number), run.name]) for number, run in enumerate(runs))]
    rows: list[list[str]] = [["Verdict", *words]]
    for facts in zip(*outcomes, strict=True):
        unit = f" ({facts[0].unit})" if facts[0].unit else ""
        cells = [join([fact_text(fact), element("small", fact.note) if fact.note else ""]) for fact in facts]
        rows.append([f"{facts[0].label}{unit}", *cells])
    different = [
        [element("code", key), *(element("code", value_text(value)) for value in values)]
        for key, values in config_differences(runs)
    ]
    settings: Html = element("p", "No setting and no recorded version differs.")
    if different:
        settings = table(["Setting", *head[1:]], different, caption="Settings that differ", class_="wide-cells")
    return join(
        [
            section("Outcome", table(head, rows, caption="Outcome of each run", class_="numbers")),
            section("What differs", settings),
        ]
    )


def chart_groups(charts: Sequence[Chart], order: Sequence[str], *, is_single: bool) -> Html:
    """All charts under the headings of the catalog, those that never change in one list at the end of their group."""
    numbered = sorted(enumerate(charts), key=lambda pair: order.index(pair[1].group))
    parts = []
    for group, members in groupby(numbered, key=lambda pair: pair[1].group):
        views: list[Html] = []
        drawn: list[Html] = []
        still: list[Chart] = []
        for number, chart in members:
            if chart.is_wide:
                views.append(_card(number, chart, is_single=is_single))
            elif all(line.curve.is_constant for line in chart.lines):
                still.append(chart)
            else:
                drawn.append(_card(number, chart, is_single=is_single))
        wide = element("div", *views, class_="grid views") if views else ""
        small = element("div", *drawn, class_="grid") if drawn else ""
        parts.append(section(group, wide, small, _still_list(still), class_="charts"))
    return join(parts)


def _still_list(charts: Sequence[Chart]) -> Html:
    if not charts:
        return Html("")
    rows = []
    for chart in charts:
        values = dict.fromkeys(plain_number(float(line.curve.mean[0])) for line in chart.lines)
        rows.append(
            element(
                "li", element("span", chart.title), " ", element("code", chart.keys[0]), " ",
                element("b", " / ".join(values) or "0"), " ", chart.unit,
            )
        )  # fmt: skip
    return element("div", element("h3", "The same throughout"), element("ul", *rows), class_="still")


def _card(number: int, chart: Chart, *, is_single: bool) -> Html:
    unit = element("span", chart.unit, class_="unit") if chart.unit else ""
    head = element("h3", chart.title, " ", unit, id=f"chart-{number}")
    keys = element("p", element("code", ", ".join(_short_list(chart.keys))), class_="keys")
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
    readout = element("p", _summary(chart), class_="readout", aria_live="polite")
    facts = [element("div", element("dt", name), element("dd", text)) for name, text in chart.facts]
    about = element("details", element("summary", "About"), element("dl", *facts)) if facts else ""
    words = " ".join([chart.title, chart.group, *chart.keys]).lower()
    return element(
        "article",
        element("header", head, keys),
        _legend(chart, is_single=is_single),
        plot,
        readout,
        _small_print(chart),
        about,
        class_="card wide" if chart.is_wide else "card",
        data_words=words,
    )


def _short_list(keys: Sequence[str]) -> list[str]:
    return [*keys[:3], f"{len(keys) - 3} more"] if len(keys) > 4 else list(keys)


def _legend(chart: Chart, *, is_single: bool) -> Html:
    """Buttons that show and hide lines. With several runs the page's own legend tells the colours, and this one the dashes."""
    entries: dict[tuple[str, int, int], list[int]] = {}
    for place, line in enumerate(chart.lines):
        entry = (line.label, line.color, line.dash) if is_single else (line.variant, -1, line.dash)
        entries.setdefault(entry, []).append(place)
    items = [
        element(
            "button",
            swatch(color, dash),
            label,
            type="button",
            aria_pressed="true",
            data_lines=" ".join(map(str, places)),
        )
        for (label, color, dash), places in entries.items()
        if len(entries) > 1
    ]
    for label in dict.fromkeys(reference.label for reference in chart.references):
        values = dict.fromkeys(plain_number(ref.value) for ref in chart.references if ref.label == label)
        sample = element("i", class_="swatch reference", aria_hidden="true")
        items.append(element("span", sample, f"{label}: {' / '.join(values)}"))
    return element("div", *items, class_="legend") if items else Html("")


def _summary(chart: Chart) -> str:
    """Last, least and largest value of one line; the last values of several."""
    ends = [(line.label, line.curve) for line in chart.lines if len(line.curve.mean)]
    if not ends:
        return "no finite value"
    if len(ends) == 1:
        curve = ends[0][1]
        last, low, high = (plain_number(float(v)) for v in (curve.mean[-1], curve.low.min(), curve.high.max()))
        return f"last {last} · least {low} · most {high}"
    shown = [f"{label} {plain_number(float(curve.mean[-1]))}" for label, curve in ends[:_MOST_ENDS]]
    more = f" · {len(ends) - len(shown)} more" if len(ends) > len(shown) else ""
    return f"last: {' · '.join(shown)}{more}"


def _small_print(chart: Chart) -> Html:
    """How the chart is less than the record: buckets, values that cannot be drawn, values outside the healthy band."""
    notes = []
    reduced = [line for line in chart.lines if line.curve.is_reduced]
    if reduced:
        most = max(reduced, key=lambda line: line.curve.num_values)
        notes.append(
            f"{most.curve.num_values:,} values in {len(most.curve.mean):,} buckets: "
            "the line is the mean, the shade reaches from least to most"
        )
    num_bad = sum(len(line.curve.bad_steps) for line in chart.lines)
    if num_bad:
        notes.append(f"{num_bad:,} value{'s' if num_bad > 1 else ''} not finite, marked by ×")
    if chart.band is not None:
        notes.append(_band_text(chart.band, chart.lines))
    return element("p", *(element("span", note) for note in notes), class_="small") if notes else Html("")


def _band_text(band: tuple[float | None, float | None], lines: Sequence[Line]) -> str:
    low, high = band
    if low is not None and low == high:
        words = f"healthy: {low:g}"
    elif low is None:
        words = f"healthy: at most {high:g}"
    elif high is None:
        words = f"healthy: at least {low:g}"
    else:
        words = f"healthy: {low:g} to {high:g}"
    total = outside = 0
    for line in lines:
        total += len(line.curve.mean)
        below = line.curve.low < low if low is not None else line.curve.low != line.curve.low
        above = line.curve.high > high if high is not None else below & False
        outside += int((below | above).sum())
    return f"{words} (shaded); {'never outside' if not outside else f'outside in {outside:,} of {total:,} points'}"


def events_section(runs: Sequence[Run]) -> Html:
    """events.jsonl of each run, the first ones."""
    rows, num_all = [], 0
    for run in runs:
        num_all += len(run.events)
        for event in run.events[:_MOST_EVENTS]:
            rest = {key: value for key, value in event.items() if key not in ("time", "event", "global_step", "step")}
            step = event.get("global_step", event.get("step", ""))
            name = [run.name] if len(runs) > 1 else []
            rows.append([str(event.get("event", "?")), *name, str(step), json.dumps(rest, ensure_ascii=False)])
    if not rows:
        return Html("")
    head = ["Event", *(["Run"] if len(runs) > 1 else []), "Step", "Details"]
    more = element("p", f"The first {_MOST_EVENTS} of each run; {num_all:,} in all.") if len(rows) < num_all else ""
    return section("Events", table(head, rows, caption="Events"), more)


def config_sections(runs: Sequence[Run]) -> Html:
    """Every setting and the environment of each run, folded."""
    parts = []
    for title, file in (("Config", "config.resolved.toml"), ("Environment", "env.json")):
        tables = []
        for run in runs:
            values = run.config if title == "Config" else run.environment
            if values:
                tables.append(_settings(run.name, values, title, is_open=len(runs) == 1))
        parts.append(section(title, *(tables or [element("p", f"No {file} beside the record.")])))
    return join(parts)


def _settings(name: str, values: Mapping[str, Any], title: str, *, is_open: bool) -> Html:
    rows = [[element("code", key), element("code", value_text(value))] for key, value in flatten(values).items()]
    summary = element("summary", f"{name}: {len(rows)} values")
    return element("details", summary, table(("Key", "Value"), rows, caption=f"{title} of {name}"), open=is_open)
