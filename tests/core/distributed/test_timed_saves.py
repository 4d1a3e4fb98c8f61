"""Runs that go on from a checkpoint saved by time, or decay from one, equal the runs that were not interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import weights
from tests.support.grouped import train
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
