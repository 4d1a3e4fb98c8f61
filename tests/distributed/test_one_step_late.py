"""Two ranks whose steps are read one step late: what one of them meets, both act on at the same step."""

from __future__ import annotations

import json

import pytest

from tests.support.checkpoints import file_content
from tests.support.fault_runs import make_config
from tests.support.late import events, run_differences
from tests.support.ranks import Ranks, status
from tests.support.runs import read_rows

pytestmark = pytest.mark.distributed

EXTRA = """
[eval]
every = 12
batches = 2
holdout_fraction = 0.2

[checkpoint]
every = 9
keep_last = 9
"""
ARGUMENTS = (
    "--set",
    "train.steps=14",
    "--set",
    "model.target=tests.support.faulty_model:build",
    "--set",
    "model.contract=false",
)


@pytest.fixture
def both(tmp_path):
    """Run two ranks, reading every step at once and then late; the run directories."""
    config = make_config(tmp_path, EXTRA)

    def go(*settings: str, fault: dict[str, object] | None = None, code: int = 0):
        directories = {"every": 1, "late": 7}
        for name, interval in directories.items():
            run_dir = tmp_path / name
            overrides = [part for s in (f"metrics.log_interval={interval}", *settings) for part in ("--set", s)]
            arguments = ("--config", config, "--run-dir", run_dir, *ARGUMENTS, *overrides)
            with Ranks(arguments, logs=run_dir.with_suffix(".logs"), fault=fault) as ranks:
                assert ranks.wait() == [code] * 2, ranks.said()
        return [tmp_path / name for name in directories]

    return go


@pytest.mark.parametrize("ownership", ["reader", pytest.param("exchange", marks=pytest.mark.slow)])
def test_the_numbers_are_those_of_steps_read_at_once(both, ownership):
    # Where every rank reads documents of its own, owners are not needed; they are asked for.
    every, late = both(f"ledger.ownership={ownership}", "checkpoint.background=true")
    assert run_differences(every, late) == []


def test_a_bad_step_of_one_rank_is_skipped_by_both(both):
    every, late = both("train.on_non_finite=skip", fault={"what": "nan", "rank": 1, "step": 4, "micro": 1})
    assert run_differences(every, late) == []
    (found,) = [event for event in events(late) if event["event"] == "non_finite"]
    assert (found["global_step"], len(found["batches"])) == (4, 2)


def test_a_bad_step_of_one_rank_stops_both(both):
    every, late = both(fault={"what": "nan", "rank": 1, "step": 4, "micro": 1}, code=1)
    assert events(every) == events(late)
    assert [status(run_dir)["last_step"] for run_dir in (every, late)] == [4, 4]
    assert json.loads((late / "metrics.jsonl").read_text().splitlines()[-1])["non_finite"]["loss"] == "nan"


def test_a_state_of_one_rank_that_is_not_finite_is_dropped(both):
    every, late = both(fault={"what": "nan_state", "rank": 1, "step": 3})
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
