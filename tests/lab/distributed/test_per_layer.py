"""Layers on several ranks, and in real runs of the program."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.gloo import run_on_ranks
from tests.support.grouped import train
from tests.support.runs import read_rows, write_tiny_config
from trainer.distributed.strategy import Strategy
from trainer.lab import extensions

pytestmark = pytest.mark.distributed


def moved_by_rank(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    """Squared norms of a change that differs by place, seen in a sample of a tensor in shards of unequal size."""
    extensions.MOST_PER_TENSOR = 500
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(2)
    weight, change = torch.randn(301, 30), torch.randn(301, 30) * torch.linspace(0.1, 3.0, 301)[:, None]
    results = []
    for shard in (False, True):
        model = nn.ParameterDict({"weight": distribute_tensor(weight, mesh, [Shard(0)]) if shard else weight.clone()})
        run: Any = SimpleNamespace(model=model, strategy=Strategy())
        layers = extensions.LayerNumbers(run)
        layers.gradient_ready({})
        with torch.no_grad():
            model["weight"] += distribute_tensor(change, mesh, [Shard(0)]) if shard else change
        sums = layers.updated()
        if shard:
            torch.distributed.all_reduce(sums)
        results.append(sums.tolist())
    return results[0], results[1]


def test_shards_are_sampled_as_the_whole_tensor_is() -> None:
    for whole, shards in run_on_ranks(moved_by_rank, 2, torch_keeps_group=True):
        assert shards == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize(
    "sets", [("train.clip_grad_norm=0.01", "optimizer.name=muon"), ("train.activation_checkpointing=block",)]
)
def test_the_layers_of_a_run_add_up_to_its_gradient(tmp_path: Path, sets: tuple[str, ...]) -> None:
    train(write_tiny_config(tmp_path), tmp_path / "run", "metrics.per_layer=true", *sets)
    for (_, step), row in read_rows(tmp_path / "run" / "metrics.jsonl").items():
        norms = [value for key, value in row.items() if key.startswith("layer/") and key.endswith("/grad_norm")]
        assert math.fsum(norm**2 for norm in norms) == pytest.approx(row["grad_norm"] ** 2, rel=1e-6)
        assert step < 2 or all(value > 0 for key, value in row.items() if key.endswith("/update_ratio"))


def test_a_skipped_step_reports_no_layer(tmp_path: Path) -> None:
    sets = ("optimizer.lr=1e30", 'train.on_non_finite="skip"', "scheduler.warmup_steps=0")
    train(write_tiny_config(tmp_path), tmp_path / "run", "metrics.per_layer=true", *sets)
    skipped = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl").values() if row["non_finite_steps"]]
    assert skipped
    assert not any(key.startswith("layer/") for row in skipped for key in row)
