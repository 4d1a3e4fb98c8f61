"""Numbers in sentences and tables."""

from __future__ import annotations

import math


def number_text(value: float, digits: int = 4) -> str:
    """A number with at most `digits` significant digits, more before the decimal point: 12,345, 0.0213, 3.2e-05, nan."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if 10 ** (digits - 1) <= abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def counted(number: float, noun: str) -> str:
    """`1 stream`, `2 streams`, `1,234 passes`, `2.5 passes`: the number, and the noun in singular or plural."""
    shown = f"{number:,.2g}" if 0 < number < 10 else f"{number:,.0f}"
    ending = "" if shown == "1" else "es" if noun.endswith("s") else "s"
    return f"{shown} {noun}{ending}"
