"""Logged rows as columns. Without numpy, which reading a run must not take."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import chain, groupby

Column = tuple["array[int]", "array[float]"]
_Row = tuple[int, int, tuple[str, ...], "array[float]"]  # step, number of restarts before it, keys, values


class RowTable:
    """The rows of one mode (`train` or `eval`).

    If a step was logged more than once, the latest row replaces the others. With `merge_same_step`,
    rows of one step without a restart between them are merged instead: a loop may log several
    evaluations of a step.
    """

    def __init__(self, *, merge_same_step: bool) -> None:
        self._merge = merge_same_step
        self._shapes: dict[tuple[str, ...], tuple[str, ...]] = {}  # each once
        self._rows: list[_Row] = []
        self._forget()

    def _forget(self) -> None:
        self._kept: list[_Row] | None = None
        self._blocks: list[tuple[dict[str, int], array[int], array[float]]] = []
        self._columns: dict[str, Column] = {}

    def add(self, step: int, attempt: int, keys: tuple[str, ...], values: Iterable[float]) -> None:
        """Add one row; `attempt` is the number of restarts before it."""
        self._rows.append((step, attempt, self._shapes.setdefault(keys, keys), array("d", values)))
        self._forget()

    def __len__(self) -> int:
        """Number of rows added, replaced ones included."""
        return len(self._rows)

    @property
    def keys(self) -> list[str]:
        """The keys of all rows, in order of first appearance."""
        return list(dict.fromkeys(chain.from_iterable(self._shapes)))

    @property
    def kept(self) -> list[_Row]:
        """The rows that no later row replaced, by step."""
        if self._kept is None:
            last, kept = {row[0]: row for row in self._rows}, []
            for row in self._rows:
                later = last[row[0]]
                if later is row or (self._merge and later[1] == row[1]):
                    kept.append(row)
            self._kept = sorted(kept, key=lambda row: row[0])
        return self._kept

    @property
    def num_replaced(self) -> int:
        """Number of rows that a later row of the same step replaced."""
        return len(self) - len(self.kept)

    @property
    def steps(self) -> array[int]:
        """The logged steps, ascending and unique."""
        return array("q", dict.fromkeys(row[0] for row in self.kept))

    def column(self, key: str) -> Column:
        """(steps, values) of one key, steps ascending and unique. Values may be NaN.

        Both arrays are shared with later calls: treat them as read-only.
        """
        if not self._blocks:  # rows with the same keys one after the other, their values in one array
            for keys, group in groupby(self.kept, key=lambda row: row[2]):
                rows = list(group)
                values = array("d", chain.from_iterable(row[3] for row in rows))
                places = {name: place for place, name in enumerate(keys)}
                self._blocks.append((places, array("q", (row[0] for row in rows)), values))
        if key not in self._columns:
            steps, values = array("q"), array("d")
            for places, at, values_of_rows in self._blocks:
                if key in places:
                    steps += at
                    values += values_of_rows[places[key] :: len(places)]
            if self._merge:  # of merged rows the last counts
                found = dict(zip(steps, values, strict=True))
                steps, values = array("q", found), array("d", found.values())
            self._columns[key] = steps, values
        return self._columns[key]
