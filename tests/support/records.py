"""Records of runs that never were: in memory, and as files for the real reader."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import tomli_w

from trainer.metrics.payload_contract import build_payload, encode_payload
from trainer.metrics.run_status import Owner
from trainer.tools.runs.load import RowTable, RunRecord

Rows = dict[int, dict[str, float]]
Mode = Literal["train", "eval"]
Column = Mapping[int, float] | Sequence[float | None]


def _rows(columns: Mapping[str, Column], evals: Rows | None) -> Iterator[tuple[int, Mode, dict[str, float]]]:
    """(step, mode, row) by step; values of a list are of steps 1, 2, ..., and None is none."""
    rows: Rows = {}
    for key, column in columns.items():
        named = column if isinstance(column, Mapping) else dict(enumerate(column, start=1))
        for step, value in named.items():
            if value is not None:
                rows.setdefault(step, {})[key] = value
    found: list[tuple[int, Mode, dict[str, float]]] = [(step, "train", row) for step, row in rows.items()]
    found += [(step, "eval", row) for step, row in (evals or {}).items()]
    yield from sorted(found, key=lambda row: row[0])


def record_of(columns: Mapping[str, Column], evals: Rows | None = None, **fields: Any) -> RunRecord:
    """A run of these training columns, and rows of evaluations; `fields`: of `RunRecord`."""
    tables = {"train": RowTable(), "eval": RowTable()}
    for step, mode, row in _rows(columns, evals):
        tables[mode].add(step, row)
    return RunRecord(Path("run"), tables["train"], tables["eval"], **fields)


def write_record(
    directory: Path, columns: Mapping[str, Column], evals: Rows | None = None, *, config: Any = None, **files: Any
) -> Path:
    """The files of a run; `files`: the content of other JSON files, by the stem of their names."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = [encode_payload(build_payload(mode, step, row)) for step, mode, row in _rows(columns, evals)]
    (directory / "metrics.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    if config is not None:
        (directory / "config.resolved.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return directory


def write_lock(
    directory: Path, owner: Mapping[str, Any] | None = MappingProxyType({}), silent_sec: float = 0.0
) -> None:
    """The lock of a process that last showed itself so long ago, by default of another host; None: it says nothing."""
    path, known = directory / ".lock", Owner("word", "elsewhere", 1, "elsewhere boot pid:[1]", "5")._asdict()
    path.write_text("" if owner is None else json.dumps({**known, **owner}), encoding="utf-8")
    os.utime(path, times=(time.time() - silent_sec,) * 2)
