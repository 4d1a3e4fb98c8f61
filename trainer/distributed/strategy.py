"""How the ranks share a model: with DDP each has all of it; with FSDP2 or HSDP each has shards of its parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.errors import UserError
from trainer.metrics.logger import get_logger
from trainer.wording import counted, few

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

logger = get_logger(__name__)


@dataclass(frozen=True)
class GradientAveraging:
    """How the gradients of a window are averaged over ranks. All of them are the mean of the ranks' own."""

    no_sync: Callable[[], AbstractContextManager[None]]
    """The context of all backwards of a window but the last."""
    refuse_unreduced: Callable[[], None]
    """Called after the window's last backward: raises a `UserError` if a parameter was left out of the average."""
    copies: int
    """How many ranks hold the same part of the averaged gradient."""


def with_ddp(
    model: nn.Module, *, world_size: int, device: torch.device, find_unused: bool
) -> tuple[nn.Module, GradientAveraging]:
    """DDP around the model; it averages the gradients in a window's last backward."""
    ddp = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=find_unused,
    )
    return ddp, GradientAveraging(ddp.no_sync, partial(_refuse_unreduced_buckets, ddp), world_size)


def make_mesh(*, world_size: int, replicas: int, device: torch.device) -> DeviceMesh:
    """The mesh that parameters are sharded over: [W], or [replicas, W / replicas] with neighbouring ranks in a row.

    Every rank must call it: it makes process groups.
    """
    from torch.distributed.device_mesh import init_device_mesh

    if replicas == 1:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    shape = (replicas, world_size // replicas)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    units: Sequence[nn.Module],
    reshard_after_forward: bool,
    param_dtype: torch.dtype | None,
) -> None:
    """Replace the model's parameters by shards of their rows over the mesh, in place (FSDP2's `fully_shard`).

    A unit's parameters are whole while it runs, forward and backward; those of no unit are whole throughout both.

    Args:
        model: on the meta device, or whole on the CPU or the mesh's device.
        units: see `shard_units`.
        reshard_after_forward: free a unit's parameters after its forward, and gather them again in the backward.
        param_dtype: in which parameters are gathered and used; gradients are averaged in float32. None: as they are.

    Raises:
        UserError: a parameter has no rows.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"mesh": mesh}
    if param_dtype is not None:
        # Inputs are not cast: a carried state stays in float32.
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    refuse_scalars(model)
    for unit in units:
        fully_shard(unit, reshard_after_forward=reshard_after_forward, **options)
    fully_shard(model, **options)


def refuse_scalars(model: nn.Module) -> None:
    """Refuse a model with a parameter that has no rows to be sharded.

    Raises:
        UserError: naming the parameters.
    """
    scalars = [name for name, parameter in model.named_parameters() if parameter.ndim == 0]
    if scalars:
        raise UserError("distributed.strategy", f"{few(scalars)}: a scalar cannot be sharded", "give it the shape [1]")


def reshard(model: nn.Module) -> None:
    """Free the whole parameters that a forward without a backward has left, so that the model has its shards alone."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def shard_units(model: nn.Module) -> list[nn.Module]:
    """The modules whose parameters are gathered one module at a time: what `model.shard_units()` returns; or its `blocks`; or
    the modules of the `nn.ModuleList` that holds most parameters; or else its children.

    A module that shares a parameter with another part of the model is left out, since FSDP would break the tie.

    Raises:
        UserError: `shard_units` is no method, or returns something else than modules inside the model that can be gathered one
            at a time.
    """
    own = getattr(model, "shard_units", None)
    if own is not None:
        units = list(own()) if callable(own) else []
        if problem := _problem_of(model, units):
            name = f"{type(model).__name__}.shard_units"
            fix = "make it a method that returns modules to be gathered one at a time"
            raise UserError("distributed.strategy", f"{name} {problem}", fix)
        return units
    blocks = getattr(model, "blocks", None)
    if isinstance(blocks, nn.ModuleList) and len(blocks):
        return _apart(model, list(blocks))
    lists = [
        [part for part in each if _has_forward(part)] for each in model.modules() if isinstance(each, nn.ModuleList)
    ]
    largest = max(lists, key=lambda parts: sum(map(num_parameters, parts)), default=[])
    if largest:
        return _apart(model, largest)
    children = [child for child in model.children() if num_parameters(child) and _has_forward(child)]
    units = _apart(model, children)
    names = [name for name, child in model.named_children() if child in units]
    text = "%s has no blocks to be sharded one by one (shard_units(), or an nn.ModuleList): using %s"
    logger.info(text, type(model).__name__, few(names) if names else "the whole model as one")
    return units


