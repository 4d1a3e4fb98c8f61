"""Ctrl-C under `train --nproc`: the run stops with a checkpoint, and so has ended well."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from tests.support.ranks import last_logged, status
from tests.support.runs import TIMEOUT_SEC, command, environment, write_tiny_config

pytestmark = pytest.mark.distributed


def test_control_c_under_nproc_stops_with_a_checkpoint_and_exit_code_0(tmp_path):
    run_dir = tmp_path / "run"
    config = write_tiny_config(tmp_path)
    line = command(["--nproc", 2, "--config", config, "--run-dir", run_dir, "--steps", 100_000, "--stdout", "off"])
    # A session of its own, as a terminal gives it: the signal goes to the launcher and to every rank.
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environ = environment({"TMPDIR": str(temporary)})
    process = subprocess.Popen(line, env=environ, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        while last_logged(run_dir / "metrics.jsonl") < 3:
            assert process.poll() is None, process.stderr.read()
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=TIMEOUT_SEC)
    finally:
        process.kill()
    assert process.returncode == 0, stderr
    assert "torch" not in stderr, "the ranks and the launcher have said it in their own words"
    left = [path.name for path in temporary.iterdir()]
    assert not [name for name in left if name.startswith(("torchelastic", "trainer"))], left
    ended = status(run_dir)
    assert (ended["state"], ended["reason"]) == ("stopped", "stopped by SIGINT")
    assert (run_dir / "checkpoints" / f"step_{ended['last_step']:08d}" / "COMPLETE").exists()
