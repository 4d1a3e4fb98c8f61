"""Loss spikes: steps whose loss is far above that of the preceding steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DECAY = 0.98  # of the averages: they span about the last 50 steps
WARMUP = 20  # losses before the first verdict: the spread of fewer is unreliable, and a run's loss first falls fast


@dataclass(frozen=True, order=True)
class Spike:
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

    A spike enters the averages clipped to `threshold` sigma above the mean, so that it does not mask the next one, while a
    loss that stays high becomes the new baseline after some steps.

    Args:
        threshold: standard deviations above the mean that count as a spike.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._count = 0
        self._mean = 0.0
        self._variance = 0.0

    def update(self, loss: float) -> Spike | None:
        """Add a finite loss; returns the spike if it is one."""
        if not math.isfinite(loss):
            raise ValueError(f"the loss must be finite, got {loss}")
        sigma = math.sqrt(self._variance)
        limit = self._mean + self._threshold * sigma
        is_spike = self._count >= WARMUP and loss > limit
        spike = Spike(loss, self._mean, sigma) if is_spike else None
        self._count += 1
        # A plain mean at first, until it would weigh the newest loss less than the decay does.
        share = max(1.0 / self._count, 1.0 - DECAY)
        distance = (limit if is_spike and sigma > 0 else loss) - self._mean
        self._mean += share * distance
        self._variance = (1.0 - share) * (self._variance + share * distance * distance)
        return spike

    def state_dict(self) -> dict[str, float]:
        """The averages, for a resumed run."""
        return {"count": self._count, "mean": self._mean, "variance": self._variance}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self._count = int(state["count"])
        self._mean = float(state["mean"])
        self._variance = float(state["variance"])
