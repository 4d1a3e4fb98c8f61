"""Times and speeds of a payload are those of all steps since the last one, on all ranks."""

from __future__ import annotations

import pytest

from tests.support.grouped import train
from tests.support.runs import read_rows, write_tiny_config

STALL_SEC = 1.5


def test_a_wait_of_another_rank_in_a_step_that_is_not_logged_is_in_the_next_payload(tmp_path):
    stalls = f'args={{after=7, how="sleep", seconds={STALL_SEC}, ranks=[1]}}'
    settings = (
        f'data.source=[{{name="own", target="tests.support.stalling_data:build", {stalls}}}]',
        "data.mixing.batch_size_by_modality={}",
        "data.prefetch=0",
        "train.steps=10",
        "metrics.log_interval=5",
        "eval.every=0",
        "eval.holdout_fraction=0",
        "checkpoint.every=0",
        "train.micro_batches=1",
    )
    train(write_tiny_config(tmp_path), tmp_path / "run", *settings, nproc=2)
    rows = {step: row for (_, step), row in read_rows(tmp_path / "run" / "metrics.jsonl").items()}
    seconds = rows[10]["step_time_sec"]
    assert 5 * seconds >= STALL_SEC, "five steps since the payload before"
    assert STALL_SEC <= 5 * rows[10]["time/data_sec"] <= 5 * seconds
    assert rows[10]["time/data_share"] == pytest.approx(rows[10]["time/data_sec"] / seconds)
    assert rows[10]["tokens_per_sec"] == pytest.approx(rows[10]["tokens_in_step"] / seconds), "all steps have as many"
    assert rows[5]["time/data_sec"] < STALL_SEC / 5
