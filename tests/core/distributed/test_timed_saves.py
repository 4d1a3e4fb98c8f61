"""Runs that go on from a checkpoint saved by time, or decay from one, equal the runs that were not interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import weights
from tests.support.grouped import train
from tests.support.ranks import checkpoint_differences
from tests.support.runs import losses, write_tiny_config

pytestmark = pytest.mark.distributed

STEPS = 12
SETS = ("distributed.strategy=fsdp", "checkpoint.background=true", f"train.steps={STEPS}", "metrics.log_interval=5")
ALWAYS = ("checkpoint.every_minutes=1e-9", "checkpoint.keep_last=100")


def trained(config: Path, run_dir: Path, *sets: str, more: tuple[object, ...] = ()) -> list[int]:
    """The steps of its checkpoints."""
    train(config, run_dir, *SETS, *sets, nproc=2, more=more)
    return sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step_*"))


def test_a_save_by_time_changes_no_number_and_resumes_bit_for_bit(tmp_path):
    config = write_tiny_config(tmp_path)
    plain, timed, resumed = (tmp_path / name for name in ("plain", "timed", "resumed"))
    assert trained(config, plain) == [STEPS], "30 minutes have not passed"
    # The vote on a step is read when the next is launched, which is then saved; a logged step (1, 5, 10) is read at once.
    assert trained(config, timed, *ALWAYS) == [2, 4, 6, 8, 10, 12]
    middle = timed / "checkpoints" / "step_00000006"
    assert trained(config, resumed, more=("--resume", middle))[-1] == STEPS
    whole = losses(plain / "metrics.jsonl")
    assert losses(timed / "metrics.jsonl") == whole
    assert losses(resumed / "metrics.jsonl") == {step: loss for step, loss in whole.items() if step > 6}
    for name, tensor in weights(plain).items():
        assert torch.equal(tensor, weights(timed)[name]), name
        assert torch.equal(tensor, weights(resumed)[name]), name


def start(tmp_path, name, *sets, steps, more=()):
    config = write_tiny_config(tmp_path, "\n[checkpoint]\nevery = 4\nkeep_last = 10\n")
    train(config, tmp_path / name, f"train.steps={steps}", *sets, nproc=2, more=more)
    return tmp_path / name


def test_the_branch_equals_the_run_that_decayed(tmp_path):
    wsd = ('scheduler.name="wsd"', "scheduler.decay_fraction=0.34")  # of 12 steps, the last 5; of 40, the last 14
    whole = start(tmp_path, "whole", *wsd, steps=12)
    # The trunk is in its stable phase, long before a decay of its own.
    trunk = start(tmp_path, "trunk", *wsd, steps=40)
    middle = trunk / "checkpoints" / "step_00000004"
    branch = start(tmp_path, "branch", *wsd, steps=12, more=("--resume", middle))
    assert not checkpoint_differences(whole / "checkpoints" / "latest", branch / "checkpoints" / "latest")
    expected = losses(whole / "metrics.jsonl")
    assert losses(branch / "metrics.jsonl") == {step: loss for step, loss in expected.items() if step > 4}
    assert losses(trunk / "metrics.jsonl")[12] != expected[12]
