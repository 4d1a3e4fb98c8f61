"""The noise scale in training loops on two ranks: consistency, and when it is absent."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.gloo import run_on_ranks
from trainer.metrics.gradient_noise import GradientNoiseScale
from trainer.metrics.noise_scale import Absent, Window

pytestmark = pytest.mark.distributed

WORLD, MICROS, ROWS, DIM, STEPS = 2, 4, 2, 30, 200
KAPPAS = [0.1, 0.2, 0.3, 0.4], [0.5, 0.4, 0.1, 0.2]  # of each rank, where they are not equal


class Linear(nn.Module):
    """loss = theta . x, whose gradient is x."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.theta


def accumulate(
    gns: GradientNoiseScale,
    ddp: DistributedDataParallel,
    inputs: Sequence[tuple[Any, ...]],
    kappas: Sequence[float] = (),
    *,
    no_sync: bool = True,
    by_rank: bool = False,
) -> None:
    """A window of the mean losses of `inputs`, each times its kappa; by default the mean. All rows are of one document."""
    ddp.zero_grad()
    gns.begin_window(len(inputs), by_rank=by_rank)
    for k, kappa in enumerate(kappas or [1 / len(inputs)] * len(inputs)):
        is_last = k == len(inputs) - 1
        with contextlib.nullcontext() if is_last or not no_sync else ddp.no_sync():
            gns.begin_micro(last=is_last, groups={0} if by_rank else ())
            (kappa * ddp(*inputs[k]).mean()).backward()
            gns.end_micro(kappa, ROWS)


def finished(gns: GradientNoiseScale) -> Window | Absent:
    sums = gns.local_sums()
    torch.distributed.all_reduce(sums)
    return gns.finish(sums.tolist(), float(gns.grad_sq()))


def drawn(rank: int) -> list[tuple[Tensor]]:
    rng = torch.Generator().manual_seed(rank)
    return [(torch.randn(ROWS, DIM, generator=rng),) for _ in range(MICROS)]


def measure(rank: int, *, seed_of_rank: int | None = None, skew: float = 0.0) -> dict[str, float]:
    """The metrics of 200 steps at the same theta; `skew` moves the rank's data along the mean: up on rank 0, down on rank 1."""
    ddp = DistributedDataParallel(Linear())
    gns = GradientNoiseScale(ddp, ema=0.999)
    rng = torch.Generator().manual_seed(100 + (rank if seed_of_rank is None else seed_of_rank))
    mean = 0.5 + skew * (1 - 2 * rank)
    for _ in range(STEPS):
        accumulate(gns, ddp, [(mean + math.sqrt(2.0) * torch.randn(ROWS, DIM, generator=rng),) for _ in range(MICROS)])
        assert isinstance(finished(gns), Window)
    return gns.metrics()


def metrics_around_a_nan(rank: int) -> tuple[dict[str, float], dict[str, float], dict[str, float], str | None]:
    """Before a window in which rank 1 has a NaN in one micro-batch, after it, after the next sound one, and why."""
    ddp = DistributedDataParallel(Linear())
    gns = GradientNoiseScale(ddp)
    rng = torch.Generator().manual_seed(rank)
    history = []
    for step in range(11):
        inputs = [1.0 + torch.randn(ROWS, DIM, generator=rng) for _ in range(2)]
        inputs[0] *= math.nan if (step, rank) == (9, 1) else 1.0
        accumulate(gns, ddp, [(x,) for x in inputs])
        history.append(gns.step())
        if step == 9:
            reason = gns._absent
    return *history[8:], reason


def one_window(*args: Any, **options: bool) -> Window | Absent:
    ddp = DistributedDataParallel(Linear())
    gns = GradientNoiseScale(ddp)
    accumulate(gns, ddp, *args, **options)
    return finished(gns)


def everything(rank: int, world_size: int) -> dict[str, object]:
    """In one start of the processes, which costs more than all of it."""
    x = drawn(rank)
    return {
        "same seed": measure(rank, seed_of_rank=0),
        "skewed": measure(rank, skew=0.5),
        "nan": metrics_around_a_nan(rank),
        # DDP averages after every micro-batch, so `.grad` is never the rank's own sum.
        "without no_sync": one_window(x, no_sync=False),
        "by rank, without no_sync": one_window(x, no_sync=False, by_rank=True),
        "by rank": one_window(x, KAPPAS[rank], by_rank=True),
    }


@pytest.fixture(scope="module")
def results() -> list[dict[str, object]]:
    return run_on_ranks(everything, WORLD)


def test_the_same_seed_on_all_ranks_has_consistency_zero(results: list[dict[str, dict[str, float]]]) -> None:
    assert results[0]["same seed"]["gns/consistency"] == pytest.approx(0.0, abs=1e-6)


def test_skewed_shards_are_told_by_consistency(results: list[dict[str, dict[str, float]]]) -> None:
    """Ranks whose means differ look noisy between each other: 1 + 2 * rows * shift^2 / sigma^2 = 1 + 2 * 8 * 0.25 / 2."""
    metrics = results[0]["skewed"]
    assert abs(metrics["gns/consistency"] - 3.0) < 4.0 * metrics["gns/consistency_se"]
    assert metrics["gns/consistency"] - 1.0 > 5.0 * metrics["gns/consistency_se"]


def test_a_nan_in_one_micro_batch_of_one_rank_is_one_skip_on_all(results: list[dict[str, tuple]]) -> None:
    for result in results:
        before, after, next_one, reason = result["nan"]
        assert after == {**before, "gns/skipped": 1.0}
        assert "gns/b_simple" in after
        assert next_one["gns/skipped"] == 0.0
        assert next_one["gns/tr_sigma"] != after["gns/tr_sigma"]
        assert reason == "a gradient of the window was not finite"


def test_without_no_sync_consistency_is_absent_and_not_wrong(results: list[dict[str, Window]]) -> None:
    window = results[0]["without no_sync"]
    assert (window.between, window.within) == (None, None)
    assert window.tr_sigma > 0.0
    by_rank = results[0]["by rank, without no_sync"]
    assert isinstance(by_rank, Absent)
    assert by_rank.is_fault, "no rank has its own sum"


def test_by_rank_only_the_sums_of_ranks_are_compared(results: list[dict[str, Window]]) -> None:
    window = results[0]["by rank"]
    a, b = (sum(kappa * x.mean(0) for kappa, (x,) in zip(KAPPAS[r], drawn(r), strict=True)) for r in range(WORLD))
    grad_sq = float(a @ b) / sum(KAPPAS[0]) / sum(KAPPAS[1])
    noise = float(a @ a + b @ b) - grad_sq * sum(sum(own) ** 2 for own in KAPPAS)
    noise *= ROWS / sum(kappa**2 for own in KAPPAS for kappa in own)
    assert isinstance(window, Window)
    assert window.grad_sq == pytest.approx(grad_sq, rel=1e-4)
    assert window.tr_sigma == pytest.approx(noise, rel=1e-4)
    assert window.between is window.within is None
