"""Rows that are not finite: one cold start each, nothing else lost, and no waiting for the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.unit.ledger.test_ledger import WIDTH, lookup, new_ledger
from tests.unit.training.test_no_waiting import META, NoBlockingCopies, needs_cuda
from trainer.ledger import WIPE_MODES, Ledger

NAN, INF = float("nan"), float("inf")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["numpy", "torch"])


def store_rows(ledger: Ledger, rows: dict[int, float], *, cell: int = 1) -> None:
    """Store a state per group, in which one number is not finite if the given one is not."""
    states = torch.ones(len(rows), WIDTH)
    states[:, -1] = torch.tensor(list(rows.values()))
    count = len(rows)
    ledger.store(np.array(list(rows)), np.full(count, cell), np.zeros(count, np.bool_), states)


def counts(ledger: Ledger) -> tuple[float, float]:
    """Refused rows and cold starts since the last call."""
    metrics = ledger.drain_metrics()
    return metrics["ledger/refused_rows"], metrics["ledger/cold_starts"]


@DTYPES
def test_counts_do_not_depend_on_how_many_micro_batches_pass_between_two_drains(dtype: torch.dtype) -> None:
    ledger = new_ledger(dtype=dtype)
    ledger.begin_step(1)
    for _ in range(1000):
        lookup(ledger, [1, 2])
        store_rows(ledger, {1: NAN, 2: 1.0})
    assert counts(ledger) == (1000, 1001)


def ledger_on(device: torch.device, wipe_mode: str, dtype: torch.dtype = torch.float32) -> tuple[Ledger, torch.Tensor]:
    """A ledger, and the states to store: one of four is not finite."""
    capacity = 4 if wipe_mode == "lru" else 64
    states = torch.ones(4, WIDTH)
    states[1, 0] = NAN
    return new_ledger(wipe_mode, capacity, device=device, dtype=dtype, sweep_every=2), states.to(device)


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
