"""What a checkpoint holds: the parts of a run that have a state, and where the run is."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from trainer.data.blend import BlendDataset
from trainer.distributed.shards import as_shard, layout_of, own_range, part_to_save, saving_ranks
from trainer.errors import UserError
from trainer.ledger.ledger import Ledger
from trainer.metrics.aggregate import Recorder, Reporter
from trainer.metrics.noise_scale.hooks import GradientNoiseScale
from trainer.metrics.tracker import MetricsTracker
from trainer.model.protocol import tied_names
from trainer.training.checkpointing.tensor_files import Rows, TensorFiles, TensorPart, model_file, pack, unpack
from trainer.training.step.optimizer import load_named_state, named_state
from trainer.wording import few


class DataShard(NamedTuple):
    """A part of the data, what reads it, and the states that its groups carry.

    Attributes:
        number: among those of all ranks.
        ledger: None for a model without state. Shards of a rank whose groups may move share one.
    """

    number: int
    dataset: BlendDataset
    ledger: Ledger | None


@dataclass
class TrainState:
    """The parts of a run that have a state of their own; extensions have theirs besides."""

    model: nn.Module
    """Without DDP."""
    shards: Sequence[DataShard]
    """Those of this rank: one, or its part of `distributed.shards`."""
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    tracker: MetricsTracker
    gns: GradientNoiseScale | None = None

    @property
    def dataset(self) -> BlendDataset:
        """Of the first shard; those of the others are alike."""
        return self.shards[0].dataset

    @property
    def ledgers(self) -> dict[int, Ledger]:
        """By the number of the shard that saves it; empty for a model without state."""
        found = {shard.ledger: shard.number for shard in reversed(self.shards) if shard.ledger is not None}
        return {number: ledger for ledger, number in reversed(found.items())}

    @property
    def reporters(self) -> list[tuple[str, int, Reporter]]:
        """What collects metrics itself, drained on logged steps: its name, and whose of this rank's shards it is."""
        first = self.shards[0].number
        found: list[tuple[str, int, Reporter]] = []
        for number, ledger in self.ledgers.items():
            found.append(("ledger metrics", number - first, ledger))
        if self.gns is not None:
            found.append(("gns", 0, self.gns))
        return found

    def shared(self) -> dict[str, Any]:
        """The states that are the same on all ranks and fit JSON."""
        return {
            "tracker": self.tracker.state_dict(),
            "gns": self.gns.state_dict() if self.gns is not None else None,
            "state_layout": self.state_layout,
        }

    @property
    def state_layout(self) -> list[list[Any]] | None:
        """What the rows of the ledger stand for, see `StateLayout`; None for a model whose states are rows already."""
        layout = getattr(self.model, "state_layout", None)
        return None if layout is None else layout.to_json()

    def load_shared(self, saved: Mapping[str, Any]) -> None:
        """Continue from `shared`."""
        self.tracker.load_state_dict(saved["tracker"])
        if self.gns is not None and saved["gns"] is not None:
            self.gns.load_state_dict(saved["gns"])


SHOWN_LOSSES = 8
"""Steps at the beginning and at the end of a run, whose losses its last lines compare."""
# What the host counts itself, beside the data set's metrics: see `Position.unlogged`.
HOST_KEYS = (
    "non_finite_steps",
    "grad_scale",
    "train/micro_batches",
    "checkpoint/save_sec",
    "time/data_sec",
    "time/forward_backward_sec",
    "time/optimizer_sec",
    "time/slowest_rank_sec",
    "time/fastest_rank_sec",
    "stream_mixing/masked_share",
    "data/fill",
)


