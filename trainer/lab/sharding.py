"""Shards of a model (`trainer.training.Models`): ranks hold rows of its tensors (FSDP2, HSDP)."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.config.schema import RunConfig
from trainer.distributed.strategy import (
    FREEZE,
    Layout,
    Strategy,
    blocks_of,
    has_forward,
    num_parameters,
    own_part,
    unused_error,
)
from trainer.errors import UserError
from trainer.model.protocol import ModelOutput, extras_of
from trainer.wording import few

logger = logging.getLogger(__name__)
CHUNK_KEY = "objective.chunk_tokens"


class Sharded(Strategy):
    """FSDP2 over all ranks, or within each of several replicas of neighbouring ranks.

    Each rank holds some rows of each parameter. Every rank must make it: it makes process groups.
    """

    is_sharded = True

    def __init__(self, layout: Layout, config: RunConfig, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy

        first = int(layout.replicas == 1)  # without replicas, a mesh of shards alone
        names = ("replicate", "shard")[first:]
        mesh = init_device_mesh(device.type, tuple(layout)[first:], mesh_dim_names=names)
        self.copies, self.groups = layout.replicas, mesh.get_all_groups()
        self._device, self._config = device, config
        self._sharding: dict[str, Any] = {"mesh": mesh}
        if config.train.precision == "bf16":
            # Gradients are averaged in float32. A carried state stays in it: inputs are not cast.
            self._sharding["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
            )

    def shard(self, model: nn.Module) -> None:
        """Replace the parameters by shards of their rows (`fully_shard`)."""
        # A unit's parameters are whole while it runs; those of no unit throughout a step.
        from torch.distributed.fsdp import fully_shard

        config, units = self._config, shard_units(model)
        if config.objective.chunk_tokens:  # the loss uses the output layer after the forward
            head = output_layer(model)
            units = [unit for unit in units if head not in unit.modules()]
        if config.model.target is None:
            # That a block returns a view matters only to who writes to it, as no family does.
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        model.register_forward_hook(_with_known_fields)
        reshards = config.distributed.reshard_after_forward
        for unit in units:
            fully_shard(unit, reshard_after_forward=reshards, **self._sharding)
        fully_shard(model, **self._sharding)  # last: the parameters of no unit

    def wrap(self, row_model: nn.Module, model: nn.Module) -> nn.Module:
        """As it is: FSDP2 has put its hooks into the model."""
        self.reshard(model)  # some tokens may have been run through it
        self._root: Any = model
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        return row_model

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Averages shards all the same, but over replicas only in the last backward."""
        self._root.set_requires_all_reduce(False)
        try:
            yield
        finally:
            self._root.set_requires_all_reduce(True)

    def reduced(self, gradients: list[Tensor]) -> list[Tensor]:
        """Shards; refuses a parameter without a gradient."""
        unused = [name for name, parameter in self._trained.items() if parameter.grad is None]
        if unused:
            raise unused_error(unused, f"use them in every micro-batch, or {FREEZE}")
        return [own_part(gradient) for gradient in gradients]

    def most(self, number: int) -> int:
        """Every rank must call it. Waits for the device."""
        most = torch.tensor(number, device=self._device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most)

    def reshard(self, model: nn.Module) -> None:
        """Leave the model its shards alone."""
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _with_known_fields(model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """FSDP finds tensors only in tuples, lists and dicts; a model may return any object."""
    if isinstance(output, tuple):
        return output
    return ModelOutput(output.logits, output.state, *extras_of(output))


def shard_units(model: nn.Module) -> list[nn.Module]:
    """The modules whose parameters are gathered one module at a time.

    They are `blocks_of` the model, or else its children, without those that share a parameter with
    another part of it: FSDP would break the tie. A UserError if a parameter is a scalar.
    """
    # Shards are rows, which a scalar has none of.
    scalars = [name for name, parameter in model.named_parameters() if parameter.ndim == 0]
    if scalars:
        raise UserError("distributed.strategy", f"{few(scalars)}: a scalar cannot be sharded", "give it the shape [1]")
    blocks = blocks_of(model)
    if not blocks:
        logger.info("%s has no nn.ModuleList of blocks: its children are sharded one by one", type(model).__name__)
        blocks = [child for child in model.children() if num_parameters(child) and has_forward(child)]
    uses = _uses(model)
    return [block for block in blocks if all(uses[p] == n for p, n in _uses(block).items())]


def _uses(module: nn.Module) -> Counter[nn.Parameter]:
    """In how many places each parameter is."""
    return Counter(p for _, p in module.named_parameters(remove_duplicate=False))


def output_layer(model: nn.Module) -> nn.Linear:
    """The layer that gives the logits: `model.get_output_embeddings()`, or `model.head`."""
    layer, name = getattr(model, "head", None), "head"
    getter: Any = getattr(model, "get_output_embeddings", None)
    if getter is not None:
        layer, name = getter(), "get_output_embeddings()"
    if not isinstance(layer, nn.Linear):
        problem = f"the model's {name} is a {type(layer).__name__}, no nn.Linear, which gives its logits"
        fix = "name that head, or return it from get_output_embeddings(); or set 0"
        raise UserError(CHUNK_KEY, problem, fix)
    return layer
