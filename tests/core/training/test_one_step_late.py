"""A run whose steps are read one step late is, number for number, the run whose steps are read at once."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.fault_runs import events, run_differences
from tests.support.in_process import train_here
from tests.support.runs import evaluating, read_rows, train, write_tiny_config
from trainer.data.loader import Reading, take_apart
from trainer.distributed.env import RankInfo
from trainer.training import loop

EXTRA = '\nstdout = "off"\n' + evaluating(14, saves=11, keep_last=9)
STEPS = 16
# Logged are 1, 8 and 16, saved is 11, evaluated 14: read at once. The others are read after the next step is launched, or,
# before one that is read at once (7, 10, 13, 15), before it starts.
FAULTY = ("model.target=tests.support.faulty_model:build", "model.contract=false")
SETTINGS = (*FAULTY, f"train.steps={STEPS}", "checkpoint.resume=auto")
LRU = ("ledger.wipe_mode=lru", "ledger.capacity=16")


@pytest.fixture
def both(tmp_path, monkeypatch):
    """Train in this process, reading every step at once and then late; both runs' directories."""
    path = write_tiny_config(tmp_path, EXTRA)

    def go(*settings: str, fault: dict[str, object] | None = None, code: int = 0):
        monkeypatch.setenv("FAULT", json.dumps(fault or {}))
        directories = {"every": 1, "late": 8}
        for name, interval in directories.items():
            train_here(path, tmp_path / name, *SETTINGS, f"metrics.log_interval={interval}", *settings, code=code)
        return [tmp_path / name for name in directories]

    return go


SKIPS = ("train.on_non_finite=skip", *LRU)
EXHAUSTED = (
    *("train.on_non_finite=skip", "train.micro_batches=3", "train.steps=9999", "data.mixing.repeat=false"),
    *("data.mixing.batch_size=12", "data.seq_len=64", "ledger.capacity=64", "ledger.wipe_mode=periodic_stale"),
    *("ledger.stale_threshold=2", "eval.every=999", "checkpoint.every=0", "sample.every=999", "sample.tokens=2"),
)


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (("ledger.wipe_mode=full", "ledger.wipe_every=3", "metrics.per_source=true"), {}),
        (("train.micro_batches=1", "gns.enabled=false", "train.on_non_finite=skip"), {}),
        (("sample.every=10", "sample.tokens=2", *LRU), {}),
        (SKIPS, {"what": "nan", "step": 7, "micro": 1}),
        (SKIPS, {"what": "inf_gradient", "step": 11, "micro": 1}),
        ((), {"what": "nan_state", "step": 3, "micro": 0}),  # of one row, while the loss is finite
        (EXHAUSTED, {}),
    ],
)
def test_the_numbers_are_those_of_steps_read_at_once(both, settings, fault):
    every, late = both(*settings, fault=fault)
    found = run_differences(every, late)
    rows = read_rows(late / "metrics.jsonl")
    if settings is EXHAUSTED:
        # Steps without tokens moved nothing but the ledger's clock, its sweeps, and the next step's learning rate.
        found = [line for line in found if ".ledger" not in line]
        status = json.loads((late / "status.json").read_text())
        assert status["reason"] == "data exhausted"
        assert status["last_step"] % 8
        samples = [event["global_step"] for run in (every, late) for event in events(run) if event["event"] == "sample"]
        assert samples == [status["last_step"]] * 2
        assert {("train", status["last_step"]), ("eval", status["last_step"])} <= rows.keys()
    assert found == []
    assert any(key.startswith("stream_mixing/") for row in rows.values() for key in row)
    skipped = [event["global_step"] for event in events(late) if event["event"] == "non_finite"]
    assert skipped == ([fault["step"]] if settings is SKIPS else [])
    assert sum(row.get("ledger/refused_rows", 0) for row in rows.values()) == (fault.get("what") == "nan_state")


@pytest.mark.distributed
def test_a_stop_of_one_rank_ends_both_after_the_same_step(tmp_path):
    config, extra = write_tiny_config(tmp_path, EXTRA), {"FAULT": '{"what": "signal", "rank": 1, "step": 4}'}
    for name, interval, last in (("every", 1, 4), ("late", 8, 5)):
        train(config, tmp_path / name, *SETTINGS, f"metrics.log_interval={interval}", nproc=2, extra=extra)
        ended = json.loads((tmp_path / name / "status.json").read_text())
        assert (ended["state"], ended["last_step"]) == ("stopped", last)
        assert (tmp_path / name / "checkpoints" / f"step_{last:08d}" / "COMPLETE").exists()


@pytest.mark.parametrize("step", [2, 7, 8])
def test_a_run_that_must_stop_ends_with_the_row_of_the_bad_step(both, step):
    fault = {"what": "nan", "step": step, "micro": 1}
    every, late = both(fault=fault, code=1)
    for run_dir in (every, late):
        status = json.loads((run_dir / "status.json").read_text())
        assert (status["state"], status["last_step"]) == ("failed", step)
    assert events(every) == events(late)
    rows = [read_rows(run_dir / "metrics.jsonl")["train", step] for run_dir in (every, late)]
    assert rows[1]["non_finite_steps"] == 1
    last = (late / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["non_finite"]["loss"] == "nan"
    # The next step may have been launched: what is ahead by it is left out, so nothing that is there may differ.
    active = [key for key in rows[1] if key.startswith("stream_mixing/active") and not key.endswith("/picks")]
    shared = [*active, "lr", "tokens_in_step"]
    assert {key: rows[1][key] for key in shared} == {key: rows[0][key] for key in shared}
    assert any(key.startswith("ledger/") for key in rows[1]) == (step == 8)


def test_a_good_step_ends_bad_steps_in_a_row_and_a_resume_does_not(both, monkeypatch):
    monkeypatch.setattr(loop, "MAX_SKIPS", 2)
    settings = ("train.on_non_finite=skip", "eval.every=0")
    both(*settings, "train.steps=3", fault={"what": "nan", "step": 2})
    # The process's own steps 1 and 2 are steps 4 and 5.
    both(*settings, "train.steps=5", fault={"what": "nan", "step": 1, "steps": 2})
    for run_dir in both(*settings, "distributed.shards=2", fault={"what": "nan", "step": 1}, code=1):
        status = json.loads((run_dir / "status.json").read_text())
        assert (status["last_step"], "3 steps in a row" in status["reason"]) == (6, True)
        assert f"train data at {run_dir} 6" in status["reason"]
        assert read_rows(run_dir / "metrics.jsonl")["train", 6]["non_finite_steps"] >= 1


def test_a_rank_without_data_keeps_the_cursor_of_its_last_batch():
    batch = {"tokens": torch.ones(2, 3), "targets": torch.ones(2, 3, dtype=torch.int64)}
    micro = replace(take_apart(batch, None), state="after 1", metrics={"lr": 1.0})
    loaders: Any = [iter([micro])]
    reading = Reading(loaders, ["before"], info=RankInfo(), device=torch.device("cpu"), is_resumed=False)
    first, second = reading.window(2), reading.window(2)
    assert first is not None
    assert second is not None
    assert [each.state for each in first + second] == ["after 1"] * 4
    assert [each.is_filler for each in first + second] == [False, True, True, True]
    masked = {"stream_mixing/masked_share": 1.0, "data/fill": (0.0, 6)}
    assert [dict(each.metrics) for each in first] == [{"lr": 1.0}, masked]
    assert [int((each.targets != -100).sum()) for each in first] == [6, 0]
