"""Runs whose number of micro-batches changes as planned: resumed bit for bit, whatever is read early."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.fault_runs import rows_of
from tests.support.ranks import checkpoint_differences
from tests.support.runs import train, write_tiny_config

pytestmark = pytest.mark.distributed

STEPS = 14
PLAN = 'train.micro_batches={schedule="step", points={0=1, 4=3, 8=2}}'
EXTRA = """
[checkpoint]
every = 1
keep_last = 100
"""


def start(directory: Path, name: str, *sets: str, **options: Any) -> str:
    """What the run said."""
    config = write_tiny_config(directory, EXTRA)
    return train(config, directory / name, f"train.steps={STEPS}", PLAN, *sets, **options)


def last(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / f"step_{STEPS:08d}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plan")
    start(directory, "whole")
    return directory / "whole"


def test_changes_come_where_they_are_planned(whole):
    for step, row in rows_of(whole).items():
        m = 1 if step < 4 else 3 if step < 8 else 2
        assert row["train/micro_batches"] == m
        # So many cells were read: 4 rows of modality a or 2 of b in each micro-batch, some of them short.
        assert (m - 1) * 2 * 8 < row["tokens_in_step"] <= m * 4 * 16


def test_a_run_resumed_before_its_last_change_is_the_whole_run(whole):
    checkpoint = whole / "checkpoints" / "step_00000007"
    resumed = whole.parent / "resumed"
    start(whole.parent, "resumed", more=("--resume", checkpoint))
    assert rows_of(resumed) == {step: row for step, row in rows_of(whole).items() if step > 7}
    assert checkpoint_differences(last(whole), last(resumed)) == []


def test_what_is_read_early_does_not_move_a_change(whole):
    # Without checkpoints, and logged but at the ends: most steps are read once the next one is launched.
    late = whole.parent / "late"
    start(whole.parent, "late", "checkpoint.every=0", "metrics.log_interval=1000", "data.prefetch=0")
    assert checkpoint_differences(last(whole), last(late)) == []
