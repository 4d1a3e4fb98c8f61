"""The noise scale on two ranks: what their own sums give, and what is absent without them."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.gloo import run_on_ranks
from trainer.metrics.gradient_noise import GradientNoiseScale
from trainer.metrics.noise_scale import Absent, Window

pytestmark = pytest.mark.distributed

ROWS, DIM = 2, 30
KAPPAS = [0.1, 0.2, 0.3, 0.4], [0.5, 0.4, 0.1, 0.2]  # of each rank


def drawn(rank: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(rank)
    return [torch.randn(ROWS, DIM, generator=rng) for _ in KAPPAS[rank]]


def one_window(rank: int, *, no_sync: bool = True, by_rank: bool = False) -> Window | Absent:
    """A window of the mean losses, each times its kappa; `by_rank`: all rows are of one document."""
    # loss = theta . x, whose gradient is x; half of it in each part
    parts = [DistributedDataParallel(nn.Linear(DIM // 2, 1, bias=False)) for _ in range(2)]
    gns = GradientNoiseScale(nn.ModuleList(parts))
    micros = list(zip(KAPPAS[rank], drawn(rank), strict=True))
    gns.begin_window(len(micros), by_rank=by_rank)
    for k, (kappa, x) in enumerate(micros):
        is_last = k == len(micros) - 1
        with contextlib.ExitStack() as stack:
            for part in parts[: 0 if is_last else 1 + no_sync]:
                stack.enter_context(part.no_sync())
            gns.begin_micro(last=is_last, groups={0} if by_rank else ())
            losses = [part(half) for part, half in zip(parts, x.chunk(2, dim=1), strict=True)]
            (kappa * sum(losses).mean()).backward()
            gns.end_micro(kappa, ROWS)
    sums = gns.local_sums()
    torch.distributed.all_reduce(sums)
    return gns.finish(sums.tolist(), float(gns.grad_sq()))


def everything(rank: int, world_size: int) -> dict[str, Window | Absent]:
    """In one start of the processes, which costs more than all of it."""
    return {
        # One of two DDP parts averages after every micro-batch, so its `.grad` is never the rank's own sum.
        "without no_sync": one_window(rank, no_sync=False),
        "by rank, without no_sync": one_window(rank, no_sync=False, by_rank=True),
        "by rank": one_window(rank, by_rank=True),
    }


@pytest.fixture(scope="module")
def results() -> list[dict[str, Window | Absent]]:
    return run_on_ranks(everything, 2)


def test_without_no_sync_consistency_is_absent_and_not_wrong(results: list[dict[str, Window]]) -> None:
    window = results[0]["without no_sync"]
    assert (window.between, window.within) == (None, None)
    assert window.tr_sigma > 0.0
    by_rank = results[0]["by rank, without no_sync"]
    assert isinstance(by_rank, Absent)
    assert by_rank.is_fault, "no rank has its own sum"


def test_by_rank_only_the_sums_of_ranks_are_compared(results: list[dict[str, Window]]) -> None:
    window = results[0]["by rank"]
    a, b = (sum(kappa * x.mean(0) for kappa, x in zip(KAPPAS[r], drawn(r), strict=True)) for r in (0, 1))
    grad_sq = float(a @ b) / sum(KAPPAS[0]) / sum(KAPPAS[1])
    noise = float(a @ a + b @ b) - grad_sq * sum(sum(own) ** 2 for own in KAPPAS)
    noise *= ROWS / sum(kappa**2 for own in KAPPAS for kappa in own)
    assert window.grad_sq == pytest.approx(grad_sq, rel=1e-4)
    assert window.tr_sigma == pytest.approx(noise, rel=1e-4)
    assert window.between is window.within is None
