"""A small model and windows of ragged micro-batches for the noise scale's hooks, on one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainer.metrics.noise_scale import hooks
from trainer.metrics.noise_scale.hooks import GradientNoiseScale


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 900), nn.Tanh(), nn.Linear(900, 3))


def rows(seed: int, count: int = 4) -> Tensor:
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(seed))


def loss_sum(model: nn.Module, x: Tensor, weights: Tensor) -> Tensor:
    return (weights * model(x).square().sum(1)).sum()


def micro(gns: GradientNoiseScale, model: nn.Module, x: Tensor, weights: Tensor, *, last: bool = False) -> None:
    gns.begin_micro(last)
    (0.1 * loss_sum(model, x, weights)).backward()
    gns.end_micro(0.1 * float(weights.sum()), weights)


def window(gns: GradientNoiseScale, model: nn.Module, num_micros: int, first_seed: int = 0) -> None:
    model.zero_grad()
    gns.begin_window(num_micros)
    for k in range(num_micros):
        x = rows(first_seed + k)
        micro(gns, model, x, torch.tensor([1.0, 2.0, 0.0, 5.0 + k]), last=k == num_micros - 1)


@contextmanager
def norms_of_cuda() -> Iterator[None]:
    """The CPU takes norms as CUDA does: of many gradients at once."""
    hooks.MULTI_TENSOR.add("cpu")
    try:
        yield
    finally:
        hooks.MULTI_TENSOR.remove("cpu")
