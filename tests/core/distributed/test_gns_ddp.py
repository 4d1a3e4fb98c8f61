"""The noise scale's hooks in real DDP loops against a separate backward of every micro-batch; processes on gloo."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.support.gloo import run_on_ranks
from tests.support.gns_cases import CASES, Case, Windows, make_net, measured, run_window, wrong_windows
from trainer.metrics.noise_scale.hooks import GradientNoiseScale

pytestmark = pytest.mark.distributed

MICRO_BATCHES = (1, 2, 4)


def windows_of_case(rank: int, case: Case) -> Windows:
    """Two windows of each length: static_graph and rebuilt buckets behave differently from the second on."""
    net = make_net(case)
    bucket_mb: float | None = 1e-3  # a bucket for each parameter
    if case.backend is not None:
        net.compile(backend=case.backend)
        bucket_mb = None  # compilation splits at buckets and refuses a first one (1 MB) above the others
    ddp = DistributedDataParallel(net, bucket_cap_mb=bucket_mb, **case.ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, enabled=case.has_scaler)
    gns = GradientNoiseScale(ddp)
    results: Windows = {}
    for m in MICRO_BATCHES:  # 1 first: with static_graph DDP itself fails if its first backward is under no_sync
        for _ in range(2):
            optimizer.zero_grad()
            run_window(case, ddp, gns, scaler, rank, m)
            scale = scaler.get_scale()
            if case.has_scaler:
                scaler.unscale_(optimizer)
                scaler.update()
            results.setdefault(m, []).append(measured(gns, scale))
    gns.close()
    return results


def compare_all(rank: int, world_size: int) -> list[str]:
    return wrong_windows(CASES, lambda case: windows_of_case(rank, case), rank, world_size)


@pytest.mark.parametrize(
    "world_size", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_a_window_is_measured_as_by_separate_backwards(world_size: int) -> None:
    wrong = run_on_ranks(compare_all, world_size)[0]
    assert not wrong, "\n".join(wrong)
