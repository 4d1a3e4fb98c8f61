"""Logged rows as columns. Compact enough for 100,000 rows of 60 keys without numpy, which readers need not install."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import chain


class _Block:
    """The rows that have the same keys in the same order: their row numbers, and their values row by row."""

    __slots__ = ("rows", "values")

    def __init__(self) -> None:
        self.rows = array("q")
        self.values = array("d")


class RowTable:
    """The rows of one mode (`train` or `eval`) in file order.

    If a step was logged more than once, the latest row replaces the others. With `merge_same_step`, rows of one step
    without a restart between them are merged instead: a loop may log several evaluations of a step.
    """

    def __init__(self, *, merge_same_step: bool) -> None:
        self._merge = merge_same_step
        self._row_steps = array("q")
        self._row_attempts = array("q")
        self._blocks: dict[tuple[str, ...], _Block] = {}
        self._in_order = True
        # Derived on first use, dropped by `add`.
        self._kept: bytearray | None = None
        self._orders: dict[tuple[tuple[str, ...], ...], tuple[array[int], array[int] | None]] = {}
        self._columns: dict[str, tuple[array[int], array[float]]] = {}

    def add(self, step: int, attempt: int, keys: tuple[str, ...], values: Iterable[float]) -> None:
        """Add one row; `attempt` is the number of restarts before it."""
        block = self._blocks.get(keys)
        if block is None:
            block = self._blocks[keys] = _Block()
        block.rows.append(len(self._row_steps))
        block.values.extend(values)
        if self._row_steps and step <= self._row_steps[-1]:
            self._in_order = False
        self._row_steps.append(step)
        self._row_attempts.append(attempt)
        self._kept = None
        self._orders.clear()
        self._columns.clear()

    def __len__(self) -> int:
        """Number of rows added, replaced ones included."""
        return len(self._row_steps)

    @property
    def keys(self) -> list[str]:
        """The keys of all rows, in order of first appearance."""
        return list(dict.fromkeys(chain.from_iterable(self._blocks)))

    def _kept_rows(self) -> bytearray:
        """For each row, 1 unless a later row replaced it."""
        if self._kept is None:
            self._kept = bytearray(b"\x01") * len(self)
            last = {} if self._in_order else {step: row for row, step in enumerate(self._row_steps)}
            attempts = self._row_attempts
            for row, step in enumerate(self._row_steps) if last else ():
                self._kept[row] = last[step] == row or (self._merge and attempts[last[step]] == attempts[row])
        return self._kept

    @property
    def num_replaced(self) -> int:
        """Number of rows that a later row of the same step replaced."""
        return len(self) - sum(self._kept_rows())

    @property
    def steps(self) -> array[int]:
        """The logged steps, ascending and unique."""
        return self._row_steps[:] if self._in_order else array("q", sorted(set(self._row_steps)))

    @property
    def attempts(self) -> dict[int, int]:
        """For each logged step, ascending, the number of restarts before the row that counts."""
        return dict(sorted(zip(self._row_steps, self._row_attempts, strict=True)))

    def column(self, key: str) -> tuple[array[int], array[float]]:
        """(steps, values) of one key, steps ascending and unique; empty if no row has it. Values may be NaN.

        Both arrays are shared with other columns and later calls: treat them as read-only.
        """
        if key not in self._columns:
            parts = [(keys, block) for keys, block in self._blocks.items() if key in keys]
            steps, order = self._order(tuple(keys for keys, _ in parts))
            values = array("d")
            for keys, block in parts:
                values += block.values[keys.index(key) :: len(keys)]
            self._columns[key] = steps, values if order is None else array("d", map(values.__getitem__, order))
        return self._columns[key]

    def _order(self, blocks: tuple[tuple[str, ...], ...]) -> tuple[array[int], array[int] | None]:
        """Steps of the rows of some blocks, and for each step the position of its value in the blocks' joined values.

        Cached, since most keys of a run are in the same blocks. None instead of positions: the values are in order already.
        """
        if blocks not in self._orders:
            rows = array("q", chain.from_iterable(self._blocks[keys].rows for keys in blocks))
            positions: Iterable[int] = range(len(rows))
            if len(blocks) > 1:
                positions = sorted(positions, key=rows.__getitem__)
            steps = self._row_steps
            if not self._in_order:
                kept = self._kept_rows()
                last = {steps[rows[position]]: position for position in positions if kept[rows[position]]}
                positions = map(last.__getitem__, sorted(last))
            order = array("q", positions)
            is_ordered = len(blocks) == 1 and self._in_order
            self._orders[blocks] = array("q", (steps[rows[i]] for i in order)), None if is_ordered else order
        return self._orders[blocks]
