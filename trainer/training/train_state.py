"""What a checkpoint holds: the parts of a run that have a state, its position, their tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from trainer.data.blend import BlendDataset
from trainer.distributed.strategy import as_shard, layout_of, own_range, part_to_save, saving_ranks
from trainer.errors import UserError
from trainer.ledger.ledger import Ledger
from trainer.metrics.aggregate import Recorder, Reporter
from trainer.metrics.gradient_noise import GradientNoiseScale
from trainer.metrics.tracker import MetricsTracker
from trainer.model.protocol import tied_names
from trainer.training.optimizer import group_counters, load_named_state, named_state
from trainer.training.tensor_files import Rows, TensorFiles, TensorPart, model_file, pack, unpack
from trainer.wording import few


class DataShard(NamedTuple):
    """A part of the data, its reader, and the states that its groups carry."""

    number: int  # among the shards of all ranks
    dataset: BlendDataset
    ledger: Ledger | None  # None for a model without state


@dataclass
class TrainState:
    """The parts of a run that have a state of their own; extensions have theirs besides."""

    model: nn.Module  # without DDP
    shards: Sequence[DataShard]  # those of this rank: one, or its part of `distributed.shards`
    optimizer: torch.optim.Optimizer
    tracker: MetricsTracker
    gns: GradientNoiseScale | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Of extensions, by name: saved as the model's are, in shards where it is."""

    @property
    def ledgers(self) -> dict[int, Ledger]:
        """By the number of its shard; empty for a model without state."""
        return {shard.number: shard.ledger for shard in self.shards if shard.ledger is not None}

    @property
    def reporters(self) -> list[tuple[str, int, Reporter]]:
        """Parts that collect metrics themselves: name, index of this rank's shard, and the part."""
        first = self.shards[0].number  # shards of a rank are neighbours
        found: list[tuple[str, int, Reporter]] = []
        for number, ledger in self.ledgers.items():
            found.append(("ledger metrics", number - first, ledger))
        if self.gns is not None:
            found.append(("gns", 0, self.gns))
        return found

    @property
    def state_layout(self) -> list[list[Any]] | None:
        """The meaning of the ledger's rows: its leaves; None if states are rows already."""
        layout = getattr(self.model, "state_layout", None)
        return None if layout is None else layout.to_json()


@dataclass
class Position:
    """Where a run is, and its counts on the way."""

    data_states: list[Any]  # of this rank's data shards, behind the last finished step
    unlogged: list[Recorder]
    """The counts of each since the last logged step; the first also has those of the rank."""
    step: int = 0  # last finished step
    last_step: int | None = None
    """The run's last step; None: not known yet, the run's length is in tokens."""
    reached: int = 0  # the progress after the last finished step, see `Length`
    tokens: int = 0
    """Target tokens over all ranks through the last finished step, without skipped steps."""
    tokens_before: int = 0  # the same without the last finished step
    evaluation_is_due: bool = False
    """After the last finished step, or it was cut short; a resumed run begins with it."""
    boundary_is_due: bool = False  # the same for extensions, which follow the evaluation
    skipped_in_a_row: int = 0
    untrained_steps: int = 0  # of this launch, without a token to train
    last_eval: tuple[int, dict[str, float]] | None = None  # its step and its numbers
    must_save: bool = False
    """A save is due, on all ranks alike: the next step is saved before another starts."""

    @classmethod
    def of(cls, state: TrainState, step: int = 0) -> Self:
        """The position after `step`, of which `state` holds the data sets' states."""
        leave_out = state.tracker.diagnostics.best_effort("metrics").leave_out
        states = [shard.dataset.state_dict() for shard in state.shards]
        return cls(states, [Recorder(leave_out=leave_out) for _ in states], step=step)


