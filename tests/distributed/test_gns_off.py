"""A real run with the noise scale and one without it train the same weights, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import weights as weights_of
from tests.support.runs import losses, run, write_tiny_config

STEPS = 10


@pytest.mark.distributed
def test_ten_steps_give_bitwise_the_same_weights_with_and_without(tmp_path: Path) -> None:
    config = write_tiny_config(tmp_path)
    weights, curves = [], []
    for is_enabled in ("true", "false"):
        folder = tmp_path / f"run-{is_enabled}"
        arguments = ("--config", config, "--run-dir", folder, "--steps", STEPS, "--set", f"gns.enabled={is_enabled}")
        result = run(*arguments, nproc=2)
        assert result.returncode == 0, result.stderr
        weights.append(weights_of(folder))
        curves.append(losses(folder / "metrics.jsonl"))
    assert curves[0] == curves[1]
    assert len(curves[0]) == STEPS
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
