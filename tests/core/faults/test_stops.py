"""SIGTERM at random moments, NaN, infinity and spikes: the ranks stop together, keep the last good step, and come back."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest

from tests.support.fault_runs import ARGUMENTS, LOST, STEPS, assert_same, end_with, keep, make_config, whole_run
from tests.support.ranks import PATIENCE_SEC, Ranks, is_saving, last_logged, status, wait_while_starting
from tests.support.runs import losses, read_rows
from trainer.ending import SAME_REQUEST_SEC
from trainer.metrics.payload_contract import validate_stream

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1500)]
# torchrun kills what is left 30 s after its SIGTERM.
GRACE_SEC = 30
MOMENTS = ("start-up", "first step", "between micro-batches", "evaluation", "checkpoint")
ROUNDS = 4


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    directory = tmp_path_factory.mktemp("untouched")
    config = make_config(directory)
    return config, whole_run(config, directory / "run")


def fault_of(moment: str, chance: random.Random) -> dict[str, object]:
    """The signal that a rank sends itself there; {} where it comes from outside."""
    itself = {"what": "signal", "rank": chance.choice([0, 1])}
    if moment == "first step":
        return {**itself, "step": 1, "micro": 0}
    if moment == "between micro-batches":
        return {**itself, "step": chance.randint(2, 9), "micro": 1}
    if moment == "evaluation":
        return {**itself, "mode": "eval", "step": 1, "micro": 1}
    return {}


def send_from_outside(ranks: Ranks, run_dir: Path, moment: str, chance: random.Random) -> None:
    if moment == "start-up":
        wait_while_starting(ranks, run_dir, chance.uniform(0.0, 8.0))
        ranks.signal(signal.SIGTERM)
    elif moment == "checkpoint":
        begin = last_logged(run_dir / "metrics.jsonl")
        ranks.until(lambda: last_logged(run_dir / "metrics.jsonl") > begin)
        ranks.until(lambda: is_saving(run_dir), poll_sec=0.0002)
        ranks.signal(signal.SIGTERM, chance.choice([None, [1]]))


def check_stopped(run_dir: Path) -> None:
    """The state is `stopped`, and everything is there up to the last finished step."""
    ended = status(run_dir)
    assert ended["state"] == "stopped"
    assert ended["reason"] in ("stopped by SIGTERM", "stopped by a signal on another rank")
    last = ended["last_step"]
    if last > 0:
        assert (run_dir / "checkpoints" / f"step_{last:08d}" / "COMPLETE").exists()
    record = run_dir / "metrics.jsonl"
    if record.exists():
        assert sorted(losses(record)) == list(range(1, last + 1))
        assert not list(validate_stream(record.read_bytes().splitlines()))


@pytest.mark.parametrize("number", range(ROUNDS))
def test_a_run_stopped_five_times_ends_as_the_one_nobody_stopped(untouched, tmp_path, number):
    config, whole = untouched
    run_dir = tmp_path / "run"
    arguments = ("--config", config, "--run-dir", run_dir, "--resume", "auto", *ARGUMENTS)
    arguments += ("--set", "distributed.timeout_sec=30")
    chance = random.Random(f"stop {number}")
    for count, moment in enumerate(chance.sample(MOMENTS, len(MOMENTS))):
        seen = status(run_dir) if (run_dir / "status.json").exists() else None
        fault, is_fresh = fault_of(moment, chance), moment == "start-up"
        with Ranks(arguments, logs=tmp_path / f"try{count}", fault=fault, is_fresh=is_fresh) as ranks:
            send_from_outside(ranks, run_dir, moment, chance)
            codes = ranks.wait(GRACE_SEC + 30 if moment in ("start-up", "checkpoint") else PATIENCE_SEC)
            said = ranks.said()
        if moment == "start-up" and 0 not in codes:
            # Ranks that were still starting have touched nothing.
            assert seen == (status(run_dir) if (run_dir / "status.json").exists() else None)
            continue
        is_kept = any((run_dir / "checkpoints").glob("step_*/COMPLETE"))  # else a script must see that nothing was done
        assert codes == ([0, 0] if is_kept else [1, 1]), (moment, said)
        check_stopped(run_dir)
    end_with(0, arguments, tmp_path / "last")
    assert_same(whole, run_dir, STEPS)
    keep(3, f"SIGTERM, round {number + 1}: {', '.join(MOMENTS)}", times=len(MOMENTS))


def test_a_second_signal_ends_a_run_that_cannot_reach_a_boundary(tmp_path):
    run_dir = tmp_path / "run"
    fault = {"what": "sleep", "rank": 0, "step": 6}
    arguments = ("--config", make_config(tmp_path), "--run-dir", run_dir, *ARGUMENTS)
    with Ranks(arguments, logs=tmp_path / "logs", fault=fault) as ranks:
        ranks.until(lambda: last_logged(run_dir / "metrics.jsonl") >= 5)
        ranks.signal(signal.SIGTERM)
        time.sleep(SAME_REQUEST_SEC + 1)
        assert ranks.processes[0].poll() is None
        ranks.signal(signal.SIGTERM)
        codes = ranks.wait(GRACE_SEC)
    assert codes[0] == 128 + signal.SIGTERM
    assert 0 not in codes
    assert (status(run_dir)["state"], status(run_dir)["reason"]) == ("failed", "SIGTERM came again: ended at once")
    keep(3, "a second SIGTERM to a run that hangs in a step", lost=LOST)


CONFIG = "\n[checkpoint]\nevery = 1\nkeep_last = 50\n"


def run_with(tmp_path, fault, *more):
    run_dir = tmp_path / "run"
    arguments = ("--config", make_config(tmp_path, CONFIG), "--run-dir", run_dir, *ARGUMENTS, "--steps", 12, *more)
    with Ranks(arguments, logs=tmp_path / "logs", world_size=3, fault=fault) as ranks:
        return run_dir, ranks.wait(), ranks.said()


@pytest.mark.parametrize(("what", "rank", "micro"), [("nan", 1, 0), ("inf_gradient", 2, 1)])
def test_all_ranks_stop_at_the_step(tmp_path, what, rank, micro):
    fault = {"what": what, "rank": rank, "step": 5, "micro": micro}
    run_dir, codes, said = run_with(tmp_path, fault)
    assert codes == [1, 1, 1], said
    ended = status(run_dir)
    assert (ended["state"], ended["last_step"]) == ("failed", 5)
    assert ended["reason"].startswith("step 5: loss")
    assert max(step for mode, step in read_rows(run_dir / "metrics.jsonl") if mode == "train") == 5
    # Nothing after the last good step is kept.
    assert not (run_dir / "checkpoints" / "step_00000005").exists()
    assert (run_dir / "checkpoints" / "step_00000004" / "COMPLETE").exists()
    (event,) = [e for e in map(json.loads, (run_dir / "events.jsonl").open()) if e["event"] == "non_finite"]
    assert [len(batches) for batches in event["batches"]] == [2, 2, 2]
    keep(4, f"{'NaN in the loss' if what == 'nan' else 'inf in a gradient'} on one rank of three, `stop`")


def test_a_loss_spike_is_written_down_with_its_batches(tmp_path):
    fault = {"what": "spike", "rank": 1, "step": 40, "micro": 1}
    run_dir, codes, said = run_with(tmp_path, fault, "--steps", 45, "--set", "train.spike_sigma=6")
    assert codes == [0, 0, 0], said
    (event,) = [e for e in map(json.loads, (run_dir / "events.jsonl").open()) if e["event"] == "loss_spike"]
    assert event["global_step"] == 40
    assert event["loss"] > event["mean"] + 6 * event["sigma"]
    metas = list(map(json.loads, event["batches"]))
    assert len(metas) == 2
    assert all({"stream", "position", "group_ids"} <= meta.keys() for meta in metas)
    assert event["see"] == f"train data at {run_dir} 40"
    keep(4, "a loss spike on one rank of three")
