"""A checkpoint's facts without a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from tests.support.records import record_of
from trainer.config.schema import RunConfig
from trainer.tools.branching.study import Origin
from trainer.tools.branching.study import make_study as study_of


@pytest.fixture
def make_study(tmp_path):
    """Makes a study at step 100 of 1/4, 1 and 4 times a batch of 4 micro-batches, 1,000 tokens and 10 sequences.

    The learning rate is 1e-3. `changes` are of the config, and `fields` of the origin.
    """

    def make(changes=None, *, fields=None, directory=tmp_path, **options):
        tables = {
            "train": {"steps": 400, "micro_batches": 4},
            "data": {"source": [{"name": "one", "root": "nowhere"}], "mixing": {"batch_size": 8}},
            "eval": {"every": 10, "holdout_fraction": 0.1},
        }
        for table, values in (changes or {}).items():
            tables[table] = {**tables.get(table, {}), **values}
        origin = Origin(
            run=record_of({}),
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
        given = {
            "factors": [Fraction(1, 4), Fraction(1), Fraction(4)],
            "lr_grid": [0.5, 1.0, 2.0],
            "num_seeds": 2,
            "tokens": None,
        }
        return study_of(replace(origin, **(fields or {})), directory, **{**given, **options})

    return make
