"""Tensors of which each rank holds some rows, as FSDP2's DTensor; or whole, as their only part."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch.distributed as dist
from torch import Tensor, nn

from trainer.wording import counted

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Layout(NamedTuple):
    """How parameters are laid out: `replicas` copies of `shards` parts, one part per rank."""

    replicas: int
    shards: int

    def __str__(self) -> str:
        shards = counted(self.shards, "shard")
        return shards if self.replicas == 1 else f"{self.replicas} replicas of {shards}"


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """As `isinstance`, without an import that takes a quarter of a run's start."""
    # Whoever has made a DTensor has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def layout_of(tensors: Iterable[Tensor]) -> Layout | None:
    """How a model's parameters are laid out; None if each rank holds them whole."""
    mesh = next((tensor.device_mesh for tensor in tensors if is_dtensor(tensor)), None)
    if mesh is None:
        return None
    *replicas, shards = mesh.shape
    return Layout(math.prod(replicas), shards)


def layout_and_group(parameters: Sequence[Tensor]) -> tuple[Layout, dist.ProcessGroup | None]:
    """The layout by `fully_shard`, or a ValueError, and the group that averages gradients, if any."""
    meshes = []
    for parameter in parameters:
        if not is_dtensor(parameter):
            raise ValueError("sharded next to unsharded parameters")
        *over_replicas, over_shards = parameter.placements
        is_replicated = len(over_replicas) <= 1 and all(p.is_replicate() for p in over_replicas)
        if not is_replicated or not over_shards.is_shard():
            raise ValueError("parameters that are sharded otherwise than by fully_shard alone")
        meshes.append(parameter.device_mesh)
    mesh = meshes[0]
    if any(other != mesh for other in meshes):
        raise ValueError("parameters sharded over several meshes")
    layout, world = layout_of(parameters), dist.group.WORLD
    assert layout is not None
    if mesh.ndim == 1:  # no replicas: the ranks that share a parameter average its gradient
        return layout, mesh.get_group()
    has_all = world is not None and mesh.size() == world.size()
    return layout, world if has_all else None


def unsharded_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The trained parameters as autograd sees them, or a ValueError. All ranks must call it."""
    from torch.distributed.fsdp import FSDPModule

    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.unshard()
    found = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for module in modules:
        module.reshard()
    if any(map(is_dtensor, found)):
        raise ValueError("parameters that stay sharded in the backward (tensor parallelism)")
    return found


def own_range(tensor: Tensor) -> tuple[int, int]:
    """The rows [start, stop) of the whole tensor that this rank holds."""
    rows = tensor.shape[0] if tensor.ndim else 1
    if not is_dtensor(tensor):
        return 0, rows
    mesh = tensor.device_mesh
    most = -(-rows // mesh.size(mesh.ndim - 1))  # torch gives the last ranks fewer, or none
    start = min(mesh.get_local_rank(mesh.ndim - 1) * most, rows)
    return start, min(start + most, rows)


def own_rows(whole: Tensor, like: Tensor) -> Tensor:
    """The part of a whole tensor that this rank would hold if it were laid out as `like` is."""
    if not is_dtensor(like):
        return whole
    start, stop = own_range(like)
    return whole[start:stop]


def own_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, in the same memory."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def as_shard(own: Tensor, like: Tensor) -> Tensor:
    """The tensor, laid out as `like`, of which this rank holds `own`; in the same memory."""
    if not is_dtensor(like):
        return own
    from torch.distributed.tensor import DTensor

    mesh, size = like.device_mesh, like.size()
    return DTensor.from_local(own, mesh, like.placements, run_check=False, shape=size, stride=like.stride())


def gathered(own: Tensor, like: Tensor) -> Tensor:
    """The whole tensor of which this rank holds a part as of `like`. Every rank must call it."""
    shard = as_shard(own, like)
    return shard.full_tensor() if is_dtensor(shard) else shard


def saving_ranks(model: nn.Module) -> list[int]:
    """The ranks that save a part of the model: 0, or those of the first replica."""
    layout = layout_of(model.parameters()) or Layout(1, 1)
    return list(range(layout.shards))


def part_to_save(tensor: Tensor, rank: int) -> tuple[Tensor, int] | None:
    """The rows that this rank saves, and the first one's index; None if it saves none."""
    if not is_dtensor(tensor) and rank > 0:  # whole: rank 0 saves it
        return None
    start, stop = own_range(tensor)
    if is_dtensor(tensor) and start == stop:
        return None
    return own_part(tensor), start
