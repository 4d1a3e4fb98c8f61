"""Runs on the device: all metrics but times are those of the CPU in fp32, bf16 trains alike, memory does not grow, and
a step that is not finite changes nothing, whoever finds out."""

from __future__ import annotations

import gc
import itertools
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.checkpoints import model_content
from tests.support.on_device import around_steps, differences, resident_bytes, train_here
from tests.support.ranks import differences as tensor_differences
from tests.support.runs import FULL_ROWS, losses, read_rows
from trainer.distributed.strategy import Layout
from trainer.lab.sharding import Sharded
from trainer.on_device import scale_gradients
from trainer.training import open_run
from trainer.training.loop import Order
from trainer.training.plan import Plan

pytestmark = pytest.mark.cuda
FAULTY = ("model.target=tests.support.faulty_model:build", "model.contract=false", "train.on_non_finite=skip")
EVERY_STEP = "\n[checkpoint]\nevery = 1\nkeep_last = 50\n"
STEPS = 30
EVALUATED = ("train.steps=6", "checkpoint.every=0", "eval.every=3", "eval.holdout_fraction=0.2", "eval.depth=true")
RUNS = {
    "layers": ("metrics.per_layer=true",),
    "head in chunks": ("objective.chunk_tokens=16",),
    "full rows": (FULL_ROWS,),
    "delta rule": ('model.family="gated_delta"',),
}


@pytest.mark.parametrize("kind", RUNS)
def test_metrics_are_those_of_the_cpu(tmp_path: Path, chosen_device: torch.device, kind: str) -> None:
    places = {"cpu": torch.device("cpu"), "device": chosen_device}
    one, other = (train_here(tmp_path / name, place, *EVALUATED, *RUNS[kind]) for name, place in places.items())
    assert differences(one, other, 1e-3) == {}


def test_a_long_run_holds_no_more_than_a_short_one(
    tmp_path: Path, chosen_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_cuda, held = chosen_device.type == "cuda", dict[int, int]()
    # The allocator of the CPU keeps what was freed.
    early, late, most_bytes = (100, 500, 1e5) if is_cuda else (30, 60, 1.6e7)

    @contextmanager
    def around(order: Order) -> Iterator[None]:
        yield
        held[order.number] = torch.cuda.memory_allocated() if is_cuda else resident_bytes()

    around_steps(monkeypatch, around)
    train_here(tmp_path, chosen_device, f"train.steps={late}", "metrics.log_interval=10", "checkpoint.every=0")
    assert held[late] - held[early] <= most_bytes, held


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_in_shards_trains_as_the_whole_model_does(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """A group of one rank, whose shards are the whole model; `train` itself shards nothing for one rank."""
    sets = ("train.steps=8", "checkpoint.every=0", 'distributed.strategy="fsdp"', f"train.precision={precision}")
    whole = losses(train_here(tmp_path / "whole", device, *sets) / "metrics.jsonl")
    made = list[Sharded]()

    def make_strategy(plan: Plan, *_: object) -> Sharded:
        made.append(Sharded(Layout(1, 1), plan.config, device))
        return made[0]

    monkeypatch.setattr(open_run, "make_strategy", make_strategy)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded = train_here(tmp_path / "sharded", device, *sets)
    finally:
        gc.collect()
        dist.destroy_process_group()
    assert len(made) == 1
    # With bf16 a unit's inputs and parameters are rounded where autocast would round them, not always in the same places.
    assert losses(sharded / "metrics.jsonl") == pytest.approx(whole, rel=2e-2 if precision == "bf16" else 1e-5)


def test_bf16_trains_as_fp32_does(tmp_path: Path, chosen_device: torch.device) -> None:
    sets = (f"train.steps={STEPS}", "optimizer.lr=3e-3", "checkpoint.every=0")
    whole = losses(train_here(tmp_path / "fp32", chosen_device, *sets) / "metrics.jsonl")
    run_dir = train_here(tmp_path / "bf16", chosen_device, *sets, "train.precision=bf16")
    found = losses(run_dir / "metrics.jsonl")
    assert whole[STEPS] < whole[1] - 0.3  # it learns
    assert found[1] != whole[1]
    assert found == pytest.approx(whole, rel=0.05)
    assert not math.isnan(found[STEPS])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("what", ["nan", "inf_gradient"])
def test_a_step_that_is_not_finite_changes_no_weight_and_no_state_of_the_optimizer(
    tmp_path: Path, chosen_device: torch.device, monkeypatch: pytest.MonkeyPatch, what: str, precision: str
) -> None:
    fault = {"what": what, "step": 4, "steps": 2, "micro": 1}
    sets = (*FAULTY, "train.steps=8", f"train.precision={precision}")
    monkeypatch.setenv("FAULT", json.dumps(fault))
    run_dir = train_here(tmp_path, chosen_device, *sets, extra=EVERY_STEP)
    saved = [model_content(path) for path in sorted((run_dir / "checkpoints").glob("step_*"))]
    assert len(saved) == 8
    parts = [{key: step[key] for key in ("model", "optimizer")} for step in saved]
    changed = [bool(tensor_differences(one, other)) for one, other in itertools.pairwise(parts)]
    assert changed == [True, True, False, False, True, True, True]
    rows = read_rows(run_dir / "metrics.jsonl")
    assert [rows["train", step].get("non_finite_steps") for step in range(1, 9)] == [0, 0, 0, 1, 1, 0, 0, 0]


def test_gradients_are_scaled_and_clipped_on_the_device_as_in_float64(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(size, generator=generator).to(device) for size in ((3, 5), (7,), (2, 2))]
    exact = [gradient.double().cpu() / 3.0 for gradient in gradients]
    norm = torch.sqrt(sum((gradient.square().sum() for gradient in exact), torch.zeros((), dtype=torch.float64)))
    grad_sq = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum()
    scale_gradients(gradients, torch.tensor(3.0, dtype=torch.float64, device=device), grad_sq, limit=0.5)
    for found, expected in zip(gradients, exact, strict=True):
        torch.testing.assert_close(found.double().cpu(), expected * (0.5 / (norm + 1e-6)), rtol=1e-6, atol=0)
