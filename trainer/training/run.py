"""A run: its parts, and where it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer.config.schema import RunConfig
from trainer.data.batch import MicroBatch
from trainer.data.loader import Reading
from trainer.distributed.env import RankInfo
from trainer.distributed.strategy import Strategy
from trainer.distributed.watchdog import Watchdog
from trainer.ledger.ledger import Ledger
from trainer.metrics.aggregate import Recorder, Reported
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
    reached: int  # see `Length`
    window: Sequence[MicroBatch]
    launched: Launched
    lr: float


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Run:
    """The parts of a run, made by `open_run`. Only `position` and their own state change."""

    plan: Plan
    config: RunConfig
    length: Length
    info: RankInfo
    device: torch.device
    strategy: Strategy
    run_dir: RunDir
    state: TrainState
    tracker: MetricsTracker
    position: Position
    stop: StopRequest
    events: EventWriter | None
    """Rank 0 only."""
    wandb_run_id: str | None  # likewise
    reading: Reading
    loss: Loss
    row_model: nn.Module
    """The model as it runs one row."""
    train_step: TrainStep
    schedule: Schedule
    evaluator: Evaluator | None
    num_micros: int
    """Micro-batches of each data shard in every step, without `growth`."""
    growth: Any
    """Decides on a step's micro-batches; None: all steps have equally many."""
    periods: Set[int]
    """Multiples of these are read before the next step: evaluations, saves, decisions."""
    extensions: Extensions
    saver: Saver
    watchdog: Watchdog

    @property
    def diagnostics(self) -> Diagnostics:
        """Guards of what only measures or shows: its failure costs one warning, never the run."""
        return self.state.tracker.diagnostics

    @property
    def recorder(self) -> Recorder:
        """Holds the metrics recorded since the last logged step."""
        return self.position.unlogged[0]

    @property
    def model(self) -> nn.Module:
        """The model itself, without DDP."""
        return self.state.model

    def ledger_of(self, micro: MicroBatch) -> Ledger | None:
        """The ledger that carries a micro-batch's states; None for a model without state."""
        return self.state.shards[micro.shard].ledger

    @property
    def gns(self) -> GradientNoiseScale | None:
        """None if the noise scale is off."""
        return self.state.gns

    @property
    def measures_noise(self) -> bool:
        """Whether the noise scale is on and has not failed."""
        return self.gns is not None and self.diagnostics.best_effort("gns").enabled

    def record(self, name: str, value: Reported) -> None:
        """Count a metric on this rank until the next logged step, which reports it.

        The catalog says how the values between two logged steps and those of all ranks combine
        (`trainer.metrics.register` adds metrics). A value that is no number is left out.

        Args:
            value: a number, a tensor of one element, a pair (sum, weight), or None if unknown.
        """
        self.recorder.add({name: value})

    def event(self, event: Mapping[str, Any]) -> None:
        """Write to events.jsonl (rank 0; other ranks do nothing)."""
        if self.events is not None:
            self.diagnostics.best_effort("events.jsonl").run(self.events.write, event)
