"""Loss spikes: a step whose loss lies far above what the last steps were like."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Of the averages: about the last 50 steps.
DECAY = 0.98
# A spread of fewer values says little, and at its beginning a run's loss falls quickly.
WARMUP = 20


@dataclass(frozen=True)
class Spike:
    """A loss far above the ones before it, and what they were."""

    loss: float
    mean: float
    sigma: float

    @property
    def num_sigma(self) -> float:
        """How far above, in standard deviations."""
        return (self.loss - self.mean) / self.sigma if self.sigma > 0 else math.inf


class SpikeDetector:
    """Compares each loss with an exponential average of those before it and of their squared distances from it.

    A spike enters the averages as `threshold` sigma above the mean, so that it hides no second one, while a loss that stays
    high becomes the new normal after some steps.

    Args:
        threshold: standard deviations above the mean that make a spike.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._count = 0
        self._mean = 0.0
        self._variance = 0.0

    def update(self, loss: float) -> Spike | None:
        """Take in a finite loss; the spike, if it is one."""
        if not math.isfinite(loss):
            raise ValueError(f"a loss must be finite to be compared, got {loss}")
        sigma = math.sqrt(self._variance)
        limit = self._mean + self._threshold * sigma
        is_spike = self._count >= WARMUP and loss > limit
        found = Spike(loss, self._mean, sigma) if is_spike else None
        self._average(limit if is_spike and sigma > 0 else loss)
        return found

    def _average(self, value: float) -> None:
        self._count += 1
        # A plain mean of the first ones, until that weighs the newest less than the decay does.
        share = max(1.0 / self._count, 1.0 - DECAY)
        distance = value - self._mean
        self._mean += share * distance
        self._variance = (1.0 - share) * (self._variance + share * distance * distance)

    def state_dict(self) -> dict[str, float]:
        """What a resumed run goes on from."""
        return {"count": self._count, "mean": self._mean, "variance": self._variance}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self._count = int(state["count"])
        self._mean = float(state["mean"])
        self._variance = float(state["variance"])
