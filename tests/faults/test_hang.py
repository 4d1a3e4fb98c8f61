"""A rank that never comes back: the run ends within its timeout, names the rank, and leaves the stacks of all."""

from __future__ import annotations

import signal
import time

import pytest

from tests.support.fault_runs import ARGUMENTS, LOST, keep, make_config
from tests.support.ranks import Ranks, last_logged, status

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]
TIMEOUT_SEC = 12
# The watchdog speaks before the timeout; what comes after it is the exit of processes on a busy machine.
GRACE_SEC = 30


@pytest.mark.parametrize(("what", "rank"), [("sleep", 1), ("sleep", 0), ("stop", 1)])
def test_a_rank_that_hangs_is_named_and_the_run_ends(tmp_path, what, rank):
    run_dir = tmp_path / "run"
    arguments = (
        *("--config", make_config(tmp_path), "--run-dir", run_dir, *ARGUMENTS),
        *("--set", f"distributed.timeout_sec={TIMEOUT_SEC}"),
    )
    fault = {"what": what, "rank": rank, "step": 8, "micro": 1}
    with Ranks(arguments, logs=tmp_path / "logs", world_size=3, fault=fault) as ranks:
        ranks.until(lambda: last_logged(run_dir / "metrics.jsonl") >= 7)
        began = time.monotonic()
        stopped = [rank] if what == "stop" else []
        for other in {0, 1, 2} - set(stopped):
            ranks.processes[other].wait(TIMEOUT_SEC + GRACE_SEC)
        took = time.monotonic() - began
        ranks.signal(signal.SIGKILL, stopped)
        codes = ranks.wait()
        said = ranks.said()
    assert all(code not in (0, -signal.SIGKILL) for r, code in enumerate(codes) if r not in stopped), codes
    assert took >= TIMEOUT_SEC / 2
    where = "no heartbeat for" if what == "stop" else "step 8: forward and backward, for"
    ended = status(run_dir)
    assert ended["state"] == "failed"
    assert f"rank {rank} is missing: {where}" in ended["reason"], (ended, said)
    for each in {0, 1, 2} - set(stopped):
        log = (run_dir / "logs" / f"rank_{each:03d}.log").read_text()
        assert f"rank {rank} is missing" in log
        assert f"stacks of rank {each}:" in log
        assert "in accumulate" in log
        assert ("faulty_model.py" in log.split("stacks of rank")[1]) == (each == rank)
    keep(
        5,
        (
            f"rank {rank} of 3 "
            + ("sleeps for ever inside a step" if what == "sleep" else "is stopped (SIGSTOP) inside a step")
        ),
        lost=LOST,
    )


def test_a_rank_that_is_killed_is_named_by_the_others(tmp_path):
    run_dir = tmp_path / "run"
    arguments = ("--config", make_config(tmp_path), "--run-dir", run_dir, *ARGUMENTS, "--steps", 100_000)
    with Ranks(arguments, logs=tmp_path / "logs", world_size=3) as ranks:
        ranks.until(lambda: last_logged(run_dir / "metrics.jsonl") >= 3)
        ranks.signal(signal.SIGKILL, [2])
        codes = ranks.wait(120)
        said = ranks.said()
    assert codes[2] == -signal.SIGKILL
    assert 0 not in codes
    assert status(run_dir)["reason"].startswith("rank 2 is gone ("), said
    keep(5, "SIGKILL of one rank of three", lost=LOST)


def test_a_rank_that_raises_is_named_by_the_others(tmp_path):
    run_dir = tmp_path / "run"
    fault = {"what": "raise", "rank": 1, "step": 4}
    with Ranks(
        ("--config", make_config(tmp_path), "--run-dir", run_dir, *ARGUMENTS), logs=tmp_path / "logs", fault=fault
    ) as ranks:
        codes = ranks.wait()
        said = ranks.said()
    assert 0 not in codes
    assert status(run_dir)["reason"] == "rank 1 failed: ArithmeticError: made up", said
    keep(5, "an exception in one rank of two", lost=LOST)
