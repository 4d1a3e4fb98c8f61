"""Records of runs that never were: in memory, and as files for the real reader."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from trainer.metrics.payload_contract import build_payload, encode_payload
from trainer.tools.runs.load import RowTable, RunRecord

Rows = dict[int, dict[str, float]]
Column = Mapping[int, float] | Sequence[float | None]


def rows_of(columns: Mapping[str, Column]) -> Rows:
    """Rows by step; values of a list are of steps 1, 2, ..., and None is none."""
    rows: Rows = {}
    for key, column in columns.items():
        named = column if isinstance(column, Mapping) else dict(enumerate(column, start=1))
        for step, value in named.items():
            if value is not None:
                rows.setdefault(step, {})[key] = value
    return dict(sorted(rows.items()))


def record_of(rows: Rows, **fields: Any) -> RunRecord:
    """A run of these training rows."""
    table = RowTable(merge_same_step=False)
    for step, row in rows.items():
        table.add(step, 0, tuple(row), row.values())
    return RunRecord(Path("run"), table, RowTable(merge_same_step=True), **fields)


def write_record(
    directory: Path, train: Mapping[str, Column], evals: Rows | None = None, *, config: Any = None, **files: Any
) -> Path:
    """The files of a run; `files`: the content of other JSON files, by the stem of their names."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = [(step, "train", row) for step, row in rows_of(train).items()]
    rows += [(step, "eval", row) for step, row in (evals or {}).items()]
    lines = [encode_payload(build_payload(mode, step, row)) for step, mode, row in sorted(rows, key=lambda row: row[0])]
    (directory / "metrics.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    if config is not None:
        (directory / "config.resolved.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return directory
