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
    arguments = ("--config", make_config(tmp_path), "--run-dir", run_dir, *ARGUMENTS)
    arguments += ("--set", f"distributed.timeout_sec={TIMEOUT_SEC}")
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
    does = "sleeps for ever" if what == "sleep" else "is stopped (SIGSTOP)"
    keep(5, f"rank {rank} of 3 {does} inside a step", lost=LOST)
