"""Two ranks whose steps are read one step late: what one of them meets, both act on at the same step."""

from __future__ import annotations

import json

import pytest

from tests.support.checkpoints import file_content
from tests.support.fault_runs import make_config
from tests.support.grouped import train
from tests.support.late import run_differences
from tests.support.ranks import status
from tests.support.runs import evaluating, read_rows

pytestmark = pytest.mark.distributed

EXTRA = evaluating(12, saves=9, keep_last=9)
SETS = ("train.steps=14", "model.target=tests.support.faulty_model:build", "model.contract=false")


@pytest.fixture
def both(tmp_path):
    """Run two ranks, reading every step at once and then late; the run directories."""
    config = make_config(tmp_path, EXTRA)

    def go(*settings: str, fault: dict[str, object] | None = None):
        directories = {"every": 1, "late": 7}
        for name, interval in directories.items():
            run_dir = tmp_path / name
            extra = {"FAULT": json.dumps(fault or {})}
            train(config, run_dir, *SETS, f"metrics.log_interval={interval}", *settings, nproc=2, extra=extra)
        return [tmp_path / name for name in directories]

    return go


def test_a_state_of_one_rank_that_is_not_finite_is_dropped(both):
    every, late = both("checkpoint.background=true", fault={"what": "nan_state", "rank": 1, "step": 3})
    assert run_differences(every, late) == []
    assert sum(row.get("ledger/refused_rows", 0) for row in read_rows(late / "metrics.jsonl").values()) == 1


def test_data_that_end_on_one_rank_first_end_for_both_when_no_rank_has_any(both):
    every, late = both(
        "data.mixing.repeat=false", "train.steps=9999", "eval.every=0", "checkpoint.every=0", "data.seq_len=64"
    )
    assert status(late)["reason"] == "data exhausted"
    cursors = [file_content(path)["data"] for path in sorted(late.glob("checkpoints/latest/rank_*.safetensors"))]
    assert len(cursors) == 2
    found = [line for line in run_differences(every, late) if ".ledger" not in line]
    assert found == []


def test_a_stop_of_one_rank_ends_both_after_the_same_step(both):
    every, late = both(fault={"what": "signal", "rank": 1, "step": 4})
    assert [status(run_dir)["last_step"] for run_dir in (every, late)] == [4, 5]
    assert (late / "checkpoints" / "step_00000005" / "COMPLETE").exists()
