"""The real thing: torchrun, two processes, text; killed, resumed, and as if nothing had happened."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import weights
from tests.support.ranks import Ranks, last_logged
from tests.support.runs import TIMEOUT_SEC, command, environment, losses, read_rows, run, write_tiny_config
from trainer.metrics.payload_contract import validate_stream

pytestmark = pytest.mark.distributed

RUN = """
[eval]
every = 10
batches = 3
holdout_fraction = 0.2

[checkpoint]
every = 10
"""
ARGUMENTS = ("--steps", "30", "--set", "gns.ema=0.9", "--set", "metrics.per_layer=true")


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def same_numbers(one: Path, other: Path) -> None:
    """Every number that is not a time is the same."""
    measured = ("time/", "smoothed/tokens", "smoothed/step", "step_time", "tokens_per_sec", "checkpoint/")
    first, second = read_rows(one), read_rows(other)
    assert first.keys() == second.keys()
    for key, row in first.items():
        for name, value in row.items():
            if not name.startswith(measured):
                assert second[key][name] == value, (key, name)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    config = write_tiny_config(directory, RUN)
    result = run("--config", config, "--run-dir", directory / "run", *ARGUMENTS, nproc=2)
    assert result.returncode == 0, result.stderr
    return config, directory / "run"


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_a_stopped_run_resumes_as_if_it_had_never_stopped(uninterrupted, tmp_path, sign):
    config, whole = uninterrupted
    metrics = tmp_path / "run" / "metrics.jsonl"
    line = ["--config", config, "--run-dir", tmp_path / "run", *ARGUMENTS]
    with Ranks(line, logs=tmp_path / "logs") as ranks:
        assert ranks.until(lambda: last_logged(metrics) >= 14), ranks.said()
        ranks.signal(sign)
        ranks.wait()
        stderr = ranks.said()
    assert last_logged(metrics) < 30, "it ended before the signal came"
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    if sign == signal.SIGTERM:
        assert status["state"] == "stopped", stderr
        assert status["reason"] == "stopped by SIGTERM"
        assert (tmp_path / "run" / "checkpoints" / f"step_{status['last_step']:08d}" / "COMPLETE").exists()
    resumed = run("--config", config, "--run-dir", tmp_path / "run", "--resume", "auto", *ARGUMENTS, nproc=2)
    assert resumed.returncode == 0, resumed.stderr
    assert "the learning rate jumps" not in resumed.stderr
    assert losses(tmp_path / "run" / "metrics.jsonl") == losses(whole / "metrics.jsonl")
    same_numbers(whole / "metrics.jsonl", tmp_path / "run" / "metrics.jsonl")
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(tmp_path / "run")[name]), name
    assert not list(validate_stream((tmp_path / "run" / "metrics.jsonl").read_bytes().splitlines()))


def test_a_run_goes_on_with_another_number_of_ranks(uninterrupted, tmp_path):
    config, whole = uninterrupted
    checkpoint = whole / "checkpoints" / "latest"
    steps = ("--steps", "34", "--run-dir", str(tmp_path / "run"))
    result = run("--config", config, "--resume", checkpoint, *steps)
    assert result.returncode == 0, result.stderr
    assert "resuming with another config: train.steps: 30 -> 34" in result.stderr
    then, now = map(
        float, re.search(r"jumps: at step 30 it was (\S+), by this config it is (\S+) ", result.stderr).groups()
    )
    assert then == pytest.approx(read_rows(whole / "metrics.jsonl")["train", 30]["lr"], rel=1e-2)
    assert now > then, "a cosine of 34 steps is not at its end yet"
    assert sorted(losses(tmp_path / "run" / "metrics.jsonl")) == [31, 32, 33, 34]


def test_a_run_on_fewer_ranks_is_told_the_capacity_that_it_needs(uninterrupted, tmp_path):
    """Of a checkpoint of two ranks, one rank keeps all groups, beside those that it has in flight itself."""
    config, whole = uninterrupted

    def resume(capacity):
        run_dir = tmp_path / str(capacity)
        more = ("--set", f"ledger.capacity={capacity}", "--set", "data.mixing.repeat=false")
        arguments = ("--resume", whole / "checkpoints" / "latest", "--steps", "500", "--run-dir", run_dir, *more)
        return run_dir / "metrics.jsonl", run("--config", config, *arguments)

    _, tight = resume(16)  # what a rank has in flight, the least that a config may say
    needed = int(re.search(r"ledger.capacity: .*16.*; set it to at least (\d+)", tight.stderr)[1])
    assert 16 < needed <= 48
    metrics, enough = resume(needed)
    assert enough.returncode == 0, enough.stderr
    assert "may be evicted" not in enough.stderr
    rows = read_rows(metrics)
    assert sum(row["ledger/cold_starts"] for (mode, _), row in rows.items() if mode == "train") == 0


def test_a_damaged_checkpoint_is_passed_over_by_auto_and_refused_by_path(uninterrupted, tmp_path):
    config, _ = uninterrupted
    run_dir = tmp_path / "run"
    assert run("--config", config, "--run-dir", run_dir, "--steps", "20").returncode == 0
    damaged = run_dir / "checkpoints" / "step_00000020" / "model_000.safetensors"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    by_path = run("--config", config, "--resume", damaged.parent, "--steps", "22")
    assert by_path.returncode == 2
    assert f"{damaged}: is damaged" in by_path.stderr
    auto = run("--config", config, "--run-dir", run_dir, "--resume", "auto", "--steps", "20")
    assert auto.returncode == 0, auto.stderr
    assert "falling back to the checkpoint before it" in auto.stderr
    assert "resuming after step 10" in auto.stderr


def test_a_changed_model_is_refused(uninterrupted, tmp_path):
    config, whole = uninterrupted
    result = run("--config", config, "--resume", whole / "checkpoints" / "latest", "--set", "model.dim=32")
    assert result.returncode == 2
    assert "model.dim: 16 -> 32" in result.stderr


@pytest.mark.slow
def test_elastic_restart_comes_back_by_itself(uninterrupted, tmp_path):
    """One rank dies; torchrun restarts both, and they go on from the newest checkpoint without being told."""
    config, whole = uninterrupted
    run_dir = tmp_path / "run"
    line = command(["--config", config, "--run-dir", run_dir, *ARGUMENTS], nproc=2)
    line.insert(line.index("--standalone"), "--max-restarts=2")
    process = subprocess.Popen(line, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + TIMEOUT_SEC
    while last_logged(run_dir / "metrics.jsonl") < 13:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (victim,) = [pid for pid in children(process.pid) if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()]
    os.kill(victim, signal.SIGKILL)
    stdout, stderr = process.communicate(timeout=TIMEOUT_SEC)
    assert process.returncode == 0, stderr
    assert "torchrun restarted the ranks (restart 1): resuming from the newest checkpoint" in stderr
    assert losses(run_dir / "metrics.jsonl") == losses(whole / "metrics.jsonl")
    assert not list(validate_stream(stdout.splitlines()))


def test_a_run_that_died_before_its_first_checkpoint_starts_again_in_its_directory(uninterrupted, tmp_path):
    config, whole = uninterrupted
    run_dir = tmp_path / "run"
    line = ["--config", config, "--run-dir", run_dir, *ARGUMENTS]
    with Ranks(line, logs=tmp_path / "logs") as ranks:
        assert ranks.until(lambda: last_logged(run_dir / "metrics.jsonl") >= 4), ranks.said()
        ranks.signal(signal.SIGKILL)
        ranks.wait()
    assert not (run_dir / "checkpoints" / "latest").exists()
    again = run("--config", config, "--run-dir", run_dir, "--resume", "auto", *ARGUMENTS, nproc=2)
    assert again.returncode == 0, again.stderr
    assert losses(run_dir / "metrics.jsonl") == losses(whole / "metrics.jsonl")
    assert not list(validate_stream((run_dir / "metrics.jsonl").read_bytes().splitlines()))
