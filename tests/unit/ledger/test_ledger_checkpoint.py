"""Saving and loading the ledger, for the same and for another number of ranks."""

from __future__ import annotations

import pytest

from tests.unit.ledger.test_ledger import lookup, store
from trainer.errors import UserError
from trainer.ledger import Ledger, LedgerOptions, Owners

WIDTH = 2


def new_ledger(wipe_mode: str = "lru", capacity: int = 4, rank: int = 0, world_size: int = 1) -> Ledger:
    owners = Owners("reader", rank, world_size)
    return Ledger(LedgerOptions(capacity=capacity, wipe_mode=wipe_mode), state_width=WIDTH, owners=owners)


def saved_by(rank: int, groups: list[int], value: float, *, step: int = 1, world_size: int = 2) -> dict[str, object]:
    ledger = new_ledger("lru", capacity=4, rank=rank, world_size=world_size)
    ledger.begin_step(step)
    store(ledger, groups, value)
    return ledger.state_dict()


def test_same_world_size_takes_the_own_shard_only() -> None:
    ledger = new_ledger("lru", capacity=4, rank=1, world_size=2)
    ledger.load_state_dict([saved_by(0, [1, 2], 1.0), saved_by(1, [3], 2.0)])
    assert lookup(ledger, [1, 2, 3]) == [0.0, 0.0, 2.0]


def test_of_a_group_in_several_shards_the_newest_state_counts() -> None:
    shards = [saved_by(0, [1, 2], 9.0, step=7), saved_by(1, [1, 3], 1.0, step=5)]
    for order in (shards, shards[::-1]):
        ledger = new_ledger("lru")
        ledger.load_state_dict(order)
        assert lookup(ledger, [1, 2, 3]) == [9.0, 9.0, 1.0]
        assert ledger.drain_metrics()["ledger/live_groups"] == 3
        # The older entry takes up no place: of the four slots one is free, and each is used once.
        saved = ledger.state_dict()
        assert sorted([*saved["slots"].tolist(), *saved["free_slots"].tolist()]) == [0, 1, 2, 3]
        assert sorted(saved["groups"].tolist()) == [1, 2, 3]


def test_a_group_that_one_shard_holds_and_another_evicted_is_held() -> None:
    evicts, holds, merged = new_ledger(capacity=1), new_ledger(), new_ledger()
    for ledger, groups in ((evicts, [1, 2]), (holds, [1])):
        ledger.begin_step(1)
        for group in groups:
            store(ledger, [group])
    assert 1 in evicts._index.evicted
    merged.load_state_dict([evicts.state_dict(), holds.state_dict()])
    assert not merged._index.evicted
    store(merged, [1])
    assert merged.drain_metrics()["ledger/false_evictions/lru"] == 0


def test_checkpoint_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match=r"ledger\.capacity: must hold the checkpoint's 3 groups, got 2"):
        new_ledger("lru", capacity=2).load_state_dict([saved_by(0, [1, 2], 1.0), saved_by(1, [3], 2.0)])
    with pytest.raises(UserError, match="got 2; set it to at least 7"):
        new_ledger("lru", capacity=2).load_state_dict([saved_by(0, [1, 2], 1.0), saved_by(1, [3], 2.0)], room=4)
    wide = Ledger(LedgerOptions(capacity=4), state_width=WIDTH + 1)
    with pytest.raises(UserError, match="states are 2 wide, the model's 3"):
        wide.load_state_dict([saved_by(0, [1], 1.0)])


@pytest.mark.parametrize(("capacity", "is_warned"), [(4, True), (5, False)])
def test_a_capacity_without_room_for_groups_in_flight_is_warned_about(
    capacity: int, is_warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = new_ledger("lru", capacity=capacity)
    ledger.load_state_dict([saved_by(0, [1, 2], 1.0), saved_by(1, [3], 2.0)], room=2)
    assert ("set it to at least 5" in capsys.readouterr().err) == is_warned
