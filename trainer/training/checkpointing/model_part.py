"""The model's part of a checkpoint: weights, optimizer and loss scaling, whole or in shards, for any number of ranks.

Tensors have the names `model.<name>` and `optimizer.<parameter>.<key>`. A rank that holds shards writes its rows of them, rank
0 also what is not sharded; of several replicas, the first one's ranks write.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import UserError
from trainer.model.weights import tied_names
from trainer.shards import as_shard, is_dtensor, own_part, own_range
from trainer.training.checkpointing.checkpoint import TensorPart, model_file
from trainer.training.checkpointing.tensor_files import Rows, TensorFiles, pack, unpack
from trainer.training.step.optimizer import load_named_state, named_state
from trainer.wording import few


class OtherModel(Exception):
    """A checkpoint holds the tensors of another model; the message names them."""


def model_ranks(model: nn.Module) -> list[int]:
    """The ranks that write a file of it."""
    mesh = _mesh(model)
    return [0] if mesh is None else list(range(mesh.size(mesh.ndim - 1)))


def model_part(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, *, rank: int
) -> TensorPart | None:
    """What this rank writes; None: nothing.

    Raises:
        UserError: an optimizer of the user's own keeps what is no shard, and may differ by rank.
    """
    if rank not in model_ranks(model):
        return None
    state = model.state_dict()
    shared = tied_names(model)
    kept = {name: value for name, value in state.items() if name not in shared}
    tree = {"model": kept, "optimizer": named_state(optimizer, model), "scaler": scaler.state_dict()}
    values, tensors = pack(tree)
    rows = {}
    for name, tensor in tensors.items():
        if is_dtensor(tensor):
            start, stop = own_range(tensor)
            if start < stop:
                rows[name] = Rows(own_part(tensor), start, tuple(tensor.shape))
            continue
        if tensor.numel() > 1 and name.startswith("optimizer.") and _mesh(model) is not None:
            problem = f"keeps {name.removeprefix('optimizer.')}, which is not sharded as its parameter is"
            raise UserError(
                "optimizer.target", problem, "make it with torch.zeros_like(parameter), which gives a shard"
            )
        if rank == 0:
            rows[name] = Rows.all_of(tensor)
    if rank != 0:
        return TensorPart(rows, shapes={})
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return TensorPart(rows, {**values, "shared": shared}, shapes)


def open_model(path: Path, state: Mapping[str, Any], *, rank: int = 0) -> TensorFiles:
    """The tensors of a checkpoint.

    Args:
        state: its state.json, which says what ranks have written them.
        rank: whose own rows will probably be asked for.

    Raises:
        DamagedFile: they cannot be read.
    """
    # The first has all names; of its own rows a rank then looks into its own file first.
    order = sorted(state["model_files"], key=lambda number: (number != 0, number != rank, number))
    return TensorFiles([path / model_file(number) for number in order])


def whole_weights(tensors: TensorFiles) -> dict[str, Tensor]:
    """The model's `state_dict()`, whole, on the CPU; tensors alone.

    Raises:
        DamagedFile: they cannot be read.
    """
    names = [name for name in tensors.shapes if name.startswith("model.")]
    found = {name.removeprefix("model."): tensors.read(name) for name in names}
    for name, owner in tensors.values.get("shared", {}).items():
        found[name] = found[owner]
    return found


def load_weights_of(model: nn.Module, saved: TensorFiles) -> None:
    """Load the weights that this rank holds.

    Raises:
        OtherModel: they are those of another model.
        DamagedFile: they cannot be read.
    """
    own, shared = model.state_dict(), tied_names(model)
    problems = _misfits(own, shared, saved)
    if problems:
        raise OtherModel(few(problems))
    given: dict[str, Any] = {}
    for name, value in own.items():
        if name not in shared:
            extra = saved.values["model"].get(name)
            given[name] = (
                _read(saved, f"model.{name}", like=value) if isinstance(value, Tensor) else unpack(extra, saved.read)
            )
    given.update({name: given[owner] for name, owner in shared.items()})
    model.load_state_dict(given)


def _misfits(own: Mapping[str, Any], shared: Mapping[str, str], saved: TensorFiles) -> list[str]:
    names = {name for name in own if name not in shared}
    there = set(saved.values["model"])
    found = [f"{name} is not in it" for name in sorted(names - there)]
    found += [f"the model has no {name}" for name in sorted(there - names)]
    for name in sorted(names & there):
        shape = saved.shapes.get(f"model.{name}")
        if isinstance(own[name], Tensor) and shape != tuple(own[name].shape):
            found.append(f"{name} has the shape {list(shape or ())}, the model's {list(own[name].shape)}")
    return found


def load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, saved: TensorFiles) -> None:
    """Load the optimizer's state that this rank holds, but not its settings, which are the config's.

    Raises:
        ValueError: it is of other parameters.
        DamagedFile: it cannot be read.
    """
    parameters = dict(model.named_parameters())
    by_name = saved.values["optimizer"]
    unknown = sorted(by_name.keys() - parameters.keys())
    if unknown:
        raise ValueError(f"it has a state of {few(unknown)}, which the model does not have")
    states = {name: unpack(state, partial(_read, saved, like=parameters[name])) for name, state in by_name.items()}
    load_named_state(optimizer, model, states)


def scaler_state(saved: TensorFiles) -> dict[str, Any]:
    """The loss scaler's `state_dict()`."""
    state: dict[str, Any] = saved.values["scaler"]
    return state


def _read(saved: TensorFiles, name: str, *, like: Tensor) -> Tensor:
    """A tensor, or this rank's shard of it if it is sharded as `like` is."""
    if is_dtensor(like) and saved.shapes.get(name) == tuple(like.shape):
        return as_shard(saved.read(name, *own_range(like)), like)
    return saved.read(name)


def _mesh(model: nn.Module) -> Any:
    return next((p.device_mesh for p in model.parameters() if is_dtensor(p)), None)
