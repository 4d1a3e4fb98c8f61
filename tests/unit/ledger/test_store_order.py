"""The order of stores by itself: by step, then by slot, past entries that no longer count."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.ledger.index import PINNED, StoreOrder


def order_of(steps: dict[int, list[int]], size: int = 200) -> tuple[StoreOrder, np.ndarray]:
    last_step = np.full(size, -1, np.int64)
    order = StoreOrder(last_step)
    for step, slots in steps.items():
        last_step[slots] = step
        order.add(step, np.array(slots, np.int64))
    return order, last_step


def test_slots_come_in_order_of_step_then_slot() -> None:
    order, _ = order_of({1: [5, 3], 2: [9, 0], 4: [1]})
    assert order.take_oldest(3).tolist() == [3, 5, 0]
    assert order.take_oldest(9).tolist() == [9, 1]
    assert order.take_oldest(1).tolist() == []


def test_slot_that_was_stored_again_counts_at_its_newest_step() -> None:
    order, _ = order_of({1: [5, 3], 2: [5, 7]})
    assert order.take_oldest(3).tolist() == [3, 5, 7]


def test_a_store_of_nothing_hides_nothing() -> None:
    order, _ = order_of({1: [], 2: [4], 3: [], 4: [1]})
    assert order.take_oldest(2).tolist() == [4, 1]


def test_few_are_taken_from_a_long_step_again_and_again() -> None:
    order, last_step = order_of({1: list(range(150)), 2: [150]})
    last_step[10:140] = -1
    taken = [order.take_oldest(7).tolist() for _ in range(3)]
    assert taken == [list(range(7)), [7, 8, 9, 140, 141, 142, 143], [144, 145, 146, 147, 148, 149, 150]]


def test_everything_before_the_cutoff_is_taken() -> None:
    order, _ = order_of({1: [4, 2], 3: [1], 5: [0, 2]})
    assert order.take_before(5).tolist() == [4, 1]
    assert order.take_before(6).tolist() == [0, 2]
    assert order.num_entries == 0


def test_rebuilding_drops_what_no_longer_counts_and_keeps_the_order() -> None:
    order, last_step = order_of({1: [4, 2], 2: [2, 9], 3: [9, 1]})
    last_step[4] = -1
    assert order.num_entries == 6
    order.rebuild()
    assert order.num_entries == 3
    assert order.take_oldest(3).tolist() == [2, 1, 9]


@pytest.mark.parametrize("seed", range(25))
def test_random_stores_and_takes_equal_a_sort_of_all_slots(seed: int) -> None:
    rng = np.random.default_rng(seed)
    last_step = np.full(50, -1, np.int64)
    order = StoreOrder(last_step)

    def in_order() -> list[int]:
        return sorted(np.flatnonzero(last_step >= 0).tolist(), key=lambda slot: (last_step[slot], slot))

    step = 0
    for _ in range(300):
        step += int(rng.integers(0, 3))
        for _ in range(int(rng.integers(1, 4))):
            stored = rng.permutation(50)[: int(rng.integers(0, 8))]
            last_step[stored] = PINNED
            expected = in_order()[: int(rng.integers(0, 9)) * int(rng.integers(0, 2))]
            assert order.take_oldest(len(expected)).tolist() == expected
            last_step[expected] = -1
            last_step[stored] = step
            order.add(step, stored)
        if rng.random() < 0.2:
            cutoff = step - int(rng.integers(0, 6))
            expected = [slot for slot in in_order() if last_step[slot] < cutoff]
            assert order.take_before(cutoff).tolist() == expected
            last_step[expected] = -1
        if rng.random() < 0.05:
            order.rebuild()
            assert order.num_entries == len(in_order())
        assert order.num_entries == order._front.size + sum(slots.size for _, slots in order._buckets)
        assert order.num_entries <= 2 * 50 + 1024
    assert order.take_oldest(51).tolist() == in_order()
    assert order.num_entries == 0
