"""A run on the device reports what it does on the CPU: all metrics but times, in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.on_device import differences, train_here
from tests.support.runs import FULL_ROWS

pytestmark = pytest.mark.cuda
SETS = ("train.steps=6", "checkpoint.every=0", "eval.every=3", "eval.holdout_fraction=0.2", "eval.depth=true")
RUNS = {
    "layers": ("metrics.per_layer=true",),
    "head in chunks": ("objective.chunk_tokens=16",),
    "full rows": (FULL_ROWS,),
    "delta rule": ('model.family="gated_delta"',),
}


@pytest.mark.parametrize("kind", RUNS)
def test_metrics_are_those_of_the_cpu(tmp_path: Path, chosen_device: torch.device, kind: str) -> None:
    places = {"cpu": torch.device("cpu"), "device": chosen_device}
    one, other = (train_here(tmp_path / name, place, *SETS, *RUNS[kind]) for name, place in places.items())
    assert differences(one, other, 1e-3) == {}