def model_part(state: TrainState, *, rank: int) -> TensorPart | None:
    """The part of model, optimizer and extensions that this rank writes; None: nothing.

    A UserError if a custom optimizer keeps a tensor that is no shard: it may differ by rank.
    """
    model = state.model
    if rank not in saving_ranks(model):
        return None
    shared = tied_names(model)
    kept = {name: value for name, value in model.state_dict().items() if name not in shared}
    states, counters = named_state(state.optimizer, model), group_counters(state.optimizer)
    values, tensors = pack({"model": kept, "optimizer": states, "groups": counters})
    tensors |= state.tensors
    rows, is_sharded = {}, layout_of(model.parameters()) is not None
    for name, tensor in tensors.items():
        is_whole = layout_of([tensor]) is None
        # A single number, such as a count of steps, is the same on all ranks.
        if is_whole and is_sharded and tensor.numel() > 1 and name.startswith("optimizer."):
            problem = f"keeps {name.removeprefix('optimizer.')}, not sharded as its parameter is"
            fix = "make it with torch.zeros_like(parameter), which gives a shard"
            raise UserError("optimizer.target", problem, fix)
        part = part_to_save(tensor, rank)
        if part is not None:
            rows[name] = Rows(*part, tuple(tensor.shape))
    if rank != 0:  # rank 0, which has rows of each tensor, says what they are
        return TensorPart(rows)
    return TensorPart(rows, {**values, "shared": shared})


def open_model(path: Path, state: Mapping[str, Any], *, rank: int = 0) -> TensorFiles:
    """The tensors of a checkpoint with this state.json; mostly the rows of `rank` will be read."""
    # Rank 0's file has all names; after it a rank looks for its rows in its own file first.
    order = sorted(state["model_files"], key=lambda number: (number != 0, number != rank, number))
    return TensorFiles([path / model_file(number) for number in order])


def load_weights_of(model: nn.Module, saved: TensorFiles) -> None:
    """Load the weights that this rank holds. A UserError if they are those of another model."""
    whole, shared = model.state_dict(), tied_names(model)
    own = {name: value for name, value in whole.items() if name not in shared}
    there = {name: saved.shapes.get(f"model.{name}") for name in saved.values["model"]}
    problems = misfits(own, there)
    if problems:
        problem = f"the checkpoint holds another model: {few(problems)}"
        fix = "resume with the [model] and the release it was trained with"
        raise UserError("--resume", problem, fix)
    given: dict[str, Any] = {}
    for name, value in own.items():
        if isinstance(value, Tensor):
            given[name] = read_like(saved, f"model.{name}", like=value)
        else:  # extra state of a module
            given[name] = unpack(saved.values["model"].get(name), saved.read)
    # Tied weights are saved once.
    given.update({name: given[owner] for name, owner in shared.items()})
    model.load_state_dict(given)


def misfits(own: Mapping[str, Any], there: Mapping[str, tuple[int, ...] | None]) -> list[str]:
    """How saved weights of these shapes (None: no tensor) differ from a model's own."""
    found = [f"{name} is not in it" for name in own if name not in there]
    found += [f"the model has no {name} of its own" for name in there if name not in own]
    for name, value in own.items():
        if name in there and isinstance(value, Tensor) and there[name] != tuple(value.shape):
            found.append(f"{name} has the shape {there[name]}, the model's {tuple(value.shape)}")
    return found


def load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, saved: TensorFiles) -> None:
    """Load the optimizer's state that this rank holds; its settings are those of the config."""
    parameters = dict(model.named_parameters())
    by_name = saved.values["optimizer"]
    unknown = sorted(by_name.keys() - parameters.keys())
    if unknown:
        raise ValueError(f"it has a state of {few(unknown)}, which the model does not have")
    states = {}
    for name, state in by_name.items():
        states[name] = unpack(state, partial(read_like, saved, like=parameters[name]))
    load_named_state(optimizer, model, states)
    device = next(iter(parameters.values())).device
    groups = unpack(saved.values["groups"], lambda name: saved.read(name).to(device))
    for group, counters in zip(optimizer.param_groups, groups, strict=False):  # none of a built-in optimizer
        group.update(counters)


def read_like(saved: TensorFiles, name: str, *, like: Tensor) -> Tensor:
    """A tensor, or this rank's shard of it if it is sharded as `like` is."""
    if layout_of([like]) is not None and saved.shapes.get(name) == tuple(like.shape):
        return as_shard(saved.read(name, *own_range(like)), like)
    return saved.read(name)
