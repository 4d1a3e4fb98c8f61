"""The memory of evicted groups by itself: order, bound, and taking changes back."""

from __future__ import annotations

from collections.abc import Callable

from trainer.ledger.ghosts import RecentlyEvicted


def undo(journal: list[Callable[[], object]]) -> None:
    while journal:
        journal.pop()()


def test_oldest_are_dropped_and_taken_ones_do_not_count() -> None:
    memory = RecentlyEvicted(2, None)
    memory.add([1, 2], "lru", 1)
    assert memory.take([5, 2]) == [(1, "lru")]
    memory.add([3], "stale", 2)
    assert list(memory.items()) == [(1, ("lru", 1)), (3, ("stale", 2))]
    memory.add([2], "stale", 3)
    assert list(memory.items()) == [(3, ("stale", 2)), (2, ("stale", 3))]
    assert 1 not in memory
    assert memory.take([1]) == []


def test_more_than_fit_at_once_keep_the_newest() -> None:
    memory = RecentlyEvicted(3, None)
    memory.add(list(range(10)), "lru", 1)
    assert [group for group, _ in memory.items()] == [7, 8, 9]


def test_undo_brings_back_what_was_dropped_and_nothing_that_was_taken_before() -> None:
    journal: list[Callable[[], object]] = []
    memory = RecentlyEvicted(2, journal.append)
    memory.add([1, 2], "lru", 1)
    memory.take([1])
    journal.clear()
    before = list(memory.items())
    memory.add([3, 4], "stale", 2)
    memory.take([4])
    memory.clear()
    memory.add([5], "lru", 3)
    undo(journal)
    assert list(memory.items()) == before == [(2, ("lru", 1))]
    assert 1 not in memory
    memory.add([6], "lru", 4)
    assert [group for group, _ in memory.items()] == [2, 6]