@dataclass
class Position:
    """Where a run is, and what it has counted on the way."""

    data_states: list[Any]
    """Of this rank's data shards, after the last batch of the last finished step."""
    unlogged: list[Recorder]
    """What each of them has counted since the last logged step; the first also what the host has."""
    step: int = 0
    """Last finished step."""
    last_step: int | None = None
    """The run's last; None: not known yet, the run's length is in tokens."""
    reached: int = 0
    """How far it has come with the last finished step, see `Length`."""
    tokens: int = 0
    """Target tokens over all ranks through the last finished step, without those of skipped steps."""
    tokens_before: int = 0
    """The same without the last finished step."""
    micro_batches: int = 0
    """Of the last finished step; 0: not known."""
    micro_batches_since: int = 1
    """The first step with so many."""
    evaluation_is_due: bool = False
    """After the last finished step, or it was cut short; a resumed run begins with it."""
    skipped_in_a_row: int = 0
    first_losses: list[tuple[int, float]] = field(default_factory=list)
    """The first `SHOWN_LOSSES` steps that this process trained with tokens, and their losses."""
    last_losses: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=SHOWN_LOSSES))
    last_eval: tuple[int, dict[str, float]] | None = None
    """The step of the last evaluation, and what it found."""

    @classmethod
    def of(cls, state: TrainState, step: int = 0) -> Self:
        """The position after `step`, of which `state` holds the data sets' states."""
        leave_out = state.tracker.diagnostics.best_effort("metrics").leave_out
        states = [shard.dataset.state_dict() for shard in state.shards]
        return cls(states, [Recorder(leave_out=leave_out) for _ in states], step=step)

    def counts(self, index: int) -> dict[str, Any]:
        """What this rank's shard `index` has counted since the last logged step, for a checkpoint between two of them."""
        return {"pool": self.unlogged[index].state_dict(), "in_a_row": self.skipped_in_a_row}

    def load_counts(self, index: int, saved: Mapping[str, Any]) -> None:
        """Continue from `counts`."""
        self.unlogged[index].load_state_dict(saved["pool"])
        self.skipped_in_a_row = int(saved["in_a_row"])


def model_part(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, *, rank: int
) -> TensorPart | None:
    """What this rank writes; None: nothing.

    Raises:
        UserError: an optimizer of the user's own keeps what is no shard, and may differ by rank.
    """
    if rank not in saving_ranks(model):
        return None
    state = model.state_dict()
    shared = tied_names(model)
    kept = {name: value for name, value in state.items() if name not in shared}
    tree = {"model": kept, "optimizer": named_state(optimizer, model), "scaler": scaler.state_dict()}
    values, tensors = pack(tree)
    rows, is_sharded = {}, layout_of(model.parameters()) is not None
    for name, tensor in tensors.items():
        is_whole = layout_of([tensor]) is None
        if is_whole and is_sharded and tensor.numel() > 1 and name.startswith("optimizer."):
            problem = f"keeps {name.removeprefix('optimizer.')}, which is not sharded as its parameter is"
            fix = "make it with torch.zeros_like(parameter), which gives a shard"
            raise UserError("optimizer.target", problem, fix)
        if (part := part_to_save(tensor, rank)) is not None:
            rows[name] = Rows(*part, tuple(tensor.shape))
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
        CheckpointError: they cannot be read.
    """
    # The first has all names; of its own rows a rank then looks into its own file first.
    order = sorted(state["model_files"], key=lambda number: (number != 0, number != rank, number))
    return TensorFiles([path / model_file(number) for number in order])


def load_weights_of(model: nn.Module, saved: TensorFiles) -> None:
    """Load the weights that this rank holds.

    Raises:
        UserError: they are those of another model.
        CheckpointError: they cannot be read.
    """
    own, shared = model.state_dict(), tied_names(model)
    problems = _misfits(own, shared, saved)
    if problems:
        problem = f"the checkpoint holds another model: {few(problems)}"
        raise UserError("--resume", problem, "resume with the [model] and the release it was trained with")
    given: dict[str, Any] = {}
    for name, value in own.items():
        if name not in shared:
            is_tensor, extra = isinstance(value, Tensor), saved.values["model"].get(name)
            given[name] = _read(saved, f"model.{name}", like=value) if is_tensor else unpack(extra, saved.read)
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
        CheckpointError: it cannot be read.
    """
    parameters = dict(model.named_parameters())
    by_name = saved.values["optimizer"]
    unknown = sorted(by_name.keys() - parameters.keys())
    if unknown:
        raise ValueError(f"it has a state of {few(unknown)}, which the model does not have")
    states = {name: unpack(state, partial(_read, saved, like=parameters[name])) for name, state in by_name.items()}
    load_named_state(optimizer, model, states)


def _read(saved: TensorFiles, name: str, *, like: Tensor) -> Tensor:
    """A tensor, or this rank's shard of it if it is sharded as `like` is."""
    if layout_of([like]) is not None and saved.shapes.get(name) == tuple(like.shape):
        return as_shard(saved.read(name, *own_range(like)), like)
    return saved.read(name)
