"""Two ranks whose steps are settled late: what one of them meets, both see at the same step."""

from __future__ import annotations

import pytest
import torch

from tests.support.fault_runs import make_config
from tests.support.late import events, run_differences, settle_late, strike_by_step
from tests.support.ranks import Ranks, status

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
    "metrics.log_interval=7",
)


@pytest.fixture
def both(tmp_path, monkeypatch):
    """Run two ranks, settling at once and then late; the run directories."""
    config = make_config(tmp_path, EXTRA)

    def go(*settings: str, fault: dict[str, object] | None = None, code: int = 0):
        overrides = [part for setting in settings for part in ("--set", setting)]
        directories = tmp_path / "at_once", tmp_path / "late"
        for run_dir in directories:
            with monkeypatch.context() as patches:
                strike_by_step(patches)
                if run_dir.name == "late":
                    settle_late(patches)
                arguments = ("--config", config, "--run-dir", run_dir, *ARGUMENTS, *overrides)
                with Ranks(arguments, logs=run_dir.with_suffix(".logs"), fault=fault) as ranks:
                    assert ranks.wait() == [code] * 2, ranks.said()
        return directories

    return go


@pytest.mark.parametrize("ownership", ["reader", "exchange"])
def test_the_numbers_are_those_of_steps_settled_at_once(both, ownership):
    # Where every rank reads documents of its own, owners are not needed; they are asked for.
    at_once, late = both(f"ledger.ownership={ownership}", "checkpoint.background=true")
    assert run_differences(at_once, late) == []


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_bad_number_on_one_rank_is_found_late_by_both(both, policy):
    fault = {"what": "nan", "rank": 1, "step": 4, "micro": 1}
    at_once, late = both(f"train.on_non_finite={policy}", fault=fault, code=policy == "stop")
    assert run_differences(at_once, late) == []
    (found,) = [event for event in events(late) if event["event"] == "non_finite"]
    assert (found["global_step"], len(found["batches"])) == (4, 2)


def test_a_refused_row_of_one_rank_makes_both_run_the_window_again(both):
    fault = {"what": "nan_state", "rank": 1, "step": 3}
    at_once, late = both(fault=fault)
    assert [line for line in run_differences(at_once, late) if ".ledger" not in line] == []


def test_data_that_end_on_one_rank_first_end_for_both_when_no_rank_has_any(both):
    many = ("train.steps=9999", "metrics.log_interval=1000", "eval.every=0", "checkpoint.every=0", "data.seq_len=64")
    at_once, late = both("data.mixing.repeat=false", *many)
    assert status(late)["reason"] == "the data have ended"
    cursors = [
        torch.load(path, weights_only=True)["data"] for path in sorted(late.glob("checkpoints/latest/rank_*.pt"))
    ]
    assert len(cursors) == 2
    assert run_differences(at_once, late) == []


def test_a_stop_of_one_rank_ends_both_after_the_same_step(both):
    fault = {"what": "signal", "rank": 1, "step": 4}
    at_once, late = both(fault=fault)
    assert run_differences(at_once, late) == []
