"""Logged rows as columns, and exported as one table.

Compact enough for 100,000 rows of 60 keys without numpy, which readers need not install.
"""

from __future__ import annotations

import csv
import io
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from trainer.errors import UserError
from trainer.files import replacing
from trainer.metrics.payload_contract import Mode


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


@dataclass(frozen=True)
class Row:
    """The values of one step; if a restart made the run log the step twice, those of the later row."""

    mode: Mode
    step: int
    values: dict[str, float]


def rows_of(train: RowTable, evals: RowTable) -> list[Row]:
    """All rows of a run, ordered by step, training before evaluation."""
    rows: list[Row] = []
    modes: tuple[Mode, Mode] = ("train", "eval")
    for mode, table in zip(modes, (train, evals), strict=True):
        by_step: dict[int, dict[str, float]] = {step: {} for step in table.steps}
        for key in table.keys:
            for step, value in zip(*table.column(key), strict=True):
                by_step[step][key] = value
        rows += [Row(mode, step, values) for step, values in by_step.items()]
    return sorted(rows, key=lambda row: (row.step, row.mode == "eval"))


def write_csv(train: RowTable, evals: RowTable, path: Path) -> int:
    """Write `mode,global_step,<key>,...`, empty cells for absent keys; returns the number of rows.

    Numbers are written with `repr`, so that reading them back gives the same float64; NaN and infinities as nan, inf, -inf.

    Raises:
        OSError: the file cannot be written.
    """
    rows, keys = rows_of(train, evals), dict.fromkeys([*train.keys, *evals.keys])
    with replacing(path, follow=True) as raw:
        file = io.TextIOWrapper(raw, encoding="utf-8", newline="")
        writer = csv.writer(file)
        writer.writerow(["mode", "global_step", *keys])
        for row in rows:
            cells = (repr(row.values[key]).removesuffix(".0") if key in row.values else "" for key in keys)
            writer.writerow([row.mode, row.step, *cells])
        file.detach()  # flushes
    return len(rows)


def write_parquet(train: RowTable, evals: RowTable, path: Path) -> int:
    """Write columns `mode`, `global_step` and one float64 column per key, null where absent; returns the number of rows.

    Raises:
        UserError: pyarrow is not installed.
        OSError: the file cannot be written.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        fix = "run: pip install pyarrow, or use --format csv"
        raise UserError("--format parquet", "needs the package pyarrow, which is not installed", fix) from None
    rows, keys = rows_of(train, evals), dict.fromkeys([*train.keys, *evals.keys])
    columns = {
        "mode": pyarrow.array([row.mode for row in rows], pyarrow.string()),
        "global_step": pyarrow.array([row.step for row in rows], pyarrow.int64()),
    }
    for key in keys:
        # from_pandas=False keeps NaN apart from null.
        columns[key] = pyarrow.array([row.values.get(key) for row in rows], pyarrow.float64(), from_pandas=False)
    with replacing(path, follow=True) as file:
        parquet.write_table(pyarrow.table(columns), file)
    return len(rows)
