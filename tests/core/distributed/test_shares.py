"""What a rank really holds: parameters, gradients and moments of a sharded model are 1 / shards of those of one rank."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.gloo import make_step, run_on_ranks
from tests.support.in_process import plan_of
from tests.support.runs import write_tiny_config
from trainer.data.loader import MicroBatch
from trainer.distributed.env import RankInfo
from trainer.distributed.strategy import num_parameters, own_part
from trainer.metrics.gradient_noise import GradientNoiseScale
from trainer.training.build import autocast_context, make_state, make_strategy
from trainer.training.optimizer import named_state

pytestmark = pytest.mark.distributed
CPU = torch.device("cpu")
SIZES = ("model.dim=64", "train.micro_batches=2")


def stored(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind them, once each: a view of something whole counts as the whole."""
    storages = [own_part(tensor.detach()).untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def held(rank: int, world_size: int, config: Path, sets: tuple[str, ...]) -> tuple[int, int, int]:
    """Bytes of parameters, of gradients between the last backward and the update, and of the optimizer's state."""
    info = RankInfo(rank, rank, world_size)
    plan = plan_of(config, *SIZES, *sets, ranks=world_size)
    strategy = make_strategy(plan, info, CPU)
    state = make_state(plan, info, CPU, strategy)
    state.gns = GradientNoiseScale(state.model, process_group=dist.group.WORLD if world_size > 1 else None)
    settings = {"optimizer": state.optimizer, "gns": state.gns, "autocast": autocast_context(plan.config, CPU)}
    step = make_step(state.model, strategy, clip_grad_norm=1.0, world_size=world_size, **settings)
    tokens = torch.randint(plan.vocab_size, (4, 16))
    for number in (1, 2):
        step.accumulate(number, [MicroBatch({"tokens": tokens}, tokens, None, {})] * 2)
        gradients = stored(p.grad for p in state.model.parameters() if p.grad is not None)
        step.finish(step.launch(lr=1e-3))
    states = named_state(state.optimizer, state.model).values()
    moments = [value for each in states for value in each.values() if isinstance(value, Tensor)]
    return stored(state.model.parameters()), gradients, stored(moments)


CASES: dict[int, dict[tuple[str, ...], int]] = {
    2: {
        ("distributed.strategy=fsdp",): 2,
        ("distributed.strategy=ddp",): 1,
        ("distributed.strategy=fsdp", "optimizer.name=muon"): 2,
    },
    4: {("distributed.strategy=fsdp",): 4, ("distributed.strategy=hsdp", "distributed.replicas=2"): 2},
}


def held_by_each(rank: int, world_size: int, config: Path) -> list[tuple[int, int, int]]:
    """In one start of the processes."""
    return [held(rank, world_size, config, sets) for sets in CASES[world_size]]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_parameters_gradients_and_moments_are_one_share_of_those_of_one_rank(tmp_path, world_size):
    config = write_tiny_config(tmp_path)
    results = run_on_ranks(held_by_each, world_size, config, torch_keeps_group=True)
    for index, (sets, shards) in enumerate(CASES[world_size].items()):
        alone = held(0, 1, config, tuple(each for each in sets if each.startswith("optimizer.")))
        assert alone[0] == alone[1] == 4 * num_parameters(plan_of(config, *SIZES).weightless_model())
        for found in (each[index] for each in results):
            assert found == pytest.approx([size / shards for size in alone], rel=0.1)
