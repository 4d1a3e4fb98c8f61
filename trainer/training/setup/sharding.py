"""The strategy of a run: the mesh of its ranks, its model on them, and how their gradients are averaged."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer.config.schema import DistributedTable, RunConfig
from trainer.distributed.env import RankInfo, num_nodes
from trainer.distributed.strategy import (
    GradientAveraging,
    make_mesh,
    reshard,
    shard_model,
    shard_units,
    sharded_averaging,
    with_ddp,
)
from trainer.errors import UserError
from trainer.metrics.logger import get_logger
from trainer.model.protocol import ModelOutput
from trainer.model.wrappers import output_layer, run_few_tokens
from trainer.shards import is_dtensor
from trainer.wording import counted

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = get_logger(__name__)


def run_mesh(config: RunConfig, info: RankInfo, device: torch.device) -> DeviceMesh | None:
    """The mesh over which the run's parameters are sharded; None if every rank holds the whole model.

    Every rank must call it.

    Raises:
        UserError: as `mesh_shape`.
    """
    table = config.distributed
    shape = mesh_shape(table, info)
    if shape is None:
        if table.strategy != "ddp":
            logger.info('distributed.strategy = "%s": a single rank holds the whole model', table.strategy)
        return None
    replicas, _ = shape
    if table.strategy == "hsdp" and replicas == 1:
        logger.info(
            'distributed.strategy = "hsdp" with one replica is "fsdp": distributed.replicas = 0 makes one per node'
        )
    return make_mesh(world_size=info.world_size, replicas=replicas, device=device)


def mesh_shape(table: DistributedTable, info: RankInfo) -> tuple[int, int] | None:
    """(replicas, shards of each) of a run; None if every rank holds the whole model.

    Raises:
        UserError: replicas do not fit the nodes.
    """
    if table.strategy == "ddp" or info.world_size == 1:
        return None
    replicas = (table.replicas or num_nodes(info)) if table.strategy == "hsdp" else 1
    if info.world_size % replicas:
        problem = f"{replicas} nodes do not divide {info.world_size} ranks"
        raise UserError("distributed.replicas", problem, "set it to a number that does")
    return replicas, info.world_size // replicas


def describe_shape(replicas: int, shards: int) -> str:
    """For people."""
    return counted(shards, "shard") if replicas == 1 else f"{replicas} replicas of {counted(shards, 'shard')}"


def sharded_model(
    build: Callable[[], nn.Module], mesh: DeviceMesh, config: RunConfig, device: torch.device
) -> nn.Module:
    """The model that `build` makes, sharded over the mesh, with the weights that it would have on a single rank.

    Each rank builds the whole model in the host's memory, keeps its own rows and frees the rest.

    Raises:
        UserError: the model cannot be built, or its blocks are not known.
    """
    model = build()
    shard_over(mesh, model, config)
    return model.to(device)


def shard_over(mesh: DeviceMesh, model: nn.Module, config: RunConfig) -> None:
    """Shard the model in place, as `[distributed]` has it.

    Raises:
        UserError: its blocks are not known.
    """
    units = shard_units(model)
    if config.objective.chunk_tokens:  # the loss uses it after the model's forward
        units = [unit for unit in units if unit is not output_layer(model)]
    if config.model.target is None:
        # That a block returns a view matters to those who write into it; the families do not.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    if config.train.compile:  # the root's own hooks cannot be compiled
        for unit in units:
            unit.compile()
    model.register_forward_hook(_with_known_fields)
    shard_model(
        model,
        mesh,
        units=units,
        reshard_after_forward=config.distributed.reshard_after_forward,
        param_dtype=torch.bfloat16 if config.train.precision == "bf16" else None,
    )


def _with_known_fields(model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """FSDP looks for tensors in tuples, lists and dicts alone; a model may return any object with the fields."""
    return output if isinstance(output, tuple) else ModelOutput(output.logits, output.state)


def refuse_bypassed_units(model: nn.Module, device: torch.device, *, seq_len: int) -> None:
    """Run a few tokens, and refuse a sharded model that uses a module's parts without calling the module.

    Every rank must call it.

    Args:
        seq_len: tokens of a cell.

    Raises:
        UserError: a parameter was used that is not gathered.
    """
    if not any(map(is_dtensor, model.parameters())):
        return
    try:
        inspect.signature(model.forward).bind(tokens=None, state=None)
    except TypeError:  # it takes inputs that only the data have
        return
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            run_few_tokens(model, device, seq_len=seq_len)
    except RuntimeError as error:
        raise bypassed(error) or error from None
    finally:
        model.train(was_training)
        reshard(model)


def bypassed(error: Exception) -> UserError | None:
    """What to say of an error that a parameter in shards has caused; None for any other."""
    if "mixed torch.Tensor and DTensor" not in str(error):
        return None
    problem = "the model uses a part of a block without calling the block, so that its parameters are not gathered"
    fix = "call blocks through their forward, or return other modules from shard_units()"
    return UserError("distributed.strategy", problem, fix)


def average_over_ranks(
    row_model: nn.Module,
    model: nn.Module,
    config: RunConfig,
    info: RankInfo,
    device: torch.device,
    mesh: DeviceMesh | None,
) -> tuple[nn.Module, GradientAveraging | None]:
    """What the training step calls, and how gradients are averaged; None on a single rank.

    Args:
        row_model: what a row is run through.
        model: the model itself, inside of it.
    """
    if info.world_size == 1:
        return row_model, None
    table = config.distributed
    if mesh is None:
        return with_ddp(row_model, world_size=info.world_size, device=device, find_unused=table.find_unused_parameters)
    reshard(model)  # some tokens may have been run through it
    return row_model, sharded_averaging(model, mesh, keeps_whole=table.accumulate == "whole")
