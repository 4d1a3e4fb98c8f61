"""States of many megabytes: checkpoints in pieces, and finite or not in one pass."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.ledger.test_ledger import WIDTH, new_ledger, store
from trainer.ledger import Ledger, LedgerOptions
from trainer.ledger import slab as slabs
from trainer.ledger.slab import Slab

MOST, NAN, INF = 3e38, float("nan"), float("inf")  # also in bfloat16


def test_rows_are_saved_and_restored_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = new_ledger()
    ledger.begin_step(1)
    for group in (3, 1, 2):
        store(ledger, [group], float(group))
    whole = ledger.state_dict()
    monkeypatch.setattr(slabs, "PIECE_BYTES", 2 * WIDTH * 4)
    pieces = list(ledger.held_rows())
    assert [len(piece) for piece in pieces] == [2, 1]
    assert torch.equal(torch.cat(pieces), whole["rows"])
    assert ledger.num_row_bytes == whole["rows"].numel() * 4
    same, other = new_ledger(), new_ledger(capacity=7)
    for resumed in (same, other):
        resumed.load_state_dict([whole])
        found = resumed.state_dict()
        by_group = dict(zip(found["groups"].tolist(), found["rows"][:, 0].tolist(), strict=True))
        assert by_group == {1: 1.0, 2: 2.0, 3: 3.0}


@pytest.mark.parametrize("large", [0, 2**20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("row", "is_finite"),
    [
        ([MOST, MOST, -MOST], True),  # whose sum is not
        ([INF, -INF, 0.0], False),
        ([0.0, NAN, INF], False),
        ([1.0, 2.0, -INF], False),
    ],
)
def test_a_row_is_valid_if_each_of_its_numbers_is_finite(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, row: list[float], is_finite: bool, large: int
) -> None:
    monkeypatch.setattr(slabs, "LARGE_BYTES", large)
    slab = Slab(width=3, capacity=2, device=torch.device("cpu"), dtype=dtype)
    rows = torch.tensor([row, [1.0, 1.0, 1.0]], dtype=dtype)
    assert int(slab.write(np.array([1, 0]), rows)) == (not is_finite)
    assert slab.are_valid(np.array([1, 0, 2])).tolist() == [is_finite, True, False]


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_that_are_not_used_take_no_memory_of_the_host(dtype: torch.dtype) -> None:
    before = resident_bytes()
    ledger = Ledger(LedgerOptions(capacity=1_000), state_width=250_000, dtype=dtype)
    ledger.begin_step(1)
    for group in (1, 2):
        ledger.store(np.array([group]), np.ones(1, np.int64), np.zeros(1, np.bool_), torch.ones(1, 250_000))
    assert resident_bytes() - before < 50e6  # of 0.5 to 1 GB
    assert ledger.lookup(np.array([2]), np.ones(1, np.int64)).sum() == 250_000
