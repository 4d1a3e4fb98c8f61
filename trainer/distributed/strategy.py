"""How ranks share a model: each has all of it (DDP), or rows of its tensors (a part of the run)."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.distributed.env import RankInfo, num_nodes
from trainer.errors import UserError
from trainer.options import StrategyOptions
from trainer.wording import counted, few

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

logger = logging.getLogger(__name__)
DDP = StrategyOptions()
FREEZE = "freeze them with requires_grad_(False)"


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
    """The layout by `fully_shard`, and the group that averages gradients, if one has these ranks.

    A ValueError for another layout; its text completes "not possible with".
    """
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
    return layout, world if world is not None and mesh.size() == world.size() else None


def unsharded_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The trained parameters as autograd sees them, or a ValueError. All ranks must call it."""
    from torch.distributed.fsdp import FSDPModule

    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    found: dict[str, nn.Parameter] = {}
    for module in modules:  # one at a time: the whole model may not fit
        module.unshard()
        found |= {name: each for name, each in model.named_parameters() if not is_dtensor(each)}
        module.reshard()
    names = [name for name, each in model.named_parameters() if each.requires_grad]
    if not found.keys() >= {*names}:
        raise ValueError("parameters that stay sharded in the backward (tensor parallelism)")
    return [found[name] for name in names]


def own_range(tensor: Tensor) -> tuple[int, int]:
    """The rows [start, stop) of the whole tensor that this rank holds."""
    rows = tensor.shape[0] if tensor.ndim else 1
    if not is_dtensor(tensor):
        return 0, rows
    mesh = tensor.device_mesh
    most = -(-rows // mesh.size(mesh.ndim - 1))  # torch gives the last ranks fewer, or none
    start = min(mesh.get_local_rank(mesh.ndim - 1) * most, rows)
    return start, min(start + most, rows)


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
    return list(range((layout_of(model.parameters()) or Layout(1, 1)).shards))


def part_to_save(tensor: Tensor, rank: int) -> tuple[Tensor, int] | None:
    """The rows that one of the `saving_ranks` saves, and the first one's index; None: it saves none."""
    if not is_dtensor(tensor) and rank > 0:  # whole: rank 0 saves it
        return None
    start, stop = own_range(tensor)
    if is_dtensor(tensor) and start == stop:
        return None
    return own_part(tensor), start


def layout_for(options: StrategyOptions, info: RankInfo) -> Layout | None:
    """How a run lays out its parameters; None if every rank holds the whole model."""
    if options.strategy == "ddp" or info.world_size == 1:
        return None
    replicas = 1
    if options.strategy == "hsdp":
        replicas = options.replicas or num_nodes(info)
    if info.world_size % replicas:
        problem = f"{replicas} replicas do not divide {info.world_size} ranks"
        raise UserError("distributed.replicas", problem, "set it to a number that does")
    return Layout(replicas, info.world_size // replicas)


class Strategy:
    """How ranks share a model and average gradients; this one is that of a single rank."""

    is_sharded = False  # a forward needs all ranks, since none holds the whole model
    copies = 1  # how many ranks hold the same part of the averaged gradient
    groups: Sequence[dist.ProcessGroup] = ()  # of a part of the ranks; all are in equally many
    stream: torch.cuda.Stream | None = None  # where a graph of DDP's backward has to be captured
    no_sync: Callable[[], AbstractContextManager[None]] = nullcontext
    """The context of all backwards of a window but the last, which averages."""

    def shard(self, model: nn.Module) -> None:
        """Leave this rank its part of the parameters."""

    def wrap(self, row_model: nn.Module, model: nn.Module) -> nn.Module:
        """The module for the training step: `row_model`, which runs rows through `model`."""
        return row_model

    def reduced(self, gradients: list[Tensor]) -> list[Tensor]:
        """This rank's part of the averaged gradients. UserError: a parameter was left out."""
        return gradients

    def most(self, number: int) -> int:
        """The largest of the ranks' numbers, if all must run as many forwards."""
        return number

    def reshard(self, model: nn.Module) -> None:
        """Free the whole parameters that a forward without a backward has left."""


class Replicated(Strategy):
    """DDP: each rank holds the whole model; gradients are averaged in a window's last backward."""

    def __init__(self, options: StrategyOptions = DDP, *, world_size: int, device: torch.device) -> None:
        self.copies = world_size
        self._options, self._device = options, device
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def wrap(self, row_model: nn.Module, model: nn.Module) -> nn.Module:
        """DDP around it."""
        context: AbstractContextManager[object] = nullcontext()
        if self.stream is not None:  # of None, torch's would begin CUDA all the same
            context = torch.cuda.stream(self.stream)
        with context:
            self._ddp = DistributedDataParallel(
                row_model,
                device_ids=self.stream and [self._device],
                gradient_as_bucket_view=True,  # otherwise every gradient is held twice
                find_unused_parameters=self._options.find_unused_parameters,
            )
        return self._ddp

    def no_sync(self) -> AbstractContextManager[None]:
        """DDP's own."""
        return self._ddp.no_sync()

    def reduced(self, gradients: list[Tensor]) -> list[Tensor]:
        """The gradients, unless DDP still waits for that of a parameter that was left out."""
        # It averages none of the same bucket then, and says nothing until its next forward, while
        # the ranks' weights drift apart.
        try:
            self._ddp._check_reducer_finalized()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            _, _, indices = str(error).partition(f"indices which did not receive grad for rank {dist.get_rank()}: ")
            own = [name for name, parameter in self._ddp.module.named_parameters() if parameter.requires_grad]
            names = [own[int(index)] for index in indices.partition("\n")[0].split() if index.isdecimal()]
            fix = f"{FREEZE}, or set distributed.find_unused_parameters = true"
            raise unused_error(names, f"use them in every micro-batch, {fix}", str(error)) from None
        return gradients


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The model's `blocks`, or the modules of its largest `nn.ModuleList`; maybe none."""
    blocks = getattr(model, "blocks", None)
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    if isinstance(blocks, nn.ModuleList) and len(blocks):
        lists = [blocks]
    found = [[part for part in dict.fromkeys(each) if has_forward(part)] for each in lists]
    return max(found, key=lambda parts: sum(map(num_parameters, parts)), default=[])


def compile_blocks(model: nn.Module) -> None:
    """Have a model compiled block by block: what blocks share is compiled once."""
    whole = [model]
    if layout_of(model.parameters()) is not None:  # a sharded root has hooks of its own
        whole = list(model.children())
    for block in blocks_of(model) or whole:
        block.compile()


def has_forward(module: nn.Module) -> bool:
    """Whether it can run: a list of modules cannot."""
    return type(module).forward is not nn.Module.forward


def num_parameters(module: nn.Module) -> int:
    """Number of elements of its parameters, over all ranks."""
    return sum(parameter.numel() for parameter in module.parameters())


def unused_error(names: Sequence[str], fix: str, otherwise: str = "") -> UserError:
    """The error of parameters that had no part in the loss; `otherwise`: known without names."""
    which = counted(len(names), "parameter") if names else "a parameter"
    problem = f"{which} took no part in a step's last micro-batch, so that the gradients of the "
    problem += f"ranks cannot be averaged: {few(names) or otherwise}"
    return UserError("model.target", problem, fix)
