"""A run whose steps are settled late is, number for number, the run whose steps are settled at once."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.late import events, run_differences, settle_late, strike_by_step
from tests.support.runs import read_rows, write_tiny_config
from trainer.config.load import load_config
from trainer.training.loop import next_window
from trainer.training.main import train
from trainer.training.run_state import TakenStep, Window

EXTRA = """
stdout = "off"

[eval]
every = 14
batches = 2
holdout_fraction = 0.2

[checkpoint]
every = 11
keep_last = 9
"""
STEPS = 16
# Logged are 1, 8 and 16, saved is 11, evaluated 14: settled at once. 7, 10, 13 and 15 are settled before the next one
# begins, and 2 to 6, 9 and 12 in its midst.
SETTINGS = (
    "model.target=tests.support.faulty_model:build",
    f"train.steps={STEPS}",
    "metrics.log_interval=8",
    "checkpoint.resume=auto",
)
LRU = ("ledger.wipe_mode=lru", "ledger.capacity=16")


@pytest.fixture
def both(tmp_path, monkeypatch):
    """Train in this process, settling at once and then late; both runs' directories, and what was settled late."""
    path = write_tiny_config(tmp_path, EXTRA)

    def go(*settings: str, fault: dict[str, object] | None = None, code: int = 0):
        config = load_config(path, [*SETTINGS, *settings])
        monkeypatch.setenv("FAULT", json.dumps(fault or {}))
        at_once, late = tmp_path / "at_once", tmp_path / "late"
        with monkeypatch.context() as patches:
            strike_by_step(patches)
            assert train(config, path, str(at_once)) == code
        with monkeypatch.context() as patches:
            strike_by_step(patches)
            seen = settle_late(patches)
            assert train(config, path, str(late)) == code
        return at_once, late, seen

    return go


@pytest.mark.parametrize(
    "settings",
    [
        (),
        LRU,
        ("ledger.wipe_mode=full", "ledger.wipe_every=3", "metrics.per_source=true"),
        ("ledger.wipe_mode=periodic_stale", "ledger.stale_threshold=2", "ledger.sweep_every=2"),
        ("train.on_non_finite=skip", "train.micro_batches=1", "gns.enabled=false"),
        ("sample.every=10", "sample.tokens=2", "checkpoint.background=true"),
    ],
)
def test_the_numbers_are_those_of_steps_settled_at_once(both, settings):
    at_once, late, seen = both(*settings)
    assert run_differences(at_once, late) == []
    assert any(key.startswith("stream_mixing/") for key in read_rows(late / "metrics.jsonl")["train", STEPS])
    assert seen.late == 7 - ("sample.every=10" in settings)
    assert seen.undone == []


def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(both):
    at_once, late, _ = both("train.steps=9")
    assert run_differences(at_once, late) == []
    at_once, late, seen = both()
    assert run_differences(at_once, late) == []
    assert seen.late > 0


@pytest.mark.parametrize(
    ("policy", "what", "step"),
    [
        ("stop", "nan", 2),
        ("skip", "nan", 2),
        ("skip", "nan", 7),
        ("skip", "nan", 8),
        ("stop", "inf_gradient", 9),
        ("skip", "inf_gradient", 11),
        ("stop", "nan", 13),
    ],
)
def test_a_bad_step_is_found_late_and_leaves_no_trace(both, policy, step, what):
    fault = {"what": what, "step": step, "micro": 1}
    at_once, late, seen = both(f"train.on_non_finite={policy}", *LRU, fault=fault, code=policy == "stop")
    assert run_differences(at_once, late) == []
    found = [event for event in events(late) if event["event"] == "non_finite"]
    assert [event["global_step"] for event in found] == [step]
    assert seen.undone == ([step + 1] if step in (2, 9) else [])


