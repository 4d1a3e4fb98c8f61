"""Rows that are not finite: one cold start each, nothing else lost, and no waiting for the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.unit.ledger.test_ledger import WIDTH, new_ledger
from tests.unit.training.test_no_waiting import META, NoBlockingCopies, needs_cuda
from trainer.ledger import WIPE_MODES, Ledger


def ledger_on(device: torch.device, wipe_mode: str) -> tuple[Ledger, torch.Tensor]:
    """A ledger, and the states to store: one of four is not finite."""
    capacity = 4 if wipe_mode == "lru" else 64
    states = torch.ones(4, WIDTH)
    states[1, 0] = float("nan")
    return new_ledger(wipe_mode, capacity, device=device, sweep_every=2), states.to(device)


def run_steps(ledger: Ledger, states: torch.Tensor, steps: range) -> None:
    """Groups begin, continue, end and are evicted; some rows have no group."""
    for step in steps:
        groups, cells = np.array([step % 3, 10 + step, 11 + step, -1]), np.array([step, 0, 1, 0])
        ledger.begin_step(step)
        ledger.lookup(groups, cells)
        ledger.store(groups, cells, np.array([step % 3 == 0, False, False, False]), states)


@pytest.mark.parametrize("wipe_mode", WIPE_MODES)
def test_look_up_and_store_run_on_a_device_that_cannot_be_read(wipe_mode: str) -> None:
    ledger, states = ledger_on(META, wipe_mode)
    with NoBlockingCopies():
        run_steps(ledger, states, range(1, 9))


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("wipe_mode", WIPE_MODES)
def test_look_up_and_store_do_not_wait_for_cuda_and_count_as_on_the_cpu(wipe_mode: str) -> None:
    ledger, states = ledger_on(torch.device("cuda"), wipe_mode)
    run_steps(ledger, states, range(1, 3))
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_steps(ledger, states, range(3, 9))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected, states = ledger_on(torch.device("cpu"), wipe_mode)
    run_steps(expected, states, range(1, 9))
    assert ledger.drain_metrics() == expected.drain_metrics()
