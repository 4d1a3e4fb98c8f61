"""Norms and updates by layer: on one process, on several ranks, and in real runs of the program."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.gloo import run_on_ranks
from tests.support.gns_cases import make_model
from tests.support.in_process import train_here
from tests.support.runs import read_rows, train, write_tiny_config
from trainer.distributed.strategy import Strategy
from trainer.errors import UserError
from trainer.lab import extensions
from trainer.lab.extensions import LayerNumbers, layer_of
from trainer.metrics.catalog import is_known, lookup
from trainer.training.extension import Flag, Step, StepOutcome


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("blocks.0.mixer.weight", "blocks.0"),
        ("layers.2.experts.7.weight", "layers.2"),
        ("embedding.weight", "embedding"),
        ("scale", "scale"),
        ("a/b.weight", "a_b"),
    ],
)
def test_a_parameter_belongs_to_the_layer_of_its_first_number_or_to_its_module(name: str, layer: str) -> None:
    assert layer_of(name) == layer


def layers_of(model: nn.Module) -> LayerNumbers:
    run: Any = SimpleNamespace(model=model, strategy=Strategy())
    return LayerNumbers(run)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> dict[str, float]:
    """One measured step."""
    layers = layers_of(model)
    loss.backward()
    layers.gradient_ready({p: p.grad.double().square().sum() for p in model.parameters() if p.grad is not None})
    optimizer.step()
    taken = {"is_finite": True, "tokens": 1, "tokens_trained": 1, "grad_factor": 2.0}
    outcome = StepOutcome(Flag.NONE, loss=0.0, grad_norm=0.0, **taken)
    layers.settled(Step(1, (), True, outcome), layers.updated().tolist())
    assert all(is_known(key) and lookup(key).group == "Layers" for key in layers.metric_keys)
    return layers.drain_metrics()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_updates_are_those_of_copies_of_the_weights(dtype: torch.dtype) -> None:
    model = make_model().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    before = [p.detach().double().clone() for p in model.parameters()]
    found = step_of(model, optimizer, model(torch.ones(4, 5, dtype=dtype)).square().sum())
    after = [p.detach().double() for p in model.parameters()]
    grads = [p.grad.double() for p in model.parameters() if p.grad is not None]
    assert found.keys() == {f"layer/{layer}/{what}" for layer in "02" for what in ("grad_norm", "update_ratio")}
    for name, members in (("0", (0, 1)), ("2", (2, 3))):
        moved, weights, square = (
            sum(float(each[i].square().sum()) for i in members)
            for each in ([a - b for a, b in zip(after, before, strict=True)], before, grads)
        )
        assert found[f"layer/{name}/update_ratio"] == pytest.approx(math.sqrt(moved / weights), rel=1e-5)
        assert found[f"layer/{name}/grad_norm"] == pytest.approx(math.sqrt(square) / 2.0, rel=1e-6)


@pytest.mark.parametrize("limit", [256, 4096])
def test_a_sample_of_a_large_tensor_stands_for_all_of_it_within_its_error(monkeypatch, limit) -> None:
    monkeypatch.setattr(extensions, "MOST_PER_TENSOR", limit)
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(300, 200, generator=generator).t()  # transposed: not contiguous
    model = nn.ParameterDict({"weight": weight})
    layers, change = layers_of(model), 0.01 * torch.randn(200, 300, generator=generator)
    expected = [0.0, float(change.square().sum()), float(model["weight"].detach().square().sum())]
    layers.gradient_ready({})
    with torch.no_grad():
        model["weight"] += change
    found = layers.updated().tolist()
    assert found == pytest.approx(expected, rel=10.0 / math.sqrt(2.0 * limit))  # of a square, twice that of the norm
    assert found[1] != pytest.approx(expected[1], rel=1e-6)


def test_a_layer_without_a_gradient_stands_still_and_a_frozen_one_is_left_out() -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    model[1].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found = step_of(model, optimizer, model[2](torch.ones(3)).sum())
    assert (found["layer/0/grad_norm"], found["layer/0/update_ratio"]) == (0.0, 0.0)
    assert found["layer/2/update_ratio"] > 0.0
    assert not any(key.startswith("layer/1") for key in found)


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


@pytest.mark.distributed
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


def test_a_part_that_cannot_be_made_on_a_rank_ends_the_run_by_name(tmp_path: Path, monkeypatch: Any) -> None:
    """Without it, that rank would be missing in the sums of the others, which would wait."""

    def no_memory(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(LayerNumbers, "__init__", no_memory)
    with pytest.raises(UserError, match=r"metrics\.per_layer: cannot be made: RuntimeError: no memory"):
        train_here(write_tiny_config(tmp_path), tmp_path / "run", "metrics.per_layer=true")
