"""Layers on several ranks, and in real runs of the program."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.gloo import run_on_ranks
from tests.support.grouped import train
from tests.support.layered import everything
from tests.support.runs import read_rows, write_tiny_config
from trainer.lab.per_layer import WeightSample

pytestmark = pytest.mark.distributed
KEYS = ("layer/", "param_group/")


def rows_of(directory: Path, *sets: str, nproc: int | None = None) -> dict[int, dict[str, float]]:
    """The logged rows by step."""
    said = train(write_tiny_config(directory), directory / "run", "metrics.per_layer=true", *sets, nproc=nproc)
    assert "failed and is off" not in said
    return {step: row for (_, step), row in read_rows(directory / "run" / "metrics.jsonl").items()}


def test_two_ranks_measure_each_layer_as_the_closed_form_says() -> None:
    (wrong, rows), (_, others) = run_on_ranks(everything, 2)
    assert not wrong, "\n".join(wrong)
    for row, other in zip(rows, others, strict=True):
        assert row == other
        parts = [value for key, value in row.items() if key.startswith("layer/") and key.endswith("/grad_norm")]
        assert math.fsum(part**2 for part in parts) == pytest.approx(row["grad_sq"], rel=1e-6)


def moved_by_rank(rank: int, world_size: int) -> tuple[float, float]:
    """Squared norms of a change that differs by place, seen in a sample of a tensor in shards of unequal size."""
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(2)
    weight, change = torch.randn(301, 30), torch.randn(301, 30) * torch.linspace(0.1, 3.0, 301)[:, None]
    results = []
    for shard in (False, True):
        parameter = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]) if shard else weight.clone())
        moved = distribute_tensor(change, mesh, [Shard(0)]) if shard else change
        sample = WeightSample([parameter], limit=500)
        sample.take()
        with torch.no_grad():
            parameter += moved
        square = sample.compare()[0]
        if shard:
            torch.distributed.all_reduce(square)
        results.append(float(square))
    return results[0], results[1]


def test_shards_are_sampled_as_the_whole_tensor_is() -> None:
    for whole, shards in run_on_ranks(moved_by_rank, 2, torch_keeps_group=True):
        assert shards == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize(
    "sets",
    [
        ("train.clip_grad_norm=0.01", 'optimizer.group=[{match="blocks.0.*", lr_scale=0.5}]'),
        ("gns.enabled=false", "optimizer.name=muon", "train.activation_checkpointing=block", "train.tbptt_cells=2"),
    ],
    ids=["clipped, a group", "without the noise scale, muon, two cells"],
)
def test_the_layers_of_a_run_add_up_to_its_gradient(tmp_path: Path, sets: tuple[str, ...]) -> None:
    rows = rows_of(tmp_path, *sets)
    for step, row in rows.items():
        for prefix in KEYS:
            own = {key: value for key, value in row.items() if key.startswith(prefix)}
            norms = [value for key, value in own.items() if key.endswith("/grad_norm")]
            assert math.fsum(norm**2 for norm in norms) == pytest.approx(row["grad_norm"] ** 2, rel=1e-6)
            assert step < 2 or all(value > 0 for key, value in own.items() if key.endswith("/update_ratio"))
    names = {key for key in rows[6] if key.startswith("param_group/")}
    if any("lr_scale" in each for each in sets):
        assert "param_group/2.blocks.0.*.matrices/update_ratio" in names


def test_a_skipped_step_reports_no_layer(tmp_path: Path) -> None:
    sets = ("optimizer.lr=1e30", 'train.on_non_finite="skip"', "scheduler.warmup_steps=0")
    skipped = [row for row in rows_of(tmp_path, *sets).values() if row["non_finite_steps"]]
    assert skipped
    assert not any(key.startswith(KEYS) for row in skipped for key in row if not key.endswith("/b_simple"))
