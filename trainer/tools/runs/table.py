"""Logged rows as columns, and exported as one table. Without numpy, which reading a run must not take."""

from __future__ import annotations

import csv
import io
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import UserError
from trainer.files import replacing
from trainer.metrics.payload_contract import Mode

Column = tuple["array[int]", "array[float]"]


class RowTable:
    """The rows of one mode (`train` or `eval`).

    If a step was logged more than once, the latest row replaces the others. With `merge_same_step`, rows of one step
    without a restart between them are merged instead: a loop may log several evaluations of a step.
    """

    def __init__(self, *, merge_same_step: bool) -> None:
        self._merge = merge_same_step
        self._places: dict[tuple[str, ...], dict[str, int]] = {}  # of each key in the rows that have the same keys
        self._rows: list[tuple[int, int, dict[str, int], array[float]]] = []
        self._columns: dict[str, Column] = {}
        self._shown: list[tuple[int, int, dict[str, int], array[float]]] | None = None

    def add(self, step: int, attempt: int, keys: tuple[str, ...], values: Iterable[float]) -> None:
        """Add one row; `attempt` is the number of restarts before it."""
        places = self._places.setdefault(keys, {})
        if not places:
            places.update((key, place) for place, key in enumerate(keys))
        self._rows.append((step, attempt, places, array("d", values)))
        self._shown = None
        self._columns.clear()

    def __len__(self) -> int:
        """Number of rows added, replaced ones included."""
        return len(self._rows)

    @property
    def keys(self) -> list[str]:
        """The keys of all rows, in order of first appearance."""
        return list(dict.fromkeys(key for keys in self._places for key in keys))

    def _kept(self) -> list[tuple[int, int, dict[str, int], array[float]]]:
        """The rows that no later row replaced, by step."""
        if self._shown is None:
            last = {row[0]: number for number, row in enumerate(self._rows)}
            kept = [
                row
                for number, row in enumerate(self._rows)
                if last[row[0]] == number or (self._merge and self._rows[last[row[0]]][1] == row[1])
            ]
            self._shown = sorted(kept, key=lambda row: row[0])
        return self._shown

    @property
    def num_replaced(self) -> int:
        """Number of rows that a later row of the same step replaced."""
        return len(self) - len(self._kept())

    @property
    def steps(self) -> array[int]:
        """The logged steps, ascending and unique."""
        return array("q", self.attempts)

    @property
    def attempts(self) -> dict[int, int]:
        """For each logged step, ascending, the number of restarts before the row that counts."""
        return {step: attempt for step, attempt, _, _ in self._kept()}

    def column(self, key: str) -> Column:
        """(steps, values) of one key, steps ascending and unique; empty if no row has it. Values may be NaN.

        Both arrays are shared with later calls: treat them as read-only.
        """
        if key not in self._columns:
            found = {step: values[places[key]] for step, _, places, values in self._kept() if key in places}
            self._columns[key] = array("q", found), array("d", found.values())
        return self._columns[key]


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
