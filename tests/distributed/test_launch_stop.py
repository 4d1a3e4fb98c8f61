"""Signals to the launcher of `train --nproc`, and its death: the ranks stop with a checkpoint, and none is left behind."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.launched import Launched
from tests.support.ranks import status
from tests.support.runs import TIMEOUT_SEC, write_tiny_config

pytestmark = pytest.mark.distributed


@pytest.fixture
def launched(tmp_path):
    """A run on two ranks that has logged some steps and would go on for long."""
    with Launched(write_tiny_config(tmp_path), tmp_path / "run") as launched:
        launched.wait_for_step(3)
        yield launched


def check_stopped(run_dir, reason):
    ended = status(run_dir)
    assert (ended["state"], ended["reason"]) == ("stopped", reason)
    assert (run_dir / "checkpoints" / f"step_{ended['last_step']:08d}" / "COMPLETE").exists()


def test_control_c_under_nproc_stops_with_a_checkpoint_and_exit_code_0(launched, tmp_path):
    os.killpg(launched.process.pid, signal.SIGINT)  # as a terminal does, to the launcher and to every rank
    _, stderr = launched.process.communicate(timeout=TIMEOUT_SEC)
    assert launched.process.returncode == 0, stderr
    assert "torch" not in stderr, "the ranks and the launcher have said it in their own words"
    left = [path.name for path in launched.temporary.iterdir()]
    assert not [name for name in left if name.startswith(("torchelastic", "trainer"))], left
    check_stopped(tmp_path / "run", "stopped by SIGINT")


def test_ranks_whose_launcher_is_killed_save_and_end(launched, tmp_path):
    launched.process.kill()
    launched.process.wait()
    launched.wait_for_ranks()
    # Whichever rank notices it first.
    reason = status(tmp_path / "run")["reason"]
    assert reason in ("stopped by the end of its launcher", "stopped by a signal on another rank")
    check_stopped(tmp_path / "run", reason)
