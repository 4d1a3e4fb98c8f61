"""What a run is made of, and where it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.config.schema import RunConfig
from trainer.data.loader import Loader
from trainer.distributed.env import RankInfo
from trainer.distributed.watchdog import Watchdog
from trainer.ledger.ledger import Ledger
from trainer.metrics.aggregate import WindowAggregator
from trainer.metrics.noise_scale.hooks import GradientNoiseScale
from trainer.metrics.rank_reduction import MetricPlan
from trainer.metrics.sinks.events import EventWriter
from trainer.metrics.spikes import SpikeDetector
from trainer.metrics.tracker import MetricsTracker
from trainer.training.checkpointing.saver import Saver
from trainer.training.evaluation.evaluator import Evaluator
from trainer.training.evaluation.sampler import Sampler
from trainer.training.progress import Progress
from trainer.training.signals import StopRequest
from trainer.training.step.microbatch import MicroBatch
from trainer.training.step.step import TrainStep


@dataclass(frozen=True)
class Window:
    """This rank's micro-batches of one step."""

    micros: Sequence[MicroBatch]
    data_state: Any
    """The data set's, after them."""
    metrics: Sequence[Mapping[str, float]]
    """What the data set had to say of each that it gave."""


@dataclass(frozen=True)
class TakenStep:
    """A step whose work is queued."""

    step: int
    window: Window


@dataclass
class Run:
    """The assembled parts of a run, and where it is."""

    config: RunConfig
    info: RankInfo
    train_step: TrainStep
    loader: Loader
    ledger: Ledger | None
    gns: GradientNoiseScale | None
    tracker: MetricsTracker
    evaluator: Evaluator | None
    saver: Saver
    stop: StopRequest
    plan: MetricPlan
    progress: Progress
    accepted: frozenset[str] | None
    device: Any
    events: EventWriter | None
    spikes: SpikeDetector | None
    """None: not looked for."""
    watchdog: Watchdog | None = None
    """None for a single rank."""
    keep_status: Callable[[int], None] | None = None
    """Notes the last finished step for people; rank 0."""
    sampler: Sampler | None = None
    """Rank 0 only."""
    step: int = 0
    """Last finished step."""
    first_step: int = 0
    """The step it went on after."""
    data_state: Any = None
    """The data set's state after the last batch that was trained on."""
    first_loss: float | None = None
    last_loss: float | None = None
    last_eval: dict[str, float] = field(default_factory=dict)
    pool_metrics: WindowAggregator = field(default_factory=WindowAggregator)
    skipped_in_a_row: int = 0
    skipped_since_log: int = 0
    previous_batch: dict[str, Any] | None = None
    unsettled: TakenStep | None = None
    """The step after the last finished one, if its work is queued and its outcome not known."""

    def at(self, what: str, step: int) -> None:
        """Say what comes now, for the case that it never ends."""
        if self.watchdog is not None:
            self.watchdog.at(what, step)


def unlogged(run: Run) -> dict[str, Any]:
    """What this rank has counted since the last logged step, for a checkpoint between two of them."""
    counts = {"pool": run.pool_metrics.state_dict(), "skipped": run.skipped_since_log, "in_a_row": run.skipped_in_a_row}
    return counts if run.ledger is None else {**counts, "ledger": run.ledger.undrained()}


def count_on(run: Run) -> None:
    """Go on from what `unlogged` has kept."""
    kept = run.saver.unlogged
    run.pool_metrics.load_state_dict(kept.get("pool", {}))
    run.skipped_since_log = int(kept.get("skipped", 0))
    run.skipped_in_a_row = int(kept.get("in_a_row", 0))
    if run.ledger is not None and "ledger" in kept:
        run.ledger.load_undrained(kept["ledger"])
