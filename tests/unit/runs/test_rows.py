"""CSV and Parquet have the rows of metrics.jsonl; if a step was logged twice, the later row."""

from __future__ import annotations

import csv
import json
import math

import pytest

from trainer.tools.runs.load import load_run
from trainer.tools.runs.table import write_csv, write_parquet

LINES = [
    {"mode": "train", "global_step": 1, "metrics": {"loss": 3.25, "tokens_seen": 4096}},
    {"mode": "train", "global_step": 2, "metrics": {"loss": 0.1 + 0.2}},
    {"mode": "eval", "global_step": 2, "metrics": {"eval_loss": 1e-300}},
    {"mode": "train", "global_step": 3, "metrics": {"loss": 9.0, "only/once": 1.0}},
    {"event": "restart", "global_step": 2},
    {"mode": "train", "global_step": 3, "metrics": {"lr": 0.001}, "non_finite": {"loss": "nan", "grad_norm": "-inf"}},
]
EXPECTED = {
    ("train", 1): {"loss": 3.25, "tokens_seen": 4096.0},
    ("train", 2): {"loss": 0.1 + 0.2},
    ("eval", 2): {"eval_loss": 1e-300},
    ("train", 3): {"lr": 0.001, "loss": math.nan, "grad_norm": -math.inf},
}


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"schema_version": 1, **line}) + "\n" for line in LINES))
    return load_run(path)


def same(found, expected) -> bool:
    return found.keys() == expected.keys() and all(
        found[key] == value or (math.isnan(found[key]) and math.isnan(value)) for key, value in expected.items()
    )


def check(rows) -> None:
    assert [*rows] == [*EXPECTED], "in the order of steps, training before evaluation"
    for key, expected in EXPECTED.items():
        assert same(rows[key], expected), (key, rows[key])


def test_csv(run, tmp_path):
    assert write_csv(run.train, run.evals, tmp_path / "x.csv") == 4
    with (tmp_path / "x.csv").open(newline="") as file:
        records = list(csv.DictReader(file))
    rows = {}
    for record in records:
        key = record.pop("mode"), int(record.pop("global_step"))
        rows[key] = {name: float(text) for name, text in record.items() if text != ""}
    check(rows)


def test_parquet(run, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    assert write_parquet(run.train, run.evals, tmp_path / "x.parquet") == 4
    rows = {}
    for record in parquet.read_table(tmp_path / "x.parquet").to_pylist():
        key = record.pop("mode"), record.pop("global_step")
        rows[key] = {name: value for name, value in record.items() if value is not None}
    check(rows)