@pytest.mark.parametrize(("step", "steps"), [(2, 3), (6, 2)])
def test_bad_steps_in_a_row_are_each_skipped_once(both, step, steps):
    fault = {"what": "nan", "step": step, "steps": steps}
    at_once, late, _ = both("train.on_non_finite=skip", fault=fault)
    assert run_differences(at_once, late) == []
    rows = read_rows(late / "metrics.jsonl")
    assert sum(row.get("non_finite_steps", 0) for row in rows.values()) == steps


def test_too_many_bad_steps_in_a_row_end_the_run_at_the_same_step(both):
    fault = {"what": "nan", "step": 4, "steps": 9}
    at_once, late, _ = both("train.on_non_finite=skip", "train.max_skips=2", "eval.every=0", fault=fault, code=1)
    assert run_differences(at_once, late) == []
    status = json.loads((late / "status.json").read_text())
    assert (status["last_step"], "3 steps in a row" in status["reason"]) == (6, True)


def held(run_dir: Path) -> dict[int, tuple[int, list[float]]]:
    """Group -> step of the last store and state, in the last checkpoint."""
    ledger = torch.load(run_dir / f"checkpoints/step_{STEPS:08d}/rank_000.pt", weights_only=True)["ledger"]
    values = zip(ledger["last_step"].tolist(), ledger["rows"].tolist(), strict=True)
    return dict(zip(ledger["groups"].tolist(), values, strict=True))


@pytest.mark.parametrize(("policy", "step"), [("stop", 2), ("stop", 8), ("skip", 3), ("skip", 7)])
def test_rows_that_are_not_finite_are_refused_late(both, policy, step):
    """The state of one row is NaN while the loss is not: the group starts from zero, and the run goes on."""
    fault = {"what": "nan_state", "step": step, "micro": 0}
    at_once, late, seen = both(f"train.on_non_finite={policy}", fault=fault)
    rows = read_rows(late / "metrics.jsonl")
    assert sum(row.get("ledger/refused_rows", 0) for row in rows.values()) == 1
    # Which slot a group lies in may differ; what is held may not, nor any number.
    assert [line for line in run_differences(at_once, late) if ".ledger" not in line] == []
    assert held(at_once) == held(late)
    assert seen.undone == ([step + 1] if step in (2, 3) else [])


@pytest.mark.parametrize("fault", [{"step": 2, "micro": 1}, {"step": 7}, {"step": 11}])
def test_a_stop_comes_after_the_step_in_which_it_was_asked_for(both, fault):
    at_once, late, _ = both(fault={"what": "signal", **fault})
    assert run_differences(at_once, late) == []
    assert json.loads((late / "status.json").read_text())["last_step"] == fault["step"]


@pytest.mark.parametrize(("policy", "micro_batches"), [("stop", 2), ("skip", 3)])
def test_the_data_end_at_the_same_step(both, policy, micro_batches):
    many = ("train.steps=9999", "metrics.log_interval=1000", "eval.every=0", "checkpoint.every=0", "data.seq_len=64")
    at_once, late, seen = both(
        f"train.on_non_finite={policy}",
        f"train.micro_batches={micro_batches}",
        "data.mixing.repeat=false",
        # Draws random numbers in every window: those of one that is taken back must not count.
        "model.target=tests.support.models:dropout",
        *many,
    )
    assert json.loads((late / "status.json").read_text())["reason"] == "the data have ended"
    assert seen.undone
    assert run_differences(at_once, late) == []


def test_a_rank_that_has_no_data_left_keeps_the_cursor_of_its_last_window():
    unsettled = TakenStep(5, Window((), "after 5", ()))
    run = SimpleNamespace(
        config=SimpleNamespace(train=SimpleNamespace(micro_batches=1)),
        loader=iter(()),
        previous_batch={"tokens": torch.ones(2, 3), "targets": torch.ones(2, 3, dtype=torch.int64)},
        accepted=None,
        data_state="after 4",
        unsettled=unsettled,
    )
    assert next_window(run).data_state == "after 5"  # type: ignore[arg-type]
