"""A training loop on several ranks as a user of the noise scale writes it, with what its hooks measured."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from tests.support.gns_cases import KAPPA0, Case, Norms, loss_sum, micro_batch
from trainer.metrics.noise_scale import estimate as noise_scale
from trainer.metrics.noise_scale.estimate import Absent, Window
from trainer.metrics.noise_scale.hooks import GradientNoiseScale


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate without a reduction, under DDP or FSDP2."""
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
        return
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def run_window(
    case: Case, model: nn.Module, gns: GradientNoiseScale | None, scaler: torch.amp.GradScaler, rank: int, m: int
) -> None:
    """One window as a user writes it: no_sync for all but the last micro-batch."""
    world_size = dist.get_world_size()
    if gns is not None:
        gns.begin_window(m)
    for k in range(m):
        tokens, weights = micro_batch(case, world_size, m, rank, k)
        kappa = KAPPA0 * weights.sum() if case.is_weighted else 1.0 / m
        last = k == m - 1
        with contextlib.nullcontext() if last else no_sync(model):
            loss = loss_sum(case, model, tokens, weights) * (KAPPA0 if case.is_weighted else 1.0 / m / len(weights))
            if gns is not None:
                gns.begin_micro(last)
            scaler.scale(loss).backward()
            if gns is not None:
                gns.end_micro(kappa * scaler.get_scale(), weights if case.is_weighted else len(weights))


def measured(gns: GradientNoiseScale, factor_left: float, *, is_sharded: bool = False) -> tuple[Norms, Window | Absent]:
    """What the window's sums say, reduced over ranks; the gradient was divided by `factor_left` since the backward."""
    sums, square = gns.local_sums(), gns.grad_sq()
    dist.all_reduce(sums)
    if is_sharded:
        dist.all_reduce(square)
    grad_sq = float(square)
    kappa, middle = float(sums[noise_scale.KAPPA]), float(sums[noise_scale.MIDDLE_KAPPA])
    factor = kappa / dist.get_world_size() / factor_left
    values = (
        float(sums[noise_scale.SMALL_SQUARE]) / kappa,
        float(sums[noise_scale.SMALL_NOISE]) / kappa,
        float(sums[noise_scale.MIDDLE_SQUARE]) / middle if middle else math.nan,
        float(sums[noise_scale.MIDDLE_NOISE]) / middle if middle else math.nan,
        grad_sq / factor**2,
        float(sums[noise_scale.BIG_NOISE]) / kappa**2,
    )
    assert float(sums[noise_scale.FAULTS]) == 0.0
    return Norms(values), gns.finish(sums.tolist(), grad_sq, grad_factor=factor)
