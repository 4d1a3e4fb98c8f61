"""Charts that are said instead of drawn: zero throughout, the same throughout, measured once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trainer.tools.report.charts import Chart
from trainer.tools.report.curves import Curve
from trainer.tools.report.markup import Html, element, join
from trainer.wording import counted, number_text


def is_undrawn(chart: Chart) -> bool:
    """Whether the chart is said in words: all its values are 0, or, unless it is a combined view, no line of it changes."""
    return _is_zero(chart) or (not chart.is_wide and all(line.curve.is_constant for line in chart.lines))


def undrawn_lists(charts: Sequence[Chart]) -> Html:
    """The undrawn charts of a group: those of zeros on one line, a list of the other constants, a list of single values."""
    zero = [chart for chart in charts if _is_zero(chart)]
    rest = [chart for chart in charts if chart not in zero]
    once = [chart for chart in rest if all(line.curve.num_values == 1 for line in chart.lines)]
    same = [chart for chart in rest if chart not in once]
    return join([_zeros(zero), _value_list("The same throughout", same), _value_list("Measured once", once)])


def distinct_values(values: Iterable[float]) -> str:
    """The distinct values in words."""
    return " / ".join(dict.fromkeys(map(number_text, values)))


def short_list(names: Sequence[str]) -> list[str]:
    """The names; of many, the first three and how many more there are."""
    return [*names[:3], f"{len(names) - 3} more"] if len(names) > 4 else list(names)


def words_of(chart: Chart) -> str:
    """The words that the page finds the chart by."""
    return " ".join([chart.title, chart.group, *chart.keys]).lower()


def _is_zero(chart: Chart) -> bool:
    """Whether every value is 0, errors included, and some key has several. A single 0 says nothing about the run."""
    curves = [curve for line in chart.lines for curve in (line.curve, line.spread) if curve is not None]
    is_zero = all(curve.is_constant and float(curve.low[0]) == 0.0 for curve in curves)
    return is_zero and any(line.curve.num_values > 1 for line in chart.lines)


def _zeros(charts: Sequence[Chart]) -> Html:
    """A line for each range of steps, of which there mostly is one."""
    by_range: dict[str, list[Chart]] = {}
    for chart in charts:
        by_range.setdefault(_where([line.curve for line in chart.lines]), []).append(chart)
    return join(_zero_line(where, together) for where, together in by_range.items())


def _zero_line(where: str, charts: Sequence[Chart]) -> Html:
    names = [
        join([" · " if place else "", element("span", chart.title), " (", _keys(chart), ")"])
        for place, chart in enumerate(charts)
    ]
    words = " ".join(map(words_of, charts))
    return element("p", element("b", "Zero throughout"), f" ({where}): ", *names, class_="still", data_words=words)


def _keys(chart: Chart) -> Html:
    return element("code", ", ".join(short_list(chart.keys)))


def _value_list(title: str, charts: Sequence[Chart]) -> Html:
    rows = []
    for chart in charts:
        unit_and_steps = f" {chart.unit} ({_where([line.curve for line in chart.lines])}) "
        parts = element("span", chart.title), ": ", _values(chart), unit_and_steps, _keys(chart)
        rows.append(element("li", *parts, data_words=words_of(chart)))
    return element("div", element("h3", title), element("ul", *rows), class_="still") if rows else Html("")


def _values(chart: Chart) -> Html:
    """Each value with the names of its lines; of one key with one value, the value alone."""
    names: dict[str, list[str]] = {}
    for line in chart.lines:
        names.setdefault(number_text(float(line.curve.mean[0])), []).append(line.label)
    if len(names) == len(chart.keys) == 1:
        return element("b", *names)
    named = [
        join([" · " if place else "", element("span", ", ".join(labels)), " ", element("b", value)])
        for place, (value, labels) in enumerate(names.items())
    ]
    return join(named)


def _where(curves: Sequence[Curve]) -> str:
    first, last = min(int(curve.first[0]) for curve in curves), max(int(curve.last[-1]) for curve in curves)
    if first == last:
        return f"step {first:,}"
    numbers = sorted({curve.num_values for curve in curves})
    least = f"{numbers[0]:,} to " if len(numbers) > 1 else ""
    return f"{least}{counted(numbers[-1], 'value')}, steps {first:,} to {last:,}"
