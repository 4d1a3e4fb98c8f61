"""The real thing: torchrun, two processes, text; killed, resumed, and as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import model_content, weights
from tests.support.fault_runs import row_differences
from tests.support.in_process import train_here
from tests.support.ranks import Ranks, checkpoint_differences, children, last_logged
from tests.support.runs import (
    TIMEOUT_SEC,
    command,
    environment,
    evaluating,
    losses,
    overrides,
    read_rows,
    train,
    write_tiny_config,
)
from trainer.metrics.payload_contract import validate_stream

pytestmark = pytest.mark.distributed

RUN = evaluating(10, batches=3, saves=10)
SETS = ("train.steps=30", "metrics.per_layer=true")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    config = write_tiny_config(directory, RUN)
    train(config, directory / "run", *SETS, nproc=2)
    return config, directory / "run"


def stop(config: Path, run_dir: Path, sign: int, *, after: int) -> str:
    """Send both ranks a signal once a step is logged; what they said."""
    line = ("--config", config, "--run-dir", run_dir, *overrides(*SETS))
    with Ranks(line, logs=run_dir.with_suffix(".logs")) as ranks:
        assert ranks.until(lambda: last_logged(run_dir / "metrics.jsonl") >= after), ranks.said()
        ranks.signal(sign)
        ranks.wait()
        said = ranks.said()
    assert last_logged(run_dir / "metrics.jsonl") < 30, "it ended before the signal came"
    return said


def test_a_killed_run_resumes_as_if_it_had_never_stopped(uninterrupted, tmp_path):
    config, whole = uninterrupted
    run_dir = tmp_path / "run"
    stop(config, run_dir, signal.SIGKILL, after=14)
    train(config, run_dir, *SETS, nproc=2, more=("--resume", "auto"))
    assert row_differences(whole, run_dir) == []
    assert checkpoint_differences(whole / "checkpoints" / "latest", run_dir / "checkpoints" / "latest") == []
    assert not list(validate_stream((run_dir / "metrics.jsonl").read_bytes().splitlines()))
    for path in (whole / "evaluations").iterdir():
        assert (run_dir / "evaluations" / path.name).read_bytes() == path.read_bytes()


def test_a_run_on_fewer_ranks_has_the_states_of_all(uninterrupted, tmp_path):
    """Of a checkpoint of two ranks, one rank keeps all groups, beside those that it has in flight itself."""
    config, whole = uninterrupted
    sets = (*SETS, "ledger.capacity=48", "data.mixing.repeat=false", "train.steps=500")
    train(config, tmp_path / "run", *sets, more=("--resume", whole / "checkpoints" / "latest"))
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert sum(row["ledger/cold_starts"] for (mode, _), row in rows.items() if mode == "train") == 0


@pytest.mark.slow
def test_elastic_restart_comes_back_by_itself(uninterrupted, tmp_path):
    """One rank dies; torchrun restarts both, and they go on from the newest checkpoint without being told."""
    config, whole = uninterrupted
    run_dir = tmp_path / "run"
    line = command(["--config", config, "--run-dir", run_dir, *overrides(*SETS)], nproc=2)
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


TIMED_STEPS = 12
TIMED = (
    "distributed.strategy=fsdp",
    f"train.steps={TIMED_STEPS}",
    "metrics.log_interval=5",
    "eval.holdout_fraction=0.2",
    "eval.batches=2",
)
ALWAYS = ("checkpoint.every_minutes=1e-9", "checkpoint.keep_last=100")
AVERAGED = ("train.ema=0.75", "eval.every=5")  # evaluated after logged steps


def trained(config: Path, run_dir: Path, *sets: str, more: tuple[object, ...] = ()) -> list[int]:
    """The steps of its checkpoints."""
    train(config, run_dir, *TIMED, *sets, nproc=2, more=more)
    return sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step_*"))


def test_a_save_by_time_changes_no_number_and_resumes_bit_for_bit(tmp_path):
    config = write_tiny_config(tmp_path)
    plain, timed, resumed = (tmp_path / name for name in ("plain", "timed", "resumed"))
    assert trained(config, plain) == [TIMED_STEPS], "30 minutes have not passed"
    # The vote on a step is read when the next is launched, which is then saved; a logged step (1, 5, 10) is read at once.
    assert trained(config, timed, *ALWAYS, *AVERAGED) == [2, 4, 6, 8, 10, 12]
    middle = timed / "checkpoints" / "step_00000006"
    more = "checkpoint.every=1", "checkpoint.keep_last=100"
    assert trained(config, resumed, *more, *AVERAGED, more=("--resume", middle)) == [*range(7, 1 + TIMED_STEPS)]
    whole = losses(plain / "metrics.jsonl")
    assert losses(timed / "metrics.jsonl") == whole
    assert losses(resumed / "metrics.jsonl") == {step: loss for step, loss in whole.items() if step > 6}
    for name, tensor in weights(plain).items():
        assert torch.equal(tensor, weights(timed)[name]), name
        assert torch.equal(tensor, weights(resumed)[name]), name
    # Averages in shards, which evaluations swap with the weights, continue too, also on one rank.
    assert checkpoint_differences(timed / "checkpoints" / "latest", resumed / "checkpoints" / "latest") == []
    train_here(config, tmp_path / "one", *TIMED, *AVERAGED, "train.steps=7", f"checkpoint.resume={middle}")
    for run_dir, last in ((resumed, TIMED_STEPS), (tmp_path / "one", 7)):
        before = model_content(middle)["others"]
        for step in range(7, last + 1):
            found = model_content(run_dir / "checkpoints" / f"step_{step:08d}")
            for name, average in found["others"].items():
                weight = found["model"][name.removeprefix("ema.")]
                torch.testing.assert_close(average, 0.75 * before[name] + 0.25 * weight, rtol=1e-5, atol=1e-7)
            before = found["others"]
    assert before
