"""A linear loss over three layers whose gradients have known means and noise, so that each layer's B is known."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.lab.per_layer import PerLayer
from trainer.metrics.noise_scale.estimate import PairAverage
from trainer.metrics.noise_scale.hooks import GradientNoiseScale

DIM, ROWS, MICROS = 20, 2, 4
MEANS = {"blocks.0": 0.5, "blocks.1": 1.0, "head": 0.25}
SIGMAS = {"blocks.0": 1.0, "blocks.1": 0.5, "head": 1.5}


class Theta(nn.Module):
    """One layer: theta . x, whose gradient is x."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.theta


class Layered(nn.Module):
    """The sum of three layers, each with its own part of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Theta(), Theta()])
        self.head = Theta()

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, 3, DIM]."""
        return self.blocks[0](x[:, 0]) + self.blocks[1](x[:, 1]) + self.head(x[:, 2])


@dataclass(frozen=True)
class Truth:
    """Of one layer, or of a sum of layers."""

    tr_sigma: float
    grad_sq: float


TRUTH = {name: Truth(DIM * SIGMAS[name] ** 2, DIM * MEANS[name] ** 2) for name in MEANS}


def draw(generator: torch.Generator) -> Tensor:
    """[ROWS, 3, DIM]"""
    mean = torch.tensor(list(MEANS.values()))[:, None]
    sigma = torch.tensor(list(SIGMAS.values()))[:, None]
    return mean + sigma * torch.randn(ROWS, 3, DIM, generator=generator)


def measure(
    rank: int, world_size: int, steps: int = 200
) -> tuple[PerLayer, GradientNoiseScale, list[dict[str, float]]]:
    """Windows at a constant theta, under DDP on several ranks; also every step's metrics."""
    inner = Layered()
    model: nn.Module = DistributedDataParallel(inner) if world_size > 1 else inner
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.0)
    gns = GradientNoiseScale(model, ema=0.9999)
    layers = PerLayer(model, optimizer, gns, ema=0.9999)
    generator = torch.Generator().manual_seed(40 + rank)
    rows = []
    for _ in range(steps):
        optimizer.zero_grad()
        gns.begin_window(MICROS, by_parameter=True)
        for k in range(MICROS):
            is_last = k == MICROS - 1
            quiet = model.no_sync() if isinstance(model, DistributedDataParallel) and not is_last else None
            with quiet or contextlib.nullcontext():
                gns.begin_micro(last=is_last)
                (model(draw(generator)).mean() / MICROS).backward()
                gns.end_micro(1 / MICROS, ROWS)
        metrics = gns.step()
        layers.before_update()
        optimizer.step()
        grad_sq = sum(float(p.grad.double().square().sum()) for p in inner.parameters() if p.grad is not None)
        rows.append({**metrics, **layers.step(), "grad_sq": grad_sq})
    return layers, gns, rows


def wrong_averages(layers: PerLayer, gns: GradientNoiseScale) -> list[str]:
    """Averages of S and |G|^2 further than 5 standard errors from the truth, or too uncertain to tell; and sums over layers
    that are not the whole's."""
    wrong = []
    for name, truth in TRUTH.items():
        average = layers._noise[f"layer/{name}"]
        moments = average.covariance()
        assert moments is not None
        pairs = {
            "tr_sigma": (average.mean_x, math.sqrt(moments[0]), truth.tr_sigma),
            "grad_sq": (average.mean_y, math.sqrt(moments[1]), truth.grad_sq),
        }
        for what, (value, error, expected) in pairs.items():
            if abs(value - expected) > 5.0 * error or error > 0.2 * expected:
                wrong.append(f"{name} {what}: {value} +- {error}, expected {expected}")
    for prefix in ("layer/", "param_group/"):
        parts: list[PairAverage] = [part for key, part in layers._noise.items() if key.startswith(prefix)]
        for what, whole in (("mean_x", gns._noise.mean_x), ("mean_y", gns._noise.mean_y)):
            total = math.fsum(getattr(part, what) for part in parts)
            if not math.isclose(total, whole, rel_tol=1e-9):
                wrong.append(f"{what} of {prefix} adds up to {total}, the whole's is {whole}")
    return wrong


def everything(rank: int, world_size: int) -> tuple[list[str], list[dict[str, float]]]:
    """What is wrong on this rank, and its metrics."""
    layers, gns, rows = measure(rank, world_size)
    assert world_size == (dist.get_world_size() if dist.is_initialized() else 1)
    return wrong_averages(layers, gns), rows
