"""Small pieces of HTML. Everything that comes from a run is escaped here, and nowhere else."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from trainer.report.outcome import Fact


class Html(str):
    """Text that is HTML already; any other text is escaped by `element`."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: object) -> Html:
    """One element. Attributes: `class_` is `class`, `_` becomes `-`, None and False are left out, True has no value."""
    parts = []
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        key = name.rstrip("_").replace("_", "-")
        parts.append(f" {key}" if value is True else f' {key}="{escape(str(value))}"')
    return Html(f"<{tag}{''.join(parts)}>{join(children)}</{tag}>")


def join(children: Iterable[str]) -> Html:
    """Children one after another, what is not HTML yet escaped."""
    return Html("".join(child if isinstance(child, Html) else escape(child) for child in children))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str, class_: str = "") -> Html:
    """A table whose first column heads its rows; it scrolls by itself where the screen is narrow."""
    top = element("tr", *(element("th", cell, scope="col") for cell in head))
    body = [
        element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])) for row in rows
    ]
    inner = element(
        "table",
        element("caption", caption, class_="unseen"),
        element("thead", top),
        element("tbody", *body),
        class_=class_ or None,
    )
    return element("div", inner, class_="scroll", tabindex="0", role="region", aria_label=caption)


def number_text(value: float, precision: int = 4) -> str:
    """A number for people: thousands with commas, very small and very large ones in scientific notation."""
    if not math.isfinite(value):
        return str(value)
    if precision == 0 and abs(value) < 1e15:
        return f"{value:,.0f}"
    if value and (abs(value) < 1e-3 or abs(value) >= 1e9):
        return f"{value:.3g}"
    return f"{value:,.{precision}f}"


def plain_number(value: float) -> str:
    """A number of any size in about four digits: 1,234, 0.0213, 3.2e-05."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e9:
        return f"{value:,.0f}"
    if abs(value) < 1e-3 or abs(value) >= 1e9:
        return f"{value:.3g}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def fact_text(fact: Fact) -> str:
    """A fact's value; a dash where the run does not have it."""
    if fact.value is None:
        return "–"
    return fact.value if isinstance(fact.value, str) else number_text(fact.value, fact.precision)


def value_text(value: Any) -> str:
    """A config value as TOML or JSON would write it; a dash where there is none."""
    return "–" if value is None else json.dumps(value, ensure_ascii=False, default=str)