def _problem_of(model: nn.Module, units: Sequence[object]) -> str:
    """What is wrong with the modules that a model names; empty if nothing is."""
    inside = set(model.modules()) - {model}
    modules = [unit for unit in units if isinstance(unit, nn.Module) and unit in inside]
    if not units or len(modules) < len(units):
        return "gives something else than modules inside the model"
    if len(set(modules)) < len(modules):
        return "names a module twice"
    if not all(map(_has_forward, modules)):
        return "names a module without a forward, such as an nn.ModuleList"
    return (
        "" if _apart(model, modules) == modules else "gives modules that share parameters with other parts of the model"
    )


def _apart(model: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """Those that share no parameter with another part of the model."""
    uses = _uses(model)
    return [unit for unit in units if all(uses[parameter] == n for parameter, n in _uses(unit).items())]


def _uses(module: nn.Module) -> Counter[nn.Parameter]:
    """In how many places each parameter is."""
    return Counter(p for part in module.modules() for p in part._parameters.values() if p is not None)


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def num_parameters(module: nn.Module) -> int:
    """Numbers in its parameters, over all ranks."""
    return sum(parameter.numel() for parameter in module.parameters())


def sharded_averaging(model: nn.Module, mesh: DeviceMesh, *, keeps_whole: bool) -> GradientAveraging:
    """The averaging of a model that `shard_model` has sharded.

    Args:
        model: with all its parameters in shards.
        keeps_whole: keep the sum of a window's gradients whole on each rank until its last backward, which averages them once;
            otherwise every backward averages, and only shards are kept.
    """
    replicas = mesh.size(0) if mesh.ndim == 2 else 1
    root: Any = model

    @contextmanager
    def no_sync() -> Iterator[None]:
        # Over replicas, sums of shards are averaged once in either case.
        defer = root.set_requires_gradient_sync if keeps_whole else root.set_requires_all_reduce
        defer(False)
        try:
            yield
        finally:
            defer(True)

    is_deferred = keeps_whole or replicas > 1
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return GradientAveraging(no_sync if is_deferred else nullcontext, partial(_refuse_unused, trained), replicas)


def _refuse_unused(trained: Mapping[str, nn.Parameter]) -> None:
    """Refuse a window that gave a parameter no gradient.

    Raises:
        UserError: naming the parameters.
    """
    if names := [name for name, parameter in trained.items() if parameter.grad is None]:
        raise _unused(names, "use them in every micro-batch, or freeze them with requires_grad_(False)")


def _refuse_unreduced_buckets(model: DistributedDataParallel) -> None:
    """Refuse a window whose last backward left a parameter out.

    DDP then waits for its gradient for ever: it averages none of the same bucket, says nothing until its next forward, and the
    ranks' weights drift apart meanwhile.

    Raises:
        UserError: naming the parameters.
    """
    try:
        model._check_reducer_finalized()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        _, _, indices = str(error).partition(f"did not receive grad for rank {dist.get_rank()}: ")
        own = [name for name, parameter in model.module.named_parameters() if parameter.requires_grad]
        names = [own[int(index)] for index in indices.partition("\n")[0].split() if index.isdecimal()]
        fix = "use them in every micro-batch, freeze them with requires_grad_(False), or set "
        raise _unused(names, f"{fix}distributed.find_unused_parameters = true", str(error)) from None


def _unused(names: Sequence[str], fix: str, otherwise: str = "") -> UserError:
    which = counted(len(names), "parameter") if names else "a parameter"
    problem = (
        f"{which} took no part in a step's last micro-batch, so that the gradients of the ranks cannot be averaged: "
    )
    return UserError("model.target", problem + (few(names) if names else otherwise), fix)
