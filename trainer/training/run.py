"""A run: its parts, and where it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trainer.config.schema import RunConfig
from trainer.data.batch import MicroBatch
from trainer.distributed.env import RankInfo
from trainer.distributed.strategy import Strategy
from trainer.distributed.watchdog import Watchdog
from trainer.ledger.ledger import Ledger
from trainer.metrics.aggregate import Operations, Recorder, Reported, Reporter
from trainer.metrics.best_effort import Diagnostics
from trainer.metrics.noise_scale.hooks import GradientNoiseScale
from trainer.metrics.sinks import EventWriter
from trainer.metrics.tracker import MetricsTracker
from trainer.objective.loss import Loss
from trainer.training.checkpointing.saver import Saver
from trainer.training.checkpointing.train_state import Position, TrainState
from trainer.training.evaluator import Evaluator
from trainer.training.extension import Extensions
from trainer.training.run_dir import RunDir
from trainer.training.setup.plan import Plan
from trainer.training.signals import StopRequest
from trainer.training.step.schedule import Length, Schedule
from trainer.training.step.step import Launched, TrainStep


@dataclass(frozen=True)
class StepInFlight:
    """A step that was launched and is not finished."""

    step: int
    reached: int
    """See `Length`."""
    window: Sequence[MicroBatch]
    launched: Launched
    lr: float


@dataclass
class Run:
    """The parts of a run, made by `open_run`. During the run only `position` changes, and what the parts hold."""

    plan: Plan
    info: RankInfo
    device: torch.device
    strategy: Strategy
    run_dir: RunDir
    state: TrainState
    position: Position
    stop: StopRequest
    is_resumed: bool
    """It continues from a checkpoint, so its data may be exhausted."""
    moments: dict[str, float]
    """Of its start; empty after the first step."""
    events: EventWriter | None = None
    """Rank 0 only."""
    wandb_run_id: str | None = None
    """Rank 0 only."""
    failure: str = ""
    """Set by an extension, on all ranks alike, to end the run."""
    evaluator: Evaluator | None = None
    growth: Any = None
    """Decides on a step's micro-batches; None: all steps have as many."""
    loaders: list[Iterator[MicroBatch]] = field(init=False)
    """Of this rank's data shards."""
    last_read: list[MicroBatch] = field(default_factory=list)
    """Of each loader; empty before the first step."""
    schedule: Schedule = field(init=False)
    row_model: nn.Module = field(init=False)
    """What a row is run through."""
    loss: Loss = field(init=False)
    train_step: TrainStep = field(init=False)
    extensions: Extensions = field(init=False)
    periods: Set[int] = field(init=False)
    """A step that is a multiple of one of these is read before the next is launched."""
    saver: Saver = field(init=False)
    watchdog: Watchdog = field(init=False)
    reporters: list[tuple[str, int, Reporter]] = field(init=False)
    """Parts that collect metrics themselves, drained on logged steps: the name of each, and whose data shard's it is."""
    operations: Operations = field(init=False)
    """How every metric of any rank combines; the same on all ranks."""
    config: RunConfig = field(init=False)
    length: Length = field(init=False)
    num_micros: int = field(init=False)
    """Micro-batches of every step of each data shard, where nothing makes that change."""
    tracker: MetricsTracker = field(init=False)
    diagnostics: Diagnostics = field(init=False)
    """Guards of what only measures or shows: its failure costs one warning, never the run."""
    recorder: Recorder = field(init=False)
    """Holds what was recorded since the last logged step."""

    @property
    def model(self) -> nn.Module:
        """The model itself, without DDP."""
        return self.state.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.state.optimizer

    def ledger_of(self, micro: MicroBatch) -> Ledger | None:
        """What carries a micro-batch's states; None for a model without state."""
        return self.state.shards[micro.shard].ledger

    @property
    def gns(self) -> GradientNoiseScale | None:
        """None if the noise scale is off."""
        return self.state.gns

    @property
    def measures_noise(self) -> bool:
        """Whether the noise scale is on and has not failed."""
        return self.gns is not None and self.diagnostics.best_effort("gns").enabled

    def __post_init__(self) -> None:
        self.config = self.plan.config
        self.length = self.plan.length
        self.num_micros = self.config.micro_batches.first
        self.tracker = self.state.tracker
        self.diagnostics = self.state.tracker.diagnostics
        self.recorder = self.position.unlogged[0]

    def record(self, name: str, value: Reported) -> None:
        """Count a metric on this rank until the next logged step, which reports it.

        The catalog says how the values between two logged steps and those of all ranks combine (`trainer.metrics.register`
        adds metrics). A value that is no number is left out with one warning.

        Args:
            value: a number, a tensor of one element, a pair (sum, weight), or None: it should be there and is not known.
        """
        self.recorder.add({name: value})

    def event(self, event: Mapping[str, Any]) -> None:
        """Write to events.jsonl (rank 0; other ranks do nothing)."""
        if self.events is not None:
            self.diagnostics.best_effort("events.jsonl").run(self.events.write, event)
