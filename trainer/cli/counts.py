"""Numbers of things, in words."""

from __future__ import annotations


def counted(number: float, noun: str) -> str:
    """`1 stream`, `2 streams`, `1,234 streams`, `2.5 passes`: the number, and the noun in its form for it."""
    shown = f"{number:,.2g}" if 0 < number < 10 else f"{number:,.0f}"
    ending = "es" if noun.endswith("s") else "s"
    return f"{shown} {noun}" if shown == "1" else f"{shown} {noun}{ending}"
