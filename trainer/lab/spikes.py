"""Loss spikes: steps whose loss is far above that of the preceding steps (`train.spike_sigma`).

It could go if spikes were found in metrics.jsonl alone, without their batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.metrics.logger import get_logger
from trainer.training.extension import Extension

if TYPE_CHECKING:
    from trainer.training.run import Run, StepInFlight
    from trainer.training.step.step import StepOutcome

logger = get_logger(__name__)

DECAY = 0.98  # of the averages: they span about the last 50 steps
WARMUP = 20  # losses before the first verdict: the spread of fewer is unreliable, and losses fall


class Spike(NamedTuple):
    """A loss far above the preceding ones, with their mean and standard deviation."""

    loss: float
    mean: float
    sigma: float


class LossSpikes(Extension):
    """Compares each loss with the exponential average and variance of the preceding ones.

    A loss more than `train.spike_sigma` sigma above the mean is a spike. It enters the averages
    clipped to that, so that it does not mask the next one, while a loss that stays high becomes the
    new baseline after some steps.
    """

    metric_keys = ("loss_spike",)

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._threshold = run.config.train.spike_sigma
        self._count, self._mean, self._variance = 0, 0.0, 0.0

    def step_finished(self, taken: StepInFlight, outcome: StepOutcome) -> None:
        """Report the step if its loss, which is the same on all ranks, is a spike."""
        spike, step = None, taken.step
        if outcome.is_finite and outcome.tokens:
            spike = self.update(outcome.loss)
        self.run.record("loss_spike", float(spike is not None))
        if spike is not None:
            text = "step %d: loss spike: %.4f, above its average of %.4f with standard deviation %.4f"
            logger.warning(text, step, *spike)
            event = {"event": "loss_spike", "global_step": step, **spike._asdict(), "grad_norm": outcome.grad_norm}
            batches = [str(micro.located) for micro in taken.window]  # of rank 0; the command shows all
            self.run.event({**event, "batches": batches, "see": self.run.run_dir.rows_command(step)})

    def update(self, loss: float) -> Spike | None:
        """Add a finite loss; returns the spike if it is one."""
        sigma = math.sqrt(self._variance)
        limit = self._mean + self._threshold * sigma
        spike, counted = None, loss
        if self._count >= WARMUP and loss > limit:
            spike = Spike(loss, self._mean, sigma)
            if sigma > 0:  # 0: all losses so far are equal
                counted = limit
        self._count += 1
        # A plain mean at first, until it would weigh the newest loss less than the decay does.
        share = max(1.0 / self._count, 1.0 - DECAY)
        distance = counted - self._mean
        self._mean += share * distance
        self._variance = (1.0 - share) * (self._variance + share * distance * distance)
        return spike

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._count, "mean": self._mean, "variance": self._variance}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._count = int(state["count"])
        self._mean, self._variance = float(state["mean"]), float(state["variance"])
