"""The index of recency by itself: order, pinned slots, entries that no longer count."""

from __future__ import annotations

import numpy as np

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
