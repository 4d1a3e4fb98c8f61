"""Loss spikes: steps whose loss is far above that of the preceding steps, and the batches of each.

It could go if spikes were found in metrics.jsonl alone, without their batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.metrics.logger import get_logger
from trainer.training.extension import Extension

if TYPE_CHECKING:
    from trainer.training.run import Run, StepInFlight
    from trainer.training.step.step import StepOutcome

logger = get_logger(__name__)

DECAY = 0.98  # of the averages: they span about the last 50 steps
WARMUP = 20  # losses before the first verdict: the spread of fewer is unreliable, and losses fall
# A step's numbers are read after the next one is launched; the vote on them travels with the one
# after that, and is read later.
KEPT_STEPS = 4


class Spike(NamedTuple):
    """A loss far above the preceding ones, with their mean and standard deviation."""

    loss: float
    mean: float
    sigma: float

    @property
    def num_sigma(self) -> float:
        """Distance above the mean in standard deviations."""
        return (self.loss - self.mean) / self.sigma if self.sigma > 0 else math.inf


class SpikeDetector:
    """Compares each loss with the exponential average and variance of the preceding ones.

    A loss more than `threshold` sigma above the mean is a spike. It enters the averages clipped to
    that, so that it does not mask the next one, while a loss that stays high becomes the new
    baseline after some steps.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._count, self._mean, self._variance = 0, 0.0, 0.0

    def update(self, loss: float) -> Spike | None:
        """Add a finite loss; returns the spike if it is one."""
        if not math.isfinite(loss):
            raise ValueError(f"the loss must be finite, got {loss}")
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

    def state_dict(self) -> dict[str, float]:
        return {"count": self._count, "mean": self._mean, "variance": self._variance}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._count = int(state["count"])
        self._mean, self._variance = float(state["mean"]), float(state["variance"])


class LossSpikes(Extension):
    """Reports loss spikes with the batches of all ranks (`train.spike_sigma`).

    The loss is the same on all ranks and so is what they find, but looking for it may fail on one
    of them: the ranks decide by a vote in the next step's reduction to exchange their batches.
    """

    metric_keys = ("loss_spike",)

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._detector = SpikeDetector(run.config.train.spike_sigma)
        self._found: list[tuple[int, Spike, float]] = []  # with step and gradient norm
        self._recent: dict[int, Sequence[object]] = {}  # step -> this rank's micro-batches

    def step_finished(self, taken: StepInFlight, outcome: StepOutcome) -> None:
        """Remember the step's batches, and the spike if its loss is one."""
        step, spike = taken.step, None
        if outcome.is_finite and outcome.tokens:
            oldest = step - KEPT_STEPS
            self._recent = {at: metas for at, metas in self._recent.items() if at > oldest}
            self._recent[step] = [micro.located for micro in taken.window]
            spike = self._detector.update(outcome.loss)
            if spike is not None:
                self._found.append((step, spike, outcome.grad_norm))
                self.run.extensions.asks = True  # other ranks' batches are in their memory alone
        self.run.record("loss_spike", float(spike is not None))

    def to_exchange(self) -> tuple[list[tuple[int, Spike, float]], dict[int, Sequence[str]]]:
        """The spikes that this rank has found, and its recent batches."""
        found, self._found = self._found, []
        return found, {step: list(map(str, batches)) for step, batches in self._recent.items()}

    def exchanged(self, by_rank: Sequence[Any]) -> None:
        """Write the spikes that any rank has found, with the batches of all."""
        every = {found for spikes, _ in filter(None, by_rank) for found in spikes}
        for step, spike, grad_norm in sorted(every):
            text = f"{spike.loss:.4f}, {spike.num_sigma:.1f} standard deviations above its average"
            text += f" of {spike.mean:.4f}"
            logger.warning("step %d: loss spike: %s", step, text)
            event = {"event": "loss_spike", "global_step": step, **spike._asdict()}
            event |= {"grad_norm": grad_norm, "see": self.run.run_dir.rows_command(step)}
            batches = [rank and rank[1].get(step) for rank in by_rank]
            self.run.event({**event, "batches": batches})

    def state_dict(self) -> dict[str, Any]:
        return self._detector.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._detector.load_state_dict(state)
