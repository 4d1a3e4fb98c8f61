"""A decay branch: a run that decays from another run's checkpoint equals the run that decayed itself."""

from __future__ import annotations

import pytest

from tests.support.ranks import checkpoint_differences
from tests.support.runs import losses, train, write_tiny_config

pytestmark = pytest.mark.distributed


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
