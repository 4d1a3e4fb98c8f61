"""Tensors of which each rank holds some rows, as FSDP2 keeps parameters, gradients and optimizer state (a DTensor)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """As `isinstance`, without an import that takes a quarter of a run's start: who has a DTensor has imported it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def own_range(sharded: DTensor) -> tuple[int, int]:
    """The rows [start, stop) of the whole tensor that this rank holds."""
    mesh, rows = sharded.device_mesh, sharded.shape[0]
    most = -(-rows // mesh.size(mesh.ndim - 1))
    start = min(mesh.get_local_rank(mesh.ndim - 1) * most, rows)
    return start, min(start + most, rows)


def own_rows(whole: Tensor, like: DTensor) -> Tensor:
    """The part of a whole tensor that this rank would hold if it were sharded as `like` is."""
    start, stop = own_range(like)
    return whole[start:stop]


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that may be sharded, in the same memory."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def as_shard(own: Tensor, like: DTensor) -> DTensor:
    """The sharded tensor of which this rank holds `own`; in the same memory, with the type of `own`."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def gathered(own: Tensor, like: DTensor) -> Tensor:
    """The whole tensor of which this rank holds the rows that it holds of `like`. Every rank must call it."""
    return as_shard(own, like).full_tensor()
