"""Exponential moving average that starts at its first sample and never waits for a device."""

from __future__ import annotations

import math

import torch

from trainer.metrics.aggregate import Scalar


class Ema:
    """`value = alpha * sample + (1 - alpha) * value`, from the first sample on.

    Samples are numbers or 0-dim tensors; a tensor is averaged on its device and read only by `read`. A sample that is
    not finite is passed over: one bad step would otherwise spoil the average for good.
    """

    def __init__(self, alpha: float) -> None:
        if not 0.0 < alpha <= 1.0:
            raise ValueError(f"alpha must be in (0, 1], got {alpha}")
        self.alpha = alpha
        self._value: Scalar | None = None

    def update(self, sample: Scalar) -> None:
        """Take in one sample."""
        if isinstance(sample, torch.Tensor):
            self._value = self._on_device(sample)
        elif isinstance(self._value, torch.Tensor):
            self._value = self._on_device(self._value.new_full((), sample))
        elif math.isfinite(sample):
            value = self._value
            self._value = sample if value is None else self.alpha * sample + (1.0 - self.alpha) * value

    def _on_device(self, sample: torch.Tensor) -> torch.Tensor:
        sample = sample.detach().to(torch.float64)
        if self._value is None:
            # A copy: the caller may reuse its tensor. NaN marks that nothing finite has been seen yet.
            return torch.where(torch.isfinite(sample), sample, torch.nan)
        value = self._value if isinstance(self._value, torch.Tensor) else sample.new_full((), self._value)
        mixed = torch.where(torch.isnan(value), sample, torch.lerp(value, sample, self.alpha))
        return torch.where(torch.isfinite(sample), mixed, value)

    def read(self) -> float | None:
        """The average as a number (waits for the device if it is a tensor); None before the first finite sample."""
        if self._value is None:
            return None
        value = float(self._value)
        return None if math.isnan(value) else value

    def load(self, value: float | None) -> None:
        """Continue from a saved average."""
        self._value = value
