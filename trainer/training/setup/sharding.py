"""The strategy of a run, as `[distributed]` has it, and its model on the ranks."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trainer.config.schema import DistributedTable, RunConfig
from trainer.distributed.env import RankInfo, num_nodes
from trainer.distributed.shards import Layout
from trainer.distributed.strategy import Replicated, Sharded, Strategy, bypassed, shard_units
from trainer.errors import UserError
from trainer.metrics.logger import get_logger
from trainer.model.protocol import ModelOutput
from trainer.model.wrappers import output_layer, run_few_tokens

logger = get_logger(__name__)


def make_strategy(config: RunConfig, info: RankInfo, device: torch.device) -> Strategy:
    """The strategy of a run. Every rank must call it.

    Raises:
        UserError: as `layout_for`.
    """
    table = config.distributed
    if info.world_size == 1:
        if table.strategy != "ddp":
            logger.info('distributed.strategy = "%s": a single rank holds the whole model', table.strategy)
        return Strategy()
    layout = layout_for(table, info)
    if layout is None:
        return Replicated(world_size=info.world_size, device=device, find_unused=table.find_unused_parameters)
    if table.strategy == "hsdp" and layout.replicas == 1:
        logger.info(
            'distributed.strategy = "hsdp" with one replica is "fsdp": distributed.replicas = 0 makes one per node'
        )
    return Sharded(
        layout,
        device=device,
        reshard_after_forward=table.reshard_after_forward,
        keeps_whole=table.accumulate == "whole",
        param_dtype=torch.bfloat16 if config.train.precision == "bf16" else None,
    )


def layout_for(table: DistributedTable, info: RankInfo) -> Layout | None:
    """How a run lays out its parameters; None if every rank holds the whole model.

    Raises:
        UserError: replicas do not fit the nodes.
    """
    if table.strategy == "ddp" or info.world_size == 1:
        return None
    replicas = (table.replicas or num_nodes(info)) if table.strategy == "hsdp" else 1
    if info.world_size % replicas:
        problem = f"{replicas} nodes do not divide {info.world_size} ranks"
        raise UserError("distributed.replicas", problem, "set it to a number that does")
    return Layout(replicas, info.world_size // replicas)


def shard_model(strategy: Strategy, model: nn.Module, config: RunConfig) -> None:
    """Leave this rank its part of the model, which each rank has built whole in host memory, with the same weights.

    Raises:
        UserError: its blocks are not known.
    """
    strategy.shard(model, lambda: _prepared_units(model, config))


def _prepared_units(model: nn.Module, config: RunConfig) -> Sequence[nn.Module]:
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
    return units


def _with_known_fields(model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """FSDP looks for tensors in tuples, lists and dicts alone; a model may return any object with the fields."""
    return output if isinstance(output, tuple) else ModelOutput(output.logits, output.state)


def refuse_bypassed_units(strategy: Strategy, model: nn.Module, device: torch.device, *, seq_len: int) -> None:
    """Run a few tokens, and refuse a sharded model that uses a module's parts without calling the module.

    Every rank must call it.

    Args:
        seq_len: tokens of a cell.

    Raises:
        UserError: a parameter was used that is not gathered.
    """
    if strategy.whole(model) is not None:
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
        strategy.reshard(model)
