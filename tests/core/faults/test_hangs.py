"""A rank that never comes back, and data that never come: the run ends in time, or at a signal, and says why."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from tests.support.fault_runs import ARGUMENTS, LOST, end_with, keep, make_config
from tests.support.ranks import Ranks, last_logged, status
from tests.support.runs import overrides
from tests.support.stalling_data import stalling_arguments

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1500)]
TIMEOUT_SEC = 12
# What comes after the timeout is the exit of processes on a busy machine.
PATIENCE_SEC = TIMEOUT_SEC + 60


@pytest.mark.parametrize(("what", "rank"), [("sleep", 0), ("stop", 1)])
def test_a_rank_that_hangs_is_named_and_the_run_ends(tmp_path, what, rank):
    run_dir = tmp_path / "run"
    arguments = ("--config", make_config(tmp_path), "--run-dir", run_dir, *ARGUMENTS)
    arguments += ("--set", f"distributed.timeout_sec={TIMEOUT_SEC}")
    fault = {"what": what, "rank": rank, "step": 8, "micro": 1}
    with Ranks(arguments, logs=tmp_path / "logs", world_size=3, fault=fault) as ranks:
        ranks.until(lambda: last_logged(run_dir / "metrics.jsonl") >= 7)
        began = time.monotonic()
        stopped = [rank] if what == "stop" else []
        for other in {0, 1, 2} - set(stopped):
            ranks.processes[other].wait(PATIENCE_SEC)
        took = time.monotonic() - began
        ranks.signal(signal.SIGKILL, stopped)
        codes, said = ranks.wait(), ranks.said()
    assert all(code not in (0, -signal.SIGKILL) for r, code in enumerate(codes) if r not in stopped), codes
    assert took >= TIMEOUT_SEC / 2
    ended = status(run_dir)
    assert ended["state"] == "failed"
    place = r"step \d: .+" if stopped else "step 8: forward and backward"  # one that is stopped was last heard before
    where = f"rank {rank} is missing: {place}, for"
    assert re.search(where, ended["reason"]), (ended, said)
    for each in {0, 1, 2} - set(stopped):
        log = (run_dir / "logs" / f"rank_{each:03d}.log").read_text()
        assert f"rank {rank} is missing" in log
        assert "in accumulate" in log.split(f"stacks of rank {each}:")[1]
        assert ("faulty_model.py" in log.split("stacks of rank")[1]) == (each == rank)
    does = "sleeps for ever" if what == "sleep" else "is stopped (SIGSTOP)"
    keep(5, f"rank {rank} of 3 {does} inside a step", lost=LOST)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_rank_that_goes_on_slowly_is_not_missing(tmp_path, mode):
    """The others wait for it longer than the timeout."""
    arguments = ("--config", make_config(tmp_path), "--run-dir", tmp_path / "run", *ARGUMENTS, "--steps", 2)
    sets = ("distributed.timeout_sec=5", "train.micro_batches=8", "eval.every=2", "eval.batches=8")
    fault = {"what": "slow", "seconds": 0.8, "mode": mode, "rank": 1, "step": 1, "steps": 1000}
    extra = {"FAULT_MICRO_BATCHES": "1"}
    end_with(0, (*arguments, *overrides(*sets)), tmp_path / "logs", fault=fault, extra=extra)
    keep(5, f"a rank of two that is slow in {mode}, for longer than the timeout")


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_that_wait_for_data_end_in_time_and_say_what_they_were_reading(tmp_path, world_size):
    os.mkfifo(tmp_path / "fifo")
    run_dir = tmp_path / "run"
    arguments = stalling_arguments(tmp_path, run_dir, after=8, how="fifo", prefetch=2, timeout_sec=TIMEOUT_SEC)
    with Ranks(arguments, logs=tmp_path / "logs", world_size=world_size) as ranks:
        codes, said = ranks.wait(PATIENCE_SEC), ranks.said()
    ended = status(run_dir)
    where = f"{'one rank that waits' if world_size == 1 else 'two ranks that wait'} for data that never come"
    assert all(code > 0 for code in codes), (codes, said)
    assert ended["state"] == "failed"
    stuck = "rank 0 makes no progress: step 5: data, reading micro-batch 9 from source own, for"
    assert stuck in ended["reason"]
    assert "stalling_data.py" in (run_dir / "logs" / "rank_000.log").read_text().split("stacks of rank 0:")[1]
    keep(5, where, lost=LOST)


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
    keep(5, "SIGSTOP of a single rank for twice the timeout, then SIGCONT")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_eight_ranks_end_in_peace_twenty_times_in_a_row(tmp_path, strategy):
    config, times = make_config(tmp_path, ""), 20
    for number in range(times):
        arguments = ("--config", config, "--run-dir", tmp_path / f"run{number}", *ARGUMENTS, "--steps", 2)
        arguments += ("--set", f'distributed.strategy="{strategy}"')
        end_with(0, arguments, tmp_path / f"logs{number}", world_size=8)
    shards = "" if strategy == "ddp" else " with shards (fsdp)"
    keep(5, f"teardown of 8 gloo ranks in a row{shards}", times=times)
