"""What happens to a run whose directory is shared or launched twice, and whose terminal is closed."""

from __future__ import annotations

import os
import pty
import signal
import sys
from contextlib import suppress

import pytest

from tests.support.fault_runs import keep
from tests.support.grouped import run
from tests.support.ranks import Ranks, last_logged, status
from tests.support.runs import PROGRAM, environment, write_tiny_config

pytestmark = pytest.mark.distributed
STEPS = 100_000


def test_a_second_run_in_a_busy_directory_is_told_so_and_touches_nothing(tmp_path):
    config, run_dir = write_tiny_config(tmp_path, "[checkpoint]\nevery = 1\n"), tmp_path / "run"
    arguments = ("--config", config, "--run-dir", run_dir)
    with Ranks((*arguments, "--steps", STEPS), logs=tmp_path / "logs", world_size=1) as ranks:
        assert ranks.until(lambda: last_logged(run_dir / "metrics.jsonl") >= 3), ranks.said()
        second = run(*arguments, "--resume", "auto", "--steps", 3)
        assert second.returncode == 2
        assert "is in use by another run" in second.stderr
        assert "damaged" not in second.stderr
        assert "falling back" not in second.stderr
        ranks.signal(signal.SIGTERM)
        assert ranks.wait() == [0], ranks.said()
    assert not (run_dir / "checkpoints" / "abandoned").exists()
    keep(7, "a second run in a directory in use")


@pytest.mark.slow
def test_a_closed_terminal_stops_the_run_with_a_checkpoint(tmp_path):
    config, run_dir = write_tiny_config(tmp_path), tmp_path / "run"
    line = [sys.executable, str(PROGRAM), "--config", str(config), "--run-dir", str(run_dir), "--steps", str(STEPS)]
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the suite itself may run under nohup, which a run heeds
        os.execve(sys.executable, line, environment({"PYTHONPATH": str(PROGRAM.parent)}))
    try:
        os.set_blocking(terminal, False)
        while last_logged(run_dir / "metrics.jsonl") < 3:
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
            with suppress(BlockingIOError):
                os.read(terminal, 65536)
        os.close(terminal)
        _, code = os.waitpid(child, 0)
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    ended = status(run_dir)
    assert (ended["state"], ended["reason"]) == ("stopped", "stopped by SIGHUP")
    assert (run_dir / "checkpoints" / f"step_{ended['last_step']:08d}" / "COMPLETE").exists()
    assert os.waitstatus_to_exitcode(code) == 0
    keep(3, "SIGHUP: a terminal that is closed")
