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


def check(records) -> None:
    rows = {}
    for record in records:
        key = record.pop("mode"), int(record.pop("global_step"))
        rows[key] = {name: float(value) for name, value in record.items() if value not in ("", None)}
    assert [*rows] == [*EXPECTED], "in the order of steps, training before evaluation"
    for key, expected in EXPECTED.items():
        assert rows[key] == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


def test_csv(run, tmp_path):
    assert write_csv(run.train, run.evals, tmp_path / "x.csv") == 4
    with (tmp_path / "x.csv").open(newline="") as file:
        check(csv.DictReader(file))


def test_parquet(run, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    assert write_parquet(run.train, run.evals, tmp_path / "x.parquet") == 4
    check(parquet.read_table(tmp_path / "x.parquet").to_pylist())
