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


class Linear(nn.Module):
    """loss = theta . x, whose gradient is x."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.theta


def drawn(rank: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(rank)
    return [torch.randn(ROWS, DIM, generator=rng) for _ in KAPPAS[rank]]


def one_window(rank: int, *, no_sync: bool = True, by_rank: bool = False) -> Window | Absent:
    """A window of the mean losses, each times its kappa; `by_rank`: all rows are of one document."""
    ddp = DistributedDataParallel(Linear())
    gns = GradientNoiseScale(ddp)
    micros = list(zip(KAPPAS[rank], drawn(rank), strict=True))
    gns.begin_window(len(micros), by_rank=by_rank)
    for k, (kappa, x) in enumerate(micros):
        is_last = k == len(micros) - 1
        with contextlib.nullcontext() if is_last or not no_sync else ddp.no_sync():
            gns.begin_micro(last=is_last, groups={0} if by_rank else ())
            (kappa * ddp(x).mean()).backward()
            gns.end_micro(kappa, ROWS)
    sums = gns.local_sums()
    torch.distributed.all_reduce(sums)
    return gns.finish(sums.tolist(), float(gns.grad_sq()))


def everything(rank: int, world_size: int) -> dict[str, Window | Absent]:
    """In one start of the processes, which costs more than all of it."""
    return {
        # DDP averages after every micro-batch, so `.grad` is never the rank's own sum.
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
    assert isinstance(window, Window)
    assert window.grad_sq == pytest.approx(grad_sq, rel=1e-4)
    assert window.tr_sigma == pytest.approx(noise, rel=1e-4)
    assert window.between is window.within is None
