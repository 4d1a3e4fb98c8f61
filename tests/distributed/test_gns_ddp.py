"""The sums of the noise scale under real DDP against separate backwards of every micro-batch, two processes on gloo."""

from __future__ import annotations

import contextlib
import copy
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.metrics import noise_scale
from trainer.metrics.gns_hooks import GradientNoiseScale

WORLD = 2
KAPPA0 = 0.01


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 700), nn.Tanh(), nn.Linear(700, 4))


def micro_batch(rank: int, k: int, *, empty: bool) -> tuple[Tensor, Tensor]:
    """Ragged: [B, 6] inputs and [B] weights, some rows masked."""
    generator = torch.Generator().manual_seed(100 * rank + k)
    rows = 2 + (rank + 2 * k) % 4
    weights = torch.randint(1, 30, (rows,), generator=generator).double()
    weights[0] = 0.0
    if empty:
        weights.zero_()
    return torch.randn(rows, 6, generator=generator), weights


def loss_sum(model: nn.Module, x: Tensor, weights: Tensor) -> Tensor:
    return (weights.float() * model(x).square().sum(1)).sum()


def flat_gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def oracle(num_micros: int, empty: tuple[int, int]) -> list[float]:
    """Q1, V1, Q2, V2, Q3, V3 by their definitions, from one backward each."""
    means, kappas, noises = [], [], []
    for rank in range(WORLD):
        for k in range(num_micros):
            x, weights = micro_batch(rank, k, empty=(rank, k) == empty)
            model = make_model()
            loss_sum(model, x, weights).backward()
            total = float(weights.sum())
            means.append(flat_gradient(model) / max(total, 1.0))
            kappas.append(KAPPA0 * total)
            noises.append(float(weights.square().sum()) / max(total, 1.0) ** 2)
    g, kappa, v = torch.stack(means), torch.tensor(kappas, dtype=torch.float64), torch.tensor(noises).double()
    share = kappa / kappa.sum()
    by_rank = share.view(WORLD, num_micros)
    within = torch.nan_to_num(by_rank / by_rank.sum(1, keepdim=True))
    of_rank = torch.einsum("rk,rkp->rp", within, g.view(WORLD, num_micros, -1))
    v_rank = (within.square() * v.view(WORLD, num_micros)).sum(1)
    weight = by_rank.sum(1)
    big = (share[:, None] * g).sum(0)
    return [
        float((share * g.square().sum(1)).sum()),
        float((share * v).sum()),
        float((weight * of_rank.square().sum(1)).sum()),
        float((weight * v_rank).sum()),
        float(big.square().sum()),
        float((share.square() * v).sum()),
    ]


def run_window(
    ddp: nn.Module, gns: GradientNoiseScale | None, rank: int, num_micros: int, empty: tuple[int, int]
) -> None:
    ddp.zero_grad(set_to_none=True)
    if gns is not None:
        gns.begin_window(num_micros)
    for k in range(num_micros):
        x, weights = micro_batch(rank, k, empty=(rank, k) == empty)
        last = k == num_micros - 1
        with contextlib.nullcontext() if last else ddp.no_sync():  # type: ignore[operator]
            if gns is not None:
                gns.begin_micro(last)
            (KAPPA0 * loss_sum(ddp, x, weights)).backward()
            if gns is not None:
                gns.end_micro(KAPPA0 * weights.sum(), weights)


def check_exactness(rank: int, options: dict[str, bool]) -> None:
    for num_micros in (1, 2, 4):
        for empty in ((-1, -1), (1, num_micros - 1)):
            ddp = DistributedDataParallel(make_model(), bucket_cap_mb=1e-3, **options)
            if "static_graph" in options and num_micros > 1:
                run_window(ddp, None, rank, 1, (-1, -1))  # DDP itself fails if its first backward is under no_sync
            gns = GradientNoiseScale(ddp)
            for _ in range(2):  # static_graph and rebuilt buckets behave differently from the second window on
                run_window(ddp, gns, rank, num_micros, empty)
                sums, grad_sq = gns.local_sums(), gns.grad_sq()
                dist.all_reduce(sums)
                kappa = float(sums[noise_scale.KAPPA])
                got = [
                    float(sums[noise_scale.SMALL_SQUARE]) / kappa,
                    float(sums[noise_scale.SMALL_NOISE]) / kappa,
                    float(sums[noise_scale.MIDDLE_SQUARE]) / float(sums[noise_scale.MIDDLE_KAPPA]),
                    float(sums[noise_scale.MIDDLE_NOISE]) / float(sums[noise_scale.MIDDLE_KAPPA]),
                    float(grad_sq) / (kappa / WORLD) ** 2,
                    float(sums[noise_scale.BIG_NOISE]) / kappa**2,
                ]
                assert got == pytest.approx(oracle(num_micros, empty), rel=1e-5), (num_micros, empty, options)
                window = gns.finish(sums.tolist(), float(grad_sq))
                is_alone = (num_micros, empty) == (1, (1, 0))  # one micro-batch holds all the step's tokens
                assert isinstance(window, noise_scale.Absent if is_alone else noise_scale.Window), window
            gns.close()


def check_bitwise(rank: int) -> None:
    final = []
    for is_measured in (False, True):
        ddp = DistributedDataParallel(make_model(), gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
        gns = GradientNoiseScale(ddp) if is_measured else None
        for _ in range(4):
            run_window(ddp, gns, rank, 3, (-1, -1))
            if gns is not None:
                gns.step()
            optimizer.step()
        final.append(copy.deepcopy([p.detach() for p in ddp.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(*final, strict=True))


def check_bad_rank(rank: int) -> None:
    """A NaN on one rank is a skip that every rank counts."""
    ddp = DistributedDataParallel(make_model())
    gns = GradientNoiseScale(ddp)
    gns.begin_window(1)
    gns.begin_micro(True)
    x, weights = micro_batch(rank, 0, empty=False)
    scale = float("nan") if rank == 1 else 1.0
    (scale * loss_sum(ddp, x, weights)).backward()
    gns.end_micro(weights.sum(), weights)
    assert gns.step() == {"gns/skipped": 1.0}
    assert gns.reason is not None
    assert "not finite" in gns.reason


def worker(rank: int, init: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=WORLD)
    try:
        for options in (
            {},
            {"gradient_as_bucket_view": True},
            {"static_graph": True},
            {"find_unused_parameters": True},
        ):
            check_exactness(rank, options)
        check_bitwise(rank)
        check_bad_rank(rank)
        dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.mark.distributed
def test_sums_under_ddp_equal_separate_backwards(tmp_path: Path) -> None:
    mp.spawn(worker, args=(f"file://{tmp_path / 'rendezvous'}",), nprocs=WORLD, join=True)
