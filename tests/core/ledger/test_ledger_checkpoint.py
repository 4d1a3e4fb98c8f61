"""Saving and loading the ledger, for the same and for another number of ranks, and states of many megabytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.core.ledger.test_ledger import lookup, store
from tests.support.on_device import resident_bytes
from trainer.errors import UserError
from trainer.ledger import Ledger, LedgerOptions
from trainer.ledger import slab as slabs
from trainer.ledger.slab import Slab

WIDTH = 2


def new_ledger(wipe_mode: str = "lru", capacity: int = 4) -> Ledger:
    return Ledger(LedgerOptions(capacity=capacity, wipe_mode=wipe_mode), state_width=WIDTH)


def saved(groups: list[int], value: float, *, step: int = 1) -> dict[str, object]:
    ledger = new_ledger("lru", capacity=4)
    ledger.begin_step(step)
    store(ledger, groups, value)
    return ledger.state_dict()


def test_of_a_group_in_several_shards_the_newest_state_counts() -> None:
    shards = [saved([1, 2], 9.0, step=7), saved([1, 3], 1.0, step=5)]
    for order in (shards, shards[::-1]):
        ledger = new_ledger("lru")
        ledger.load_shards(order)
        assert lookup(ledger, [1, 2, 3]) == [9.0, 9.0, 1.0]
        assert ledger.drain_metrics()["ledger/live_groups"] == 3
        # The older entry takes up no place: of the four slots one is free, and each is used once.
        again = ledger.state_dict()
        assert sorted([*again["slots"].tolist(), *again["free_slots"].tolist()]) == [0, 1, 2, 3]
        assert sorted(again["groups"].tolist()) == [1, 2, 3]


def test_a_group_that_one_shard_holds_and_another_evicted_is_held() -> None:
    evicts, holds, merged = new_ledger(capacity=1), new_ledger(), new_ledger()
    for ledger, groups in ((evicts, [1, 2]), (holds, [1])):
        ledger.begin_step(1)
        for group in groups:
            store(ledger, [group])
    assert 1 in evicts._index.evicted
    merged.load_shards([evicts.state_dict(), holds.state_dict()])
    assert not merged._index.evicted
    store(merged, [1])
    assert merged.drain_metrics()["ledger/false_evictions/lru"] == 0


def test_checkpoint_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match=r"ledger\.capacity: must hold the checkpoint's 3 groups, got 2"):
        new_ledger("lru", capacity=2).load_shards([saved([1, 2], 1.0), saved([3], 2.0)])
    wide = Ledger(LedgerOptions(capacity=4), state_width=WIDTH + 1)
    with pytest.raises(UserError, match="states are 2 wide, the model's 3"):
        wide.load_state_dict(saved([1], 1.0))


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
    same, other = new_ledger(), new_ledger(capacity=7)
    for resumed in (same, other):
        resumed.load_state_dict(whole)
        found = resumed.state_dict()
        by_group = dict(zip(found["groups"].tolist(), found["rows"][:, 0].tolist(), strict=True))
        assert by_group == {1: 1.0, 2: 2.0, 3: 3.0}


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
def test_a_row_is_valid_if_each_of_its_numbers_is_finite(dtype, row, is_finite) -> None:
    slab = Slab(width=3, capacity=2, device=torch.device("cpu"), dtype=dtype)
    rows = torch.tensor([row, [1.0, 1.0, 1.0]], dtype=dtype)
    assert int(slab.write(np.array([1, 0]), rows)) == (not is_finite)
    assert slab.are_valid(np.array([1, 0, 2])).tolist() == [is_finite, True, False]
    slab.restore(np.array([0]), torch.full((1, 3), 1e300, dtype=torch.float64), torch.tensor([True]))
    assert not slab.are_valid(np.array([0]))  # infinite in the new type


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
