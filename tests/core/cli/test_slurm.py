"""The SLURM script against stand-ins for srun and scontrol: it trains, and a warning of the time limit requeues it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.runs import ROOT, TIMEOUT_SEC, environment, write_tiny_config

pytestmark = pytest.mark.distributed
SCONTROL = '#!/bin/bash\nif [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> "$CALLS"; fi\n'
# As srun does, it leaves its own options out and hands signals on to the task.
SRUN = '#!/bin/bash\nwhile [[ "$1" == --* ]]; do shift; done\nexec "$@"\n'


@pytest.fixture
def job(tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    config = write_tiny_config(tmp_path, "\n[checkpoint]\nevery = 500\n")
    slurm = {"SLURM_JOB_NODELIST": "n[1]", "SLURM_JOB_ID": "4242", "SLURM_JOB_NUM_NODES": "1", "RANKS_PER_NODE": "2"}
    slurm |= {"SLURMD_NODENAME": "127.0.0.1", "CHECK_NODE": str(ROOT / "scripts/slurm/check_node.py")}
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    env = environment({**slurm, "PATH": path, "CALLS": str(tmp_path / "calls"), "RUN_DIR": str(tmp_path / "run")})

    def start(*arguments: str, **more: str) -> subprocess.Popen[str]:
        line = [shutil.which("bash") or "bash", str(ROOT / "scripts/slurm/train.sbatch"), "--config", str(config)]
        return subprocess.Popen(
            [*line, *arguments], env=env | more, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    return start


@pytest.mark.slow
def test_it_trains_and_goes_on_after_a_requeue(job, tmp_path):
    process = job("--steps", "100000")
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + TIMEOUT_SEC
    while not (metrics.exists() and metrics.read_text().count("\n") > 5):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    _, stderr = process.communicate(timeout=TIMEOUT_SEC)
    assert process.returncode == 0, stderr
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["reason"]) == ("stopped", "stopped by SIGUSR1")
    assert (tmp_path / "calls").read_text().split() == ["requeue", "4242"]
    again = job("--steps", str(status["last_step"] + 3))
    _, stderr = again.communicate(timeout=TIMEOUT_SEC)
    assert again.returncode == 0, stderr
    assert f"resuming after step {status['last_step']}" in stderr
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "done"


def test_a_node_whose_check_fails_is_named_and_not_trained_on(job):
    process = job("--steps", "1", SLURM_GPUS_ON_NODE="999")
    _, stderr = process.communicate(timeout=TIMEOUT_SEC)
    assert process.returncode == 1
    assert "of 999 devices are there" in stderr  # in a cluster in the node's output
    assert "submit again with --exclude=127.0.0.1" in stderr
