"""The memory of evicted groups by itself: order, bound, and taking changes back."""

from __future__ import annotations

from trainer.ledger.eviction import EvictionMode
from trainer.ledger.ghosts import Ghost, RecentlyEvicted
from trainer.ledger.journal import Journal


class Memory:
    """The memory with the dict that it shares, and how its owner uses both."""

    def __init__(self, capacity: int, *, keep_undo: bool = False) -> None:
        self.place_of: dict[int, int] = {}
        self.journal = Journal(is_kept=keep_undo)
        self.ghosts = RecentlyEvicted(capacity, self.place_of, self.journal)

    def add(self, groups: list[int], mode: EvictionMode, step: int) -> None:
        self.ghosts.add(groups, mode, step)

    def take(self, group: int) -> None:
        self.ghosts.take([group], [self.place_of[group]])

    @property
    def items(self) -> list[tuple[int, Ghost]]:
        items = list(self.ghosts.items())
        assert self.ghosts.num_known == len(items) == len(self.place_of)
        return items


def test_oldest_are_dropped_and_taken_ones_do_not_count() -> None:
    memory = Memory(2)
    memory.add([1, 2], "lru", 1)
    memory.take(2)
    memory.add([3], "stale", 2)
    assert memory.items == [(1, ("lru", 1)), (3, ("stale", 2))]
    memory.add([2], "stale", 3)
    assert memory.items == [(3, ("stale", 2)), (2, ("stale", 3))]


def test_more_than_fit_at_once_keep_the_newest() -> None:
    memory = Memory(3)
    memory.add(list(range(10)), "lru", 1)
    assert [group for group, _ in memory.items] == [7, 8, 9]


def test_undo_brings_back_what_was_dropped_and_nothing_that_was_taken_before() -> None:
    memory = Memory(2, keep_undo=True)
    memory.add([1, 2], "lru", 1)
    memory.take(1)
    memory.journal.commit()
    before = memory.items
    memory.add([3, 4], "stale", 2)
    memory.take(4)
    memory.ghosts.clear()
    memory.add([5], "lru", 3)
    memory.journal.undo()
    assert memory.items == before == [(2, ("lru", 1))]
    memory.add([6], "lru", 4)
    assert [group for group, _ in memory.items] == [2, 6]
