"""A decay branch: a run that decays from another run's checkpoint equals the run that decayed itself."""

from __future__ import annotations

import pytest

from tests.support.ranks import checkpoint_differences
from tests.support.runs import losses, run, write_tiny_config

pytestmark = pytest.mark.distributed


def train(tmp_path, name, *sets, steps, more=()):
    config = write_tiny_config(tmp_path, "\n[checkpoint]\nevery = 4\nkeep_last = 10\n")
    options = [word for each in sets for word in ("--set", each)]
    done = run("--config", config, "--run-dir", tmp_path / name, "--steps", steps, *options, *more, nproc=2)
    assert done.returncode == 0, done.stderr
    return tmp_path / name


@pytest.mark.parametrize("stable", ['"wsd"', pytest.param('"constant"', marks=pytest.mark.slow)])
def test_the_branch_equals_the_run_that_decayed(tmp_path, stable):
    wsd = ('scheduler.name="wsd"', "scheduler.decay_fraction=0.34")  # of 12 steps, the last 5; of 40, the last 14
    whole = train(tmp_path, "whole", *wsd, steps=12)
    # The trunk is stopped in its stable phase, long before a decay of its own.
    train(tmp_path, "trunk", f"scheduler.name={stable}", "scheduler.decay_fraction=0.34", steps=40)
    start = tmp_path / "trunk" / "checkpoints" / "step_00000004"
    branch = train(tmp_path, "branch", *wsd, steps=12, more=("--resume", start))
    assert not checkpoint_differences(whole / "checkpoints" / "latest", branch / "checkpoints" / "latest")
    expected = losses(whole / "metrics.jsonl")
    found = losses(branch / "metrics.jsonl")
    assert found == {step: loss for step, loss in expected.items() if step > 4}
    trunk = losses(tmp_path / "trunk" / "metrics.jsonl")
    assert trunk[12] != expected[12]
