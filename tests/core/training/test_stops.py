"""A run that is stopped, wherever the signal comes, leaves with a checkpoint."""

from __future__ import annotations

import json
import shutil
import signal

import pytest

from tests.support.fault_runs import MEASURED, row_differences
from tests.support.in_process import train_here
from tests.support.ranks import checkpoint_differences
from tests.support.runs import evaluating, losses, read_rows, write_tiny_config

EXTRA = '\nstdout = "off"\n[sample]\nevery = 4\ntokens = 1\n' + evaluating(4, batches=3, saves=3)
STEPS = 8


@pytest.fixture
def go(tmp_path, monkeypatch):
    """Train in this process, with a fault; the state that the run ended in."""
    path = write_tiny_config(tmp_path, EXTRA)
    model = ("model.target=tests.support.faulty_model:build", "model.contract=false", "eval.depth=false")

    def run(name: str, fault: dict[str, object], *sets: str, code: int = 0) -> dict[str, object]:
        monkeypatch.setenv("FAULT", json.dumps(fault))
        train_here(path, tmp_path / name, *model, f"train.steps={STEPS}", "checkpoint.resume=auto", *sets, code=code)
        return json.loads((tmp_path / name / "status.json").read_text())

    return run


# Of the process's own windows: step 4 is one that is followed by an evaluation, step 8 the last one.
@pytest.mark.parametrize(
    ("fault", "last", "logged"),
    [
        ({"step": 2, "micro": 1}, 2, []),
        ({"step": 4}, 4, []),
        ({"step": STEPS}, STEPS, [4]),
        ({"mode": "eval", "step": 1, "micro": 0}, 4, []),
        ({"mode": "eval", "step": 3, "micro": 0}, STEPS, [4]),
    ],
)
def test_a_stop_at_any_moment_is_made_up_for(go, tmp_path, monkeypatch, fault, last, logged):
    assert go("whole", {})["state"] == "done"
    stopped = go("run", {"what": "signal", **fault})
    assert (stopped["state"], stopped["reason"], stopped["last_step"]) == ("stopped", "stopped by SIGTERM", last)
    record = tmp_path / "run" / "metrics.jsonl"
    assert sorted(losses(record)) == list(range(1, last + 1))
    assert [step for step in (4, 8) if f'"mode":"eval","global_step":{step}' in record.read_text()] == logged
    assert (tmp_path / "run" / "checkpoints" / f"step_{last:08d}" / "COMPLETE").exists()
    resumed = go("run", {})
    assert (resumed["state"], resumed["last_step"]) == ("done", STEPS)
    assert row_differences(tmp_path / "whole", tmp_path / "run") == []
    name = f"checkpoints/step_{STEPS:08d}"
    assert checkpoint_differences(tmp_path / "whole" / name, tmp_path / "run" / name) == []
    rows, again = record.read_text(), f"checkpoint.resume={tmp_path}/run/checkpoints/step_00000006"
    go("run", {})  # nothing is left, nor to be evaluated again
    assert record.read_text() == rows
    assert (tmp_path / "run" / "events.jsonl").read_text().count('"event":"sample"') == 2
    go("again", {}, again)
    rows = (tmp_path / "again" / "metrics.jsonl").read_text()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # by torchrun: what was saved since is continued
    go("again", {}, again)
    assert (tmp_path / "again" / "metrics.jsonl").read_text() == rows


@pytest.mark.parametrize("moment", [{"mode": "eval", "step": 1}, {"step": 40}])  # the 79th micro-batch
def test_an_evaluation_at_the_end_of_the_data_that_a_stop_left_out_is_made_up_for(go, tmp_path, moment):
    sets = ("train.steps=9999", "train.micro_batches=3", "data.mixing.repeat=false", "data.mixing.batch_size=12")
    sets += ("data.seq_len=64", "ledger.capacity=64", "eval.every=999", "sample.every=999", "checkpoint.every=1")
    stopped = go("run", {"what": "signal", **moment}, *sets)
    assert (stopped["state"], stopped["last_step"]) == ("stopped", 27)
    record = tmp_path / "run" / "metrics.jsonl"
    assert '"mode":"eval"' not in record.read_text()
    for _ in range(2):  # the second finds nothing left
        ended = go("run", {}, *sets)
        assert (ended["state"], ended["last_step"]) == ("done", stopped["last_step"])
        assert record.read_text().count('"mode":"eval"') == 1
    name = f"checkpoints/step_{stopped['last_step']:08d}"
    go("elsewhere", {}, *sets, f"checkpoint.resume={tmp_path}/run/{name}")
    assert (tmp_path / "elsewhere" / name).exists()


def test_a_stop_before_the_first_step_takes_none(go, tmp_path, monkeypatch):
    handled, asked = signal.signal, []

    def install_and_ask(number: int, handler: object) -> object:
        before = handled(number, handler)
        if number == signal.SIGTERM and not asked:
            asked.append(number)
            signal.raise_signal(number)
        return before

    monkeypatch.setattr(signal, "signal", install_and_ask)
    ended = go("run", {}, code=1)
    monkeypatch.undo()
    assert (ended["state"], ended["last_step"]) == ("stopped", 0)
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_a_resume_that_finds_no_checkpoint_says_which_steps_are_lost(go, tmp_path, caplog):
    go("run", {})
    assert "has no checkpoint" not in caplog.text
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    go("run", {})
    assert f"was at step {STEPS} and has no checkpoint; starting at step 0" in caplog.text


def test_what_was_counted_between_two_logged_steps_survives_a_kill(tmp_path):
    """Checkpoints at 3 and 6, rows at 1, 5 and 8: a row after the resume holds what was counted before it."""
    path = write_tiny_config(tmp_path, EXTRA)
    settings = ["metrics.log_interval=5", f"train.steps={STEPS}", "checkpoint.keep_last=9"]
    settings += ["ledger.wipe_mode=full", "ledger.wipe_every=2"]
    train_here(path, tmp_path / "whole", *settings)
    rows = read_rows(tmp_path / "whole" / "metrics.jsonl")
    assert rows["train", 5]["ledger_wipe_count"] == 2
    assert rows["train", 5]["ledger/cold_starts"] > 0
    for saved, later in ((3, (5, 8)), (6, (8,))):
        checkpoint = tmp_path / "whole" / "checkpoints" / f"step_{saved:08d}"
        run_dir = tmp_path / f"from{saved}"
        train_here(path, run_dir, *settings, f'checkpoint.resume="{checkpoint}"')
        again = read_rows(run_dir / "metrics.jsonl")
        for step in later:
            same = {k: v for k, v in rows["train", step].items() if not k.startswith(MEASURED)}
            assert {key: again["train", step].get(key) for key in same} == same


@pytest.mark.parametrize("mode", ["per_stream", "device_per_stream"])
def test_batches_of_another_size_are_dealt_anew_and_find_the_states_of_their_documents(tmp_path, mode):
    path, sets = write_tiny_config(tmp_path), ("distributed.shards=2", f"data.mixing.batching_mode={mode}")
    for size in (4, 3):
        more = (f"data.mixing.batch_size={size}", f"train.steps={48 // size}", "checkpoint.resume=auto")
        train_here(path, tmp_path / "run", *sets, *more)
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert sum(row["ledger/cold_starts"] for row in rows.values()) == 0
