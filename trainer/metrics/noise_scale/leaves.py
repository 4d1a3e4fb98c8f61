"""The tensors that the noise scale hooks and those that hold the optimizer's gradients; under FSDP2 they differ.

FSDP2 replaces every parameter by a DTensor of shards, whose hooks never run: autograd accumulates into the unsharded
parameter, a single object over the model's life that is empty while resharded. `FSDPModule.unshard()` registers it in
the module as long as it is whole, so public API suffices to find and hook it. Its hooks see the rank's own full
micro-gradient, before the reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.distributed.shards import is_dtensor
from trainer.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Leaves:
    """The trained parameters of a model."""

    hooked: Sequence[nn.Parameter]
    """Where autograd accumulates."""
    parameters: Sequence[nn.Parameter]
    """The optimizer's parameters; their `.grad` form the big gradient."""
    group: dist.ProcessGroup | None
    """The ranks that average gradients; None on a single process."""
    is_sharded: bool
    """Whether `.grad` holds only this rank's shards."""
    copies: int = 1
    """If so, how many ranks of the group hold the same shards."""
    ddp: DistributedDataParallel | None = None
    """The model itself if it is wrapped in DDP."""

    def reduces_now(self) -> bool:
        """Whether DDP reduces after the current backward, i.e. it does not run under `no_sync`."""
        return self.ddp is not None and self.ddp.require_backward_grad_sync


def find_leaves(model: nn.Module, process_group: dist.ProcessGroup | None) -> Leaves:
    """The leaves of `model`. With FSDP2 this all-gathers every parameter once, so all ranks must call it.

    Args:
        model: a plain module, wrapped in DDP, or sharded by `fully_shard` over a mesh of shards, or of replicas and shards.
        process_group: overrides the model's own.

    Raises:
        UserError: nothing to train; DTensors without FSDP2 (tensor parallelism); a mesh of replicas that is not all ranks,
            without a `process_group`; sharded next to unsharded parameters (`ignored_params`), whose gradients FSDP2 does not
            average.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise UserError("gns.enabled", "the model has no trainable parameter", "set it to false")
    if not any(map(is_dtensor, parameters)):
        if not isinstance(model, DistributedDataParallel):
            return Leaves(parameters, parameters, process_group, is_sharded=False)
        return Leaves(parameters, parameters, process_group or model.process_group, is_sharded=False, ddp=model)
    from torch.distributed.fsdp import FSDPModule

    mesh = _mesh_of(parameters)
    copies = mesh.size(0) if mesh.ndim == 2 else 1
    group = process_group or _group_of(mesh)
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.unshard()
    hooked = [p for p in model.parameters() if p.requires_grad]
    for module in modules:
        module.reshard()
    if any(map(is_dtensor, hooked)):
        raise _refusal("parameters that stay sharded in the backward (tensor parallelism)")
    return Leaves(hooked, parameters, group, is_sharded=True, copies=copies)


def _mesh_of(parameters: Sequence[nn.Parameter]) -> DeviceMesh:
    """The mesh over which every parameter is sharded."""
    meshes = []
    for parameter in parameters:
        if not is_dtensor(parameter):
            raise _refusal("sharded next to unsharded parameters")
        *over_replicas, over_shards = parameter.placements
        if len(over_replicas) > 1 or not all(p.is_replicate() for p in over_replicas) or not over_shards.is_shard():
            raise _refusal("parameters that are sharded otherwise than by fully_shard alone")
        meshes.append(parameter.device_mesh)
    if any(mesh != meshes[0] for mesh in meshes):
        raise _refusal("parameters sharded over several meshes")
    return meshes[0]


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The ranks of the mesh: those that average gradients."""
    if mesh.ndim == 1:
        return mesh.get_group()
    world = dist.group.WORLD
    if world is None or mesh.size() != world.size():
        raise _refusal("a mesh of replicas and shards that is a part of the ranks, unless process_group names them")
    return world


def _refusal(what: str) -> UserError:
    return UserError("gns.enabled", f"not possible with {what}", "use DDP or fully_shard alone, or set it to false")
