"""The index of recency by itself: order, pinned slots, entries that no longer count."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from trainer.ledger import recency
from trainer.ledger.recency import RecencyBuckets

NONE = np.empty(0, np.int64)


def buckets(steps: dict[int, list[int]], size: int = 200) -> tuple[RecencyBuckets, np.ndarray]:
    last_step = np.full(size, -1, np.int64)
    index = RecencyBuckets(last_step)
    for step, slots in steps.items():
        last_step[slots] = step
        index.add(step, np.array(slots, np.int64))
    return index, last_step


def test_slots_come_in_order_of_step_then_slot() -> None:
    index, _ = buckets({1: [5, 3], 2: [9, 0], 4: [1]})
    assert index.take_oldest(3, NONE).tolist() == [3, 5, 0]
    assert index.take_oldest(9, NONE).tolist() == [9, 1]
    assert index.take_oldest(1, NONE).tolist() == []


def test_slot_that_was_stored_again_counts_at_its_newest_step() -> None:
    index, _ = buckets({1: [5, 3], 2: [5, 7]})
    assert index.take_oldest(3, NONE).tolist() == [3, 5, 7]


def test_pinned_slots_stay_and_come_once_when_they_are_free() -> None:
    index, _ = buckets({1: [8], 2: [0, 1, 2, 3, 4]})
    assert index.take_oldest(2, np.array([0, 3])).tolist() == [8, 1]
    assert index.take_oldest(9, NONE).tolist() == [0, 2, 3, 4]


def test_few_are_taken_from_a_long_bucket_again_and_again() -> None:
    index, last_step = buckets({1: list(range(150)), 2: [150]})
    last_step[10:140] = -1
    taken = [index.take_oldest(7, np.array([150])).tolist() for _ in range(3)]
    assert taken == [list(range(7)), [7, 8, 9, 140, 141, 142, 143], [144, 145, 146, 147, 148, 149]]


def test_everything_before_the_cutoff_is_taken() -> None:
    index, _ = buckets({1: [4, 2], 3: [1], 5: [0, 2]})
    assert index.take_before(5).tolist() == [4, 1]
    assert len(index) == 2
    assert index.take_before(6).tolist() == [0, 2]


def test_rebuilding_drops_what_no_longer_counts_and_keeps_the_order() -> None:
    index, last_step = buckets({1: [4, 2], 2: [2, 9], 3: [9, 1]})
    last_step[4] = -1
    assert len(index) == 6
    index.rebuild()
    assert len(index) == 3
    assert index.take_oldest(3, NONE).tolist() == [2, 1, 9]


@pytest.mark.parametrize("seed", range(25))
def test_random_stores_takes_and_undone_steps_equal_a_sort_of_all_slots(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The front is refilled every few entries, and spans few steps, as it is in long runs."""
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(recency, "FRONT_ENTRIES", int(rng.choice([1, 9, 40])))
    monkeypatch.setattr(recency, "FRONT_SPAN", int(rng.choice([2, 30])))
    journal: list[Callable[[], object]] = []
    last_step = np.full(50, -1, np.int64)
    index = RecencyBuckets(last_step, journal.append)

    def in_order(*, but: np.ndarray = NONE) -> list[int]:
        slots = [slot for slot in np.flatnonzero(last_step >= 0).tolist() if slot not in but]
        return sorted(slots, key=lambda slot: (last_step[slot], slot))

    step = 0
    for _ in range(150):
        before, step = (last_step.copy(), step), step + int(rng.integers(0, 3))
        for _ in range(int(rng.integers(1, 4))):
            stored = rng.permutation(50)[: int(rng.integers(1, 8))]
            last_step[stored] = step
            expected = in_order(but=stored)[: int(rng.integers(0, 9)) * int(rng.integers(0, 2))]
            assert index.take_oldest(len(expected), stored).tolist() == expected
            last_step[expected] = -1
            index.add(step, stored)
        if rng.random() < 0.2:
            cutoff = step - int(rng.integers(0, 6))
            expected = [slot for slot in in_order() if last_step[slot] < cutoff]
            assert index.take_before(cutoff).tolist() == expected
            last_step[expected] = -1
        if rng.random() < 0.3:
            while journal:
                journal.pop()()
            last_step[:], step = before
        journal.clear()
        if rng.random() < 0.05:
            index.rebuild()
            assert len(index) == len(in_order())
    assert index.take_oldest(50, NONE).tolist() == in_order()
    assert len(index) == 0
