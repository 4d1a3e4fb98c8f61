"""Exports a run record as one table: a row per step and mode, as CSV or Parquet."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import UserError
from trainer.files import replacing
from trainer.metrics.payload_contract import Mode
from trainer.tools.runs.load import RunRecord
from trainer.tools.runs.table import RowTable


@dataclass(frozen=True)
class Row:
    """The values of one step; if a restart made the run log the step twice, those of the later row."""

    mode: Mode
    step: int
    values: dict[str, float]


def rows_of(run: RunRecord) -> Iterator[Row]:
    """All rows, ordered by step, training before evaluation."""
    rows = [*_rows("train", run.train), *_rows("eval", run.evals)]
    yield from sorted(rows, key=lambda row: (row.step, row.mode == "eval"))


def _rows(mode: Mode, table: RowTable) -> Iterator[Row]:
    by_step: dict[int, dict[str, float]] = {step: {} for step in table.steps}
    for key in table.keys:
        for step, value in zip(*table.column(key), strict=True):
            by_step[step][key] = value
    for step, values in by_step.items():
        yield Row(mode, step, values)


def write_csv(run: RunRecord, path: Path) -> int:
    """Write `mode,global_step,<key>,...`, empty cells for absent keys; returns the number of rows.

    Numbers are written with `repr`, so that reading them back gives the same float64; NaN and infinities as nan, inf, -inf.

    Raises:
        UserError: the file cannot be written.
    """
    rows, keys = list(rows_of(run)), run.keys
    try:
        with replacing(path, follow=True) as raw:
            file = io.TextIOWrapper(raw, encoding="utf-8", newline="")
            writer = csv.writer(file)
            writer.writerow(["mode", "global_step", *keys])
            for row in rows:
                writer.writerow([row.mode, row.step, *(_cell(row.values.get(key)) for key in keys)])
            file.detach()  # flushes
    except OSError as error:
        raise UserError(str(path), f"cannot be written: {error.strerror}", "choose another --out") from None
    return len(rows)


def _cell(value: float | None) -> str:
    return "" if value is None else repr(value).removesuffix(".0")


def write_parquet(run: RunRecord, path: Path) -> int:
    """Write columns `mode`, `global_step` and one float64 column per key, null where absent; returns the number of rows.

    Raises:
        UserError: pyarrow is not installed, or the file cannot be written.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        fix = "run: pip install pyarrow, or use --format csv"
        raise UserError("--format parquet", "needs the package pyarrow, which is not installed", fix) from None
    rows = list(rows_of(run))
    columns = {
        "mode": pyarrow.array([row.mode for row in rows], pyarrow.string()),
        "global_step": pyarrow.array([row.step for row in rows], pyarrow.int64()),
    }
    for key in run.keys:
        # from_pandas=False keeps NaN apart from null.
        columns[key] = pyarrow.array([row.values.get(key) for row in rows], pyarrow.float64(), from_pandas=False)
    try:
        with replacing(path, follow=True) as file:
            parquet.write_table(pyarrow.table(columns), file)
    except OSError as error:
        raise UserError(str(path), f"cannot be written: {error}", "choose another --out") from None
    return len(rows)
