"""A run's record as a table: one row for each step and mode, written as CSV or Parquet."""

from __future__ import annotations

import csv
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.errors import UserError
from trainer.runs.load import Run
from trainer.runs.table import RowTable

Mode = Literal["train", "eval"]


@dataclass(frozen=True)
class Row:
    """What counts of one step: of a step that was logged twice, across a restart, the later row."""

    mode: Mode
    step: int
    values: dict[str, float]


def rows_of(run: Run) -> Iterator[Row]:
    """The rows in the order of steps, training before evaluation."""
    found = [*_rows("train", run.train), *_rows("eval", run.evals)]
    yield from sorted(found, key=lambda row: (row.step, row.mode == "eval"))


def _rows(mode: Mode, table: RowTable) -> Iterator[Row]:
    values: dict[int, dict[str, float]] = {step: {} for step in table.steps}
    for key in table.keys:
        steps, column = table.column(key)
        for step, value in zip(steps, column, strict=True):
            values[step][key] = value
    for step, of_step in values.items():
        yield Row(mode, step, of_step)


def write_csv(run: Run, path: Path) -> int:
    """Write `mode,global_step,<key>,...`; a cell is empty where a row has no such key. Returns the number of rows.

    Numbers stand as Python writes them, so that reading them gives the same float64; NaN and infinities are nan, inf, -inf.

    Raises:
        UserError: the file cannot be written.
    """
    keys, count = run.keys, 0
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["mode", "global_step", *keys])
            for row in rows_of(run):
                writer.writerow([row.mode, row.step, *(_cell(row.values.get(key)) for key in keys)])
                count += 1
    except OSError as error:
        raise UserError(str(path), f"cannot be written: {error.strerror}", "choose another --out") from None
    return count


def _cell(value: float | None) -> str:
    return "" if value is None else repr(value).removesuffix(".0")


def write_parquet(run: Run, path: Path) -> int:
    """Write columns `mode`, `global_step` and one float64 a key, null where a row has no such key; returns the rows.

    Raises:
        UserError: pyarrow is not installed, or the file cannot be written.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        problem = "needs the package pyarrow, which is not installed"
        raise UserError(
            "--format parquet", problem, "run: pip install 'trainer[parquet]', or use --format csv"
        ) from None
    rows = list(rows_of(run))
    columns: dict[str, Any] = {
        "mode": pyarrow.array([row.mode for row in rows], pyarrow.string()),
        "global_step": pyarrow.array(array("q", (row.step for row in rows)), pyarrow.int64()),
    }
    for key in run.keys:
        columns[key] = pyarrow.array([row.values.get(key) for row in rows], pyarrow.float64(), from_pandas=False)
    try:
        parquet.write_table(pyarrow.table(columns), str(path))
    except OSError as error:
        raise UserError(str(path), f"cannot be written: {error}", "choose another --out") from None
    return len(rows)
