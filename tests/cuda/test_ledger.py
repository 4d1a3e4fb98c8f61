"""The ledger gives the same states on the device as on the CPU, in every mode of eviction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.on_device import synchronization_forbidden
from trainer.ledger import Ledger, LedgerOptions

pytestmark = pytest.mark.cuda
MODES = ("lru", "full", "periodic_stale")
GROUPS, BATCH = 24, 5


def use(ledger: Ledger, device: torch.device, width: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], Any]:
    """Look up and store groups that come again, are evicted and end, some with states that are not finite."""
    rng = np.random.default_rng(width)
    found = []
    for step in range(1, 31):
        ledger.begin_step(step)
        groups = rng.choice(GROUPS, BATCH, replace=False)
        cells, lasts = rng.integers(0, 3, BATCH), rng.random(BATCH) < 0.2
        states = torch.randn(BATCH, width, generator=torch.Generator().manual_seed(step)).to(dtype)
        if step % 7 == 0:
            states[0, -1] = float("nan")
        on_device = states.to(device)
        with synchronization_forbidden(device):
            found.append(ledger.lookup(groups, cells))
            ledger.store(groups, cells, lasts, on_device)
    return found, ledger.drain_metrics()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("width", "dtype"), [(512, torch.float32), (7, torch.bfloat16), (300_000, torch.float32)])
def test_states_and_counts_are_those_of_the_cpu(
    device: torch.device, mode: Any, width: int, dtype: torch.dtype
) -> None:
    def ledger(where: torch.device) -> Ledger:
        capacity = GROUPS // 2 if mode == "lru" else GROUPS  # without eviction a full ledger is an error
        options = LedgerOptions(capacity=capacity, wipe_mode=mode, stale_threshold=4, wipe_every=9)
        return Ledger(options, state_width=width, device=where, dtype=dtype)

    found, counts = use(ledger(device), device, width, dtype)
    expected, expected_counts = use(ledger(torch.device("cpu")), torch.device("cpu"), width, dtype)
    assert all(torch.equal(one.cpu(), other) for one, other in zip(found, expected, strict=True))
    assert any(bool(states.any()) for states in expected)
    assert counts == expected_counts
