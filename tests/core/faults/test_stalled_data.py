"""All ranks wait for data that never come: the run ends by itself, or at one signal, and says what it was reading."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.support.fault_runs import LOST, keep
from tests.support.ranks import Ranks, last_logged, status
from tests.support.stalling_data import stalling_arguments

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]
TIMEOUT_SEC = 10
# What comes after the timeout is the exit of processes on a busy machine.
PATIENCE_SEC = TIMEOUT_SEC + 60


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(("world_size", "how"), [(1, "sleep"), (1, "fifo"), (2, "sleep"), (2, "fifo")])
def test_a_run_whose_ranks_all_wait_for_data_ends_and_says_what_it_was_reading(tmp_path, world_size, how, prefetch):
    os.mkfifo(tmp_path / "fifo")
    run_dir = tmp_path / "run"
    arguments = stalling_arguments(tmp_path, run_dir, after=8, how=how, prefetch=prefetch, timeout_sec=TIMEOUT_SEC)
    with Ranks(arguments, logs=tmp_path / "logs", world_size=world_size) as ranks:
        ranks.until(lambda: last_logged(run_dir / "metrics.jsonl") >= 4)
        codes = ranks.wait(PATIENCE_SEC)
        said = ranks.said()
    assert all(code > 0 for code in codes), (codes, said)
    ended = status(run_dir)
    assert ended["state"] == "failed"
    assert "rank 0 makes no progress: step 5: data, reading micro-batch 9 from source own, for" in ended["reason"]
    assert ended["reason"] in said
    for rank in range(world_size):
        log = (run_dir / "logs" / f"rank_{rank:03d}.log").read_text()
        assert "stalling_data.py" in log.split(f"stacks of rank {rank}:")[1]
    who, where = (
        "the only rank waits" if world_size == 1 else "all ranks wait",
        "the loader's thread" if prefetch else "the step",
    )
    keep(5, f"{who} in {where} for data that never come ({how})", lost=LOST)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_one_signal_ends_a_run_that_waits_for_data(tmp_path, world_size, prefetch):
    os.mkfifo(tmp_path / "fifo")
    run_dir = tmp_path / "run"
    arguments = stalling_arguments(tmp_path, run_dir, after=8, how="fifo", prefetch=prefetch, timeout_sec=600)
    with Ranks(arguments, logs=tmp_path / "logs", world_size=world_size) as ranks:
        ranks.until(lambda: last_logged(run_dir / "metrics.jsonl") >= 4)
        ranks.signal(signal.SIGTERM)
        codes = ranks.wait(60)
        said = ranks.said()
    ended = status(run_dir)
    if world_size == 1:
        assert codes == [0], said
        assert (ended["state"], ended["last_step"]) == ("stopped", 4)
        assert (run_dir / "checkpoints" / "step_00000004" / "COMPLETE").exists()
    else:
        assert all(code > 0 for code in codes), said
        assert ended["state"] == "failed"
        assert "asked to stop, but rank 0 makes no progress: step 5: data" in ended["reason"]
    lost = "0" if world_size == 1 else "steps since the last checkpoint"
    what = f"one SIGTERM to {world_size} rank(s) that wait for data for ever, prefetch = {prefetch}"
    keep(3, what, lost=lost)


@pytest.mark.parametrize(("how", "seconds", "ranks_that_do"), [("work", 20, [1]), ("sleep", 6, [0, 1])])
def test_a_long_step_is_finished_and_saved_after_a_signal(tmp_path, how, seconds, ranks_that_do):
    """Longer than the grace period if the rank works, while the other waits for it; shorter if all wait."""
    run_dir = tmp_path / "run"
    stall = {"after": 8, "how": how, "seconds": seconds, "ranks": ranks_that_do}
    arguments = stalling_arguments(tmp_path, run_dir, prefetch=0, timeout_sec=600, **stall)
    with Ranks(arguments, logs=tmp_path / "logs", world_size=2) as ranks:
        ranks.until(lambda: last_logged(run_dir / "metrics.jsonl") >= 4)
        ranks.signal(signal.SIGTERM)
        codes, said = ranks.wait(180), ranks.said()
    assert codes == [0, 0], said
    ended = status(run_dir)
    assert ended["state"] == "stopped"
    assert (run_dir / "checkpoints" / f"step_{ended['last_step']:08d}" / "COMPLETE").exists()
    what = f"SIGTERM while {len(ranks_that_do)} of 2 ranks {how}s for {seconds} s in a step"
    keep(3, what)


def test_a_run_that_is_suspended_for_longer_than_the_timeout_goes_on(tmp_path):
    run_dir, timeout_sec = tmp_path / "run", 5
    stall = {"after": 8, "how": "sleep", "seconds": 3}
    arguments = stalling_arguments(tmp_path, run_dir, prefetch=0, timeout_sec=timeout_sec, **stall)
    with Ranks(arguments, logs=tmp_path / "logs", world_size=1) as ranks:
        ranks.until(lambda: last_logged(run_dir / "metrics.jsonl") >= 4)
        ranks.signal(signal.SIGSTOP)
        time.sleep(2 * timeout_sec)  # the fault
        ranks.signal(signal.SIGCONT)
        assert ranks.wait(120) == [0], ranks.said()
    assert status(run_dir)["state"] == "done"
    what = "SIGSTOP of a single rank for twice the timeout, then SIGCONT"
    keep(5, what)
