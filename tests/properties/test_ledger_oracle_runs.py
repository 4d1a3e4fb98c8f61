"""The ledger against the plain-dict oracle over long runs and epochs: the same counts on every step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.properties.test_ledger_oracle import CASES, FALSE_STALE, MODES, WIDTH, machine_for


@CASES
@pytest.mark.parametrize("seed", range(6))
def test_ledger_equals_the_oracle_over_long_runs(mode: str, seed: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(seed)
    machine = machine_for(mode, dtype)()
    machine.start(capacity=int(rng.integers(3, 8)), every=int(rng.integers(1, 4)), threshold=int(rng.integers(1, 6)))
    for _ in range(60):
        machine.begin_step(int(rng.choice([0, 1, 1, 1, 2])))
        for _ in range(int(rng.integers(1, 6))):
            machine.run_micro_batch(rng, int(rng.integers(0, 5)))
            machine.agrees()
        action = rng.random()
        if action < 0.2:
            machine.skipped_step(int(rng.integers(2**32)), 2)
        elif action < 0.3:
            machine.drain()
        elif action < 0.4:
            machine.save_and_resume(bool(rng.integers(2)))
        elif action < 0.5:
            machine.reshard_and_resume(int(rng.integers(2, 5)))
        machine.agrees()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("num_epochs", "releases"), [(1, True), (3, True), (3, False)])
def test_counts_equal_the_oracle_on_every_step_over_epochs(mode: str, num_epochs: int, releases: bool) -> None:
    """Lanes of groups in order, each with its cells in order, some lanes waiting; every epoch has the same groups."""
    rng = np.random.default_rng(num_epochs)
    num_lanes, num_cells = 6, 5
    machine = machine_for(mode, torch.float32)()
    machine.start(capacity=4 if mode == "lru" else 4 * num_lanes, every=2, threshold=3)
    for epoch in range(num_epochs):
        cursors = [0] * num_lanes
        while min(cursors) < 4 * num_cells:
            machine.begin_step(1)
            alive = [lane for lane in range(num_lanes) if cursors[lane] < 4 * num_cells]
            lanes = rng.permutation(alive)[: int(rng.integers(1, 4))]
            groups = np.array([lane * 4 + cursors[lane] // num_cells for lane in lanes])
            cells = np.array([cursors[lane] % num_cells for lane in lanes])
            is_last = (cells == num_cells - 1) & releases
            states = torch.from_numpy(rng.random((len(lanes), WIDTH)).astype(np.float32))
            machine.lookup_and_store(groups, cells, is_last, states)
            machine.agrees()
            for lane in lanes:
                cursors[lane] += 1
        if mode == "periodic_stale" and not releases and epoch > 0:
            assert machine.oracle.counts["ledger/evictions/stale"] > machine.oracle.counts[FALSE_STALE]
