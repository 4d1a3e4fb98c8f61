"""The parts of a run, assembled, and where it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from trainer.config.schema import RunConfig
from trainer.distributed.env import RankInfo
from trainer.distributed.watchdog import Watchdog
from trainer.extensions.profile.step_profile import StepProfile
from trainer.metrics.best_effort import Diagnostics
from trainer.metrics.rank_reduction import Operations, Reporter
from trainer.metrics.sinks.jsonl import EventWriter
from trainer.metrics.spikes import SpikeDetector
from trainer.metrics.tracker import MetricsTracker
from trainer.micro_batches import MicroBatches
from trainer.training.checkpointing.saver import Saver
from trainer.training.checkpointing.train_state import Position
from trainer.training.evaluation.evaluator import Evaluator
from trainer.training.evaluation.sampler import Sampler
from trainer.training.progress import Progress
from trainer.training.run_dir import StatusKeeper
from trainer.training.signals import StopRequest
from trainer.training.step.batch_growth import BatchGrowth
from trainer.training.step.carry import StepProbe
from trainer.training.step.details import StepDetails
from trainer.training.step.schedule import Length, Schedule
from trainer.training.step.step import Launched, TrainStep
from trainer.training.step.window import Window, WindowReader


@dataclass(frozen=True)
class StepInFlight:
    """A step that was launched and is not finished."""

    step: int
    reached: int
    """See `Length.reached_by`."""
    window: Window
    launched: Launched
    lr: float


@dataclass(frozen=True)
class Run:
    """The parts of a run. Only `position` changes, and what the parts hold."""

    config: RunConfig
    info: RankInfo
    device: torch.device
    position: Position
    windows: WindowReader
    train_step: TrainStep
    length: Length
    micro_batches: MicroBatches
    num_micros: int
    """Micro-batches of every step, where nothing makes that change."""
    growth: BatchGrowth | None
    """Decides on a step's micro-batches; None: they are always the same."""
    schedule: Schedule
    details: StepDetails
    probe: StepProbe | None
    """None: off, or the model has no state."""
    reporters: Mapping[str, Reporter]
    """What a logged step reports beside its loss, by the name of its guard; `position.unlogged` and `details` among them."""
    coincidence_at: Callable[[int, int], float] | None
    """Step and its first micro-batch -> probability that two rows of the data, drawn independently, come from the same
    stream; None: where gradient noise comes from is not measured."""
    metric_keys: Mapping[str, Sequence[str]]
    """Reporter -> its keys on this rank."""
    operations: Operations
    """How each key that a reporter of any rank can have combines; the same on all ranks."""
    diagnostics: Diagnostics
    """Guards of everything that only measures or shows: its failure costs one warning, never the run."""
    tracker: MetricsTracker
    spikes: SpikeDetector | None
    """None: not looked for."""
    evaluator: Evaluator | None
    sampler: Sampler | None
    """Rank 0 only, but for a model in shards."""
    saver: Saver
    stop: StopRequest
    watchdog: Watchdog
    events: EventWriter | None
    """Rank 0 only."""
    progress: Progress
    profile: StepProfile | None
    """Rank 0 only; None: off."""
    status: StatusKeeper | None
    """Rank 0 only."""

    def at(self, what: str, step: int, *, may_wait: bool = False) -> None:
        """Record the current phase for the watchdog; see `Watchdog.at`."""
        self.watchdog.at(what, step, may_wait=may_wait)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Where a single rank stops at once if it is asked to."""
        with self.stop.interrupting(self.info.world_size == 1):
            yield

    def count(self, values: Mapping[str, float]) -> None:
        """Count on this rank until the next logged step."""
        self.diagnostics.best_effort("counters").run(self.position.unlogged.add, values)

    def event(self, event: Mapping[str, Any]) -> None:
        """Write to events.jsonl (rank 0; other ranks do nothing)."""
        if self.events is not None:
            self.diagnostics.best_effort("events.jsonl").run(self.events.write, event)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take the progress bar off the screen while something is written there."""
        guard = self.diagnostics.best_effort("progress")
        guard.run(self.progress.hide)
        try:
            yield
        finally:
            guard.run(self.progress.show)

    def logs(self, step: int) -> bool:
        """Whether `step` is logged; the same on all ranks."""
        return self.tracker.will_log(step) or step == self.position.last_step

    def splits(self, step: int) -> bool:
        """Whether `step` measures where gradient noise comes from, if any does; the same on all ranks."""
        return step % self.config.gns.components_every == 0 and self.logs(step)

    def probes(self, step: int) -> bool:
        """Whether `step` measures what carrying is worth; the same on all ranks."""
        every = self.config.ledger.probe_every
        return every > 0 and step % every == 0 and self.logs(step)
