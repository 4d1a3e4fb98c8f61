"""The tensors that the noise scale hooks and those that hold the optimizer's gradients; under FSDP2 they differ.

FSDP2 replaces every parameter by a DTensor of shards, whose hooks never run: autograd accumulates into the unsharded
parameter, a single object over the model's life that is empty while resharded. `FSDPModule.unshard()` registers it in
the module as long as it is whole, so public API suffices to find and hook it. Its hooks see the rank's own full
micro-gradient, before the reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.distributed.shards import layout_and_group, layout_of, unsharded_parameters
from trainer.errors import UserError


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
    if layout_of(parameters) is None:
        if not isinstance(model, DistributedDataParallel):
            return Leaves(parameters, parameters, process_group, is_sharded=False)
        return Leaves(parameters, parameters, process_group or model.process_group, is_sharded=False, ddp=model)
    try:
        layout, own_group = layout_and_group(parameters)
        if (group := process_group or own_group) is None:
            raise ValueError(
                "a mesh of replicas and shards that is a part of the ranks, unless process_group names them"
            )
        hooked = unsharded_parameters(model)
    except ValueError as error:
        fix = "use DDP or fully_shard alone, or set it to false"
        raise UserError("gns.enabled", f"not possible with {error}", fix) from None
    return Leaves(hooked, parameters, group, is_sharded=True, copies=layout.replicas)
