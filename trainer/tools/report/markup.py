"""HTML elements. Everything that comes from a run is escaped here, and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any


class Html(str):
    """Text that is HTML already; `element` escapes any other text."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: object) -> Html:
    """One element. Attributes: `class_` means `class`, `_` becomes `-`, None and False are left out, True has no value."""
    parts = []
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        key = name.rstrip("_").replace("_", "-")
        parts.append(f" {key}" if value is True else f' {key}="{escape(str(value))}"')
    return Html(f"<{tag}{''.join(parts)}>{join(children)}</{tag}>")


def join(children: Iterable[str]) -> Html:
    """The children concatenated, escaped unless they are HTML."""
    return Html("".join(child if isinstance(child, Html) else escape(child) for child in children))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str, class_: str | None = None) -> Html:
    """A table with row headers in its first column, which scrolls horizontally on narrow screens."""
    top = element("tr", *(element("th", cell, scope="col") for cell in head))
    body = [
        element("tr", element("th", first, scope="row"), *(element("td", cell) for cell in cells))
        for first, *cells in rows
    ]
    unseen = element("caption", caption, class_="unseen")
    inner = element("table", unseen, element("thead", top), element("tbody", *body), class_=class_)
    return element("div", inner, class_="scroll", tabindex="0", role="region", aria_label=caption)


def value_text(value: Any) -> str:
    """A config value as JSON; a dash for None. One that a resume changed: `0.01; 0.001 from step 31 on`."""
    if isinstance(value, Mapping) and value:
        first, *later = value.items()
        return "; ".join([value_text(first[1]), *(f"{value_text(each)} from step {step:,} on" for step, each in later)])
    return "–" if value is None else json.dumps(value, ensure_ascii=False, default=str)
