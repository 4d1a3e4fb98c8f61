"""A checkpoint's facts without a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from trainer.config.schema import RunConfig
from trainer.tools.branching.study import Origin
from trainer.tools.runs.load import RunRecord
from trainer.tools.runs.table import RowTable


def run_record(rows):
    """A run with these training rows, by step."""
    table = RowTable(merge_same_step=False)
    for step, values in rows.items():
        table.add(step, 0, tuple(values), values.values())
    return RunRecord(Path("run"), table, RowTable(merge_same_step=True))


@pytest.fixture
def record():
    return run_record


@pytest.fixture
def make_origin():
    """Makes an origin at step 100: 4 micro-batches, 1,000 tokens and 10 sequences per step, learning rate 1e-3."""

    def make(changes=None, **fields):
        tables = {
            "train": {"steps": 400, "micro_batches": 4},
            "data": {"source": [{"name": "one", "root": "nowhere"}], "mixing": {"batch_size": 8}},
            "eval": {"every": 10, "holdout_fraction": 0.1},
        }
        for table, values in (changes or {}).items():
            tables[table] = {**tables.get(table, {}), **values}
        origin = Origin(
            run=run_record({}),
            path=Path("run/checkpoints/step_00000100"),
            step=100,
            config=RunConfig.model_validate(tables),
            micro_batches=4,
            num_ranks=1,
            lr=1e-3,
            tokens_seen=100_000,
            tokens_per_step=1000.0,
            sequences_per_step=10.0,
            marker="0",
        )
        return replace(origin, **fields)

    return make


@pytest.fixture
def make_study(make_origin):
    """Makes a study of 1/4, 1 and 4 times that batch."""
    from trainer.tools.branching.study import make_study

    def make(changes=None, *, fields=None, **options):
        given = {
            "factors": [Fraction(1, 4), Fraction(1), Fraction(4)],
            "lr_grid": [0.5, 1.0, 2.0],
            "num_seeds": 2,
            "tokens": None,
            "before": None,
        }
        return make_study(make_origin(changes, **(fields or {})), Path("cbs"), **{**given, **options})

    return make
