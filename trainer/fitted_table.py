"""Tables for terminals of any width: a name or a number is never cut; the least important columns are left out instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

# Of rich's default box: a border and two blanks a column, and one border more.
_PER_COLUMN: Final = 3
_LEAST_FIRST: Final = 8


@dataclass(frozen=True)
class Column:
    """One column.

    Args:
        heading: may have several lines.
        cells: rich's markup, one a row.
        justify: of heading and cells.
        leave_out: which goes first where room is short: the higher, the sooner; 0 stays.
        wraps: cells may be broken between words. Others stay on one line.
    """

    heading: str
    cells: Sequence[str]
    justify: Literal["left", "right"] = "left"
    leave_out: int = 0
    wraps: bool = False

    @property
    def name(self) -> str:
        """The heading on one line."""
        return " ".join(self.heading.split())

    def least(self) -> int:
        """Characters that it needs: its longest line, or, where it wraps, its longest word."""
        return max(
            cell_len(piece) for line in self._lines() for piece in (line.split() if self.wraps else [line]) or [""]
        )

    def most(self) -> int:
        """Characters that it can use: its longest line."""
        return max(map(cell_len, self._lines()))

    def _lines(self) -> Iterator[str]:
        for text in (self.heading, *self.cells):
            yield from Text.from_markup(text).plain.split("\n")


def needed_width(columns: Sequence[Column]) -> int:
    """Characters of a table of all columns in which nothing is cut."""
    return sum(column.least() + _PER_COLUMN for column in columns) + 1


def fitted_table(columns: Sequence[Column], *, width: int, hint: str = "", **options: Any) -> Table:
    """A table that fits into `width` characters.

    Columns are left out, the highest `leave_out` first, until the others fit, and the caption names them. Only where all
    that stay are still too wide is the first one folded.

    Args:
        hint: what to add to that caption, such as where the rest is to be seen.
        options: of `rich.table.Table`.
    """
    kept = list(columns)
    while needed_width(kept) > width and any(column.leave_out for column in kept):
        kept.remove(max(kept, key=lambda column: column.leave_out))
    if len(kept) < len(columns):
        names = ", ".join(column.name for column in columns if column not in kept)
        options |= {"caption": f"left out, since the screen is narrow: {names}{hint}", "caption_justify": "left"}
    spare = width - needed_width(kept)
    table = Table(**options)
    for position, column in enumerate(kept):
        more = min(max(spare, 0), column.most() - column.least())
        spare -= more
        room = column.least() + more
        if position == 0 and spare < 0:
            room = max(room + spare, _LEAST_FIRST)
        table.add_column(
            column.heading,
            justify=column.justify,
            width=room,
            no_wrap=position > 0 and not column.wraps,
            overflow="fold",
        )
    for row in zip(*(column.cells for column in kept), strict=True):
        table.add_row(*row)
    return table
