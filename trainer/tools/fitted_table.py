"""Tables for terminals of any width: no cell is cut; the least important columns are dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

_PER_COLUMN: Final = 3  # of rich's default box: a border and two spaces; one more at the end
_LEAST_FIRST: Final = 8  # width below which the first column is not folded


@dataclass(frozen=True)
class Column:
    """One column: a heading, maybe of several lines, and cells of rich markup."""

    heading: str
    cells: Sequence[str]
    justify: Literal["left", "right"] = "left"
    leave_out: int = 0  # of a table that is too wide, the highest are dropped first; 0: never
    wraps: bool = False  # cells may break between words

    @property
    def name(self) -> str:
        """The heading on one line; of a dotted key in lines, the key."""
        return " ".join(self.heading.split()).replace(". ", ".")

    def least(self) -> int:
        """Minimum width: the longest line, or the longest word if it wraps."""
        text = "\n".join(Text.from_markup(each).plain for each in (self.heading, *self.cells))
        parts = text.split("\n")
        if self.wraps:
            parts = text.split()
        return max(map(cell_len, parts), default=0)


def needed_width(columns: Sequence[Column]) -> int:
    """Width of a table of all columns without truncation."""
    return sum(column.least() + _PER_COLUMN for column in columns) + 1


def fitted_table(columns: Sequence[Column], *, width: int, hint: str = "; --json has all", **options: Any) -> Table:
    """A table that fits into `width` characters.

    Columns are dropped, highest `leave_out` first, until the others fit, and the caption names
    them, and with `hint` where to find the rest. If it is still too wide, the first column and
    those that wrap are folded. `options` are passed to `rich.table.Table`.
    """
    kept = list(columns)
    while needed_width(kept) > width and any(column.leave_out for column in kept):
        kept.remove(max(kept, key=lambda column: column.leave_out))
    options.setdefault("title_justify", "left")
    if len(kept) < len(columns):
        names = ", ".join(column.name for column in columns if column not in kept)
        options["caption"] = f"omitted to fit the terminal: {names}{hint}"
        options["caption_justify"] = "left"
    is_too_wide = needed_width(kept) > width
    table = Table(**options)
    for position, column in enumerate(kept):
        folds = is_too_wide and (position == 0 or column.wraps)
        table.add_column(
            column.heading,
            justify=column.justify,
            min_width=_LEAST_FIRST if folds else column.least(),
            no_wrap=not (column.wraps or folds),
            overflow="fold",
        )
    for row in zip(*(column.cells for column in kept), strict=True):
        table.add_row(*row)
    return table


def duration_text(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h`, `4 d`."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
