"""Logged rows as columns: compact enough for 100,000 rows of 60 keys, in the standard library alone."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import chain


class _Block:
    """The rows that have the same keys in the same order: row numbers, and all values row after row."""

    __slots__ = ("rows", "values")

    def __init__(self) -> None:
        self.rows = array("q")
        self.values = array("d")


class RowTable:
    """The rows of one mode (`train` or `eval`) in the order of the file.

    Rows are added first; what `steps` and `column` give is settled when the first of them is asked for. Of a step that
    stands twice the later row counts. Only evaluations of one step, without a restart in between, complete each other:
    a loop may log several.
    """

    def __init__(self, *, rows_complete_each_other: bool) -> None:
        self._complete = rows_complete_each_other
        self._row_steps = array("q")
        self._row_attempts = array("q")
        self._blocks: dict[tuple[str, ...], _Block] = {}
        self._alive: bytearray | None = None
        self._in_order = True
        self._orders: dict[tuple[tuple[str, ...], ...], tuple[array[int], array[int] | None]] = {}

    def add(self, step: int, attempt: int, keys: tuple[str, ...], values: Iterable[float]) -> None:
        """Take one row; `attempt` is the number of restarts before it."""
        block = self._blocks.get(keys)
        if block is None:
            block = self._blocks[keys] = _Block()
        block.rows.append(len(self._row_steps))
        block.values.extend(values)
        if self._row_steps and step <= self._row_steps[-1]:
            self._in_order = False
        self._row_steps.append(step)
        self._row_attempts.append(attempt)
        self._alive = None
        self._orders.clear()

    def __len__(self) -> int:
        """Rows as they came, those that later ones replaced included."""
        return len(self._row_steps)

    @property
    def keys(self) -> list[str]:
        """Every key that some row has, in the order of first appearance."""
        return list(dict.fromkeys(chain.from_iterable(self._blocks)))

    def _settle(self) -> bytearray:
        """For each row, whether it counts."""
        if self._alive is None:
            count = len(self._row_steps)
            self._alive = bytearray(b"\x01") * count
            if not self._in_order:
                last = {step: row for row, step in enumerate(self._row_steps)}
                for row, step in enumerate(self._row_steps):
                    winner = last[step]
                    is_same_attempt = self._row_attempts[winner] == self._row_attempts[row]
                    self._alive[row] = winner == row or (self._complete and is_same_attempt)
        return self._alive

    @property
    def num_replaced(self) -> int:
        """Rows that a later row of the same step replaced."""
        return len(self) - sum(self._settle())

    @property
    def steps(self) -> array[int]:
        """Steps that have a row that counts, ascending, each once."""
        if self._in_order:
            return self._row_steps[:]
        alive = self._settle()
        return array("q", sorted({step for row, step in enumerate(self._row_steps) if alive[row]}))

    def column(self, key: str) -> tuple[array[int], array[float]]:
        """(steps, values) of one key, steps ascending and each once; empty if no row has it. Values may be NaN.

        Columns of the same rows share their steps: treat both arrays as read-only.
        """
        parts = [(keys, block) for keys, block in self._blocks.items() if key in keys]
        steps, order = self._order(tuple(keys for keys, _ in parts))
        values = array("d")
        for keys, block in parts:
            values += block.values[keys.index(key) :: len(keys)]
        return steps, values if order is None else array("d", map(values.__getitem__, order))

    def _order(self, blocks: tuple[tuple[str, ...], ...]) -> tuple[array[int], array[int] | None]:
        """The steps of the rows of some blocks, and where each one's value stands when the blocks' values are joined.

        None: they stand in that order already.
        """
        if blocks not in self._orders:
            rows = array("q", chain.from_iterable(self._blocks[keys].rows for keys in blocks))
            places: Iterable[int] = range(len(rows))
            if len(blocks) > 1:
                places = sorted(places, key=rows.__getitem__)
            steps = self._row_steps
            if not self._in_order:
                alive = self._settle()
                last = {steps[rows[place]]: place for place in places if alive[rows[place]]}
                places = map(last.__getitem__, sorted(last))
            order = array("q", places)
            is_same = len(blocks) == 1 and self._in_order
            self._orders[blocks] = array("q", (steps[rows[place]] for place in order)), None if is_same else order
        return self._orders[blocks]
