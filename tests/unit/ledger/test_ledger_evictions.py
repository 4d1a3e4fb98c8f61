"""What is evicted, what is remembered of it, and what counts as a false eviction."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.ranks import differences
from tests.unit.ledger.test_ledger import lookup, new_ledger, store
from trainer.errors import UserError
from trainer.ledger import Ledger
from trainer.ledger.index import WipeMode


def evicting_ledger(mode: str) -> Ledger:
    """A ledger that has evicted group 1, and only it, before step 9."""
    if mode == "lru":
        ledger = new_ledger("lru", capacity=2)
        groups = [1, 2, 3]
    else:
        ledger = new_ledger("periodic_stale", capacity=8, stale_threshold=3)
        groups = [1]
    for step, group in enumerate(groups, start=1):
        ledger.begin_step(step)
        store(ledger, [group], cell=0)
    ledger.begin_step(9)
    assert dict(ledger.recently_evicted).keys() == {1}
    return ledger


BOTH = pytest.mark.parametrize(("mode", "name"), [("lru", "lru"), ("periodic_stale", "stale")])


@BOTH
def test_group_that_never_comes_back_is_no_false_eviction(mode: str, name: str) -> None:
    ledger = evicting_ledger(mode)
    store(ledger, [7], cell=1)
    metrics = ledger.drain_metrics()
    assert metrics[f"ledger/evictions/{name}"] >= 1
    assert metrics["ledger/false_evictions/lru"] == metrics["ledger/false_evictions/stale"] == 0


@BOTH
def test_group_that_comes_back_in_mid_document_counts_once_for_its_mode(mode: str, name: str) -> None:
    ledger = evicting_ledger(mode)
    lookup(ledger, [1], cell=1)
    assert ledger.last_extra_metrics[f"ledger/false_evictions/{name}"] == 0  # the look-up alone does not count
    store(ledger, [1], cell=1)
    store(ledger, [1], cell=2)
    other = "stale" if name == "lru" else "lru"
    metrics = ledger.drain_metrics()
    assert metrics[f"ledger/false_evictions/{name}"] == 1
    assert metrics[f"ledger/false_evictions/{other}"] == 0
    assert 1 not in ledger.recently_evicted
    assert metrics["ledger/cold_starts"] == 1


@BOTH
def test_group_that_comes_back_at_its_start_is_forgotten_without_counting(mode: str, name: str) -> None:
    ledger = evicting_ledger(mode)
    store(ledger, [1], cell=0)
    store(ledger, [1], cell=1)
    assert 1 not in ledger.recently_evicted
    assert ledger.drain_metrics()[f"ledger/false_evictions/{name}"] == 0


def test_lru_evicts_the_least_recently_stored_and_pins_the_micro_batch() -> None:
    ledger = new_ledger("lru", capacity=3)
    for step, group in ((1, 1), (2, 2), (3, 3)):
        ledger.begin_step(step)
        store(ledger, [group])
    ledger.begin_step(4)
    store(ledger, [1, 4])
    assert lookup(ledger, [1, 2, 3, 4]) == [1.0, 0.0, 1.0, 1.0]
    assert dict(ledger.recently_evicted) == {2: ("lru", 4)}


def test_lru_ties_fall_in_slot_order() -> None:
    ledger = new_ledger("lru", capacity=3)
    ledger.begin_step(1)
    store(ledger, [30])
    store(ledger, [20])
    store(ledger, [10])
    store(ledger, [30])
    ledger.begin_step(2)
    store(ledger, [40])
    assert 30 in ledger.recently_evicted


def test_false_eviction_is_counted_once_and_only_in_mid_group() -> None:
    ledger = new_ledger("lru", capacity=1)
    ledger.begin_step(1)
    store(ledger, [1])
    store(ledger, [2])
    store(ledger, [1], cell=1)
    metrics = ledger.drain_metrics()
    assert metrics["ledger/evictions/lru"] == 2
    assert metrics["ledger/false_evictions/lru"] == 1
    store(ledger, [2], cell=0)
    store(ledger, [2], cell=1)
    assert ledger.drain_metrics()["ledger/false_evictions/lru"] == 0


@pytest.mark.parametrize(("is_last", "value"), [(True, 1.0), (False, float("nan"))])
def test_false_eviction_counts_though_the_row_is_not_kept(is_last: bool, value: float) -> None:
    ledger = new_ledger("lru", capacity=1)
    ledger.begin_step(1)
    store(ledger, [1])
    store(ledger, [2])
    store(ledger, [1], value, is_last=is_last)
    assert ledger.drain_metrics()["ledger/false_evictions/lru"] == 1


def test_stale_sweep_evicts_what_is_older_than_the_threshold() -> None:
    ledger = new_ledger("periodic_stale", stale_threshold=2, sweep_every=1)
    ledger.begin_step(1)
    store(ledger, [1])
    ledger.begin_step(2)
    store(ledger, [2])
    ledger.begin_step(3)
    assert ledger.drain_metrics()["ledger/evictions/stale"] == 0
    ledger.begin_step(4)
    assert ledger.drain_metrics()["ledger/evictions/stale"] == 1
    store(ledger, [1])
    assert ledger.drain_metrics()["ledger/false_evictions/stale"] == 1


def test_full_wipe_empties_everything_on_its_step() -> None:
    ledger = new_ledger("full", wipe_every=3)
    ledger.begin_step(2)
    store(ledger, [1, 2])
    ledger.begin_step(3)
    metrics = ledger.drain_metrics()
    assert metrics["ledger_wipe_count"] == 1
    assert metrics["ledger/live_groups"] == 0
    assert metrics["ledger/evictions/lru"] == metrics["ledger/evictions/stale"] == 0


def test_full_wipe_forgets_who_was_evicted() -> None:
    before = new_ledger("lru", capacity=1)
    before.begin_step(1)
    store(before, [1])
    store(before, [2])
    ledger = new_ledger("full", capacity=1, wipe_every=3)
    ledger.load_state_dict([before.state_dict()])
    assert 1 in ledger.recently_evicted
    ledger.begin_step(3)
    store(ledger, [1])
    assert ledger.drain_metrics()["ledger/false_evictions/lru"] == 0


def test_memory_of_evicted_groups_is_bounded_by_the_capacity() -> None:
    ledger = new_ledger("lru", capacity=2)
    for step, group in enumerate([1, 2, 3, 4, 5, 6], start=1):
        ledger.begin_step(step)
        store(ledger, [group])
    assert dict(ledger.recently_evicted) == {3: ("lru", 5), 4: ("lru", 6)}
    store(ledger, [1])
    assert ledger.drain_metrics()["ledger/false_evictions/lru"] == 0


def test_a_refused_store_leaves_no_trace() -> None:
    ledger = evicting_ledger("lru")
    ledger.drain_metrics()
    before, evicted = ledger.state_dict(), dict(ledger.recently_evicted)
    with pytest.raises(UserError, match=r"ledger\.capacity"):
        store(ledger, [1, 7, 2], float("nan"))
    with pytest.raises(ValueError, match="appears twice"):
        store(ledger, [1, 1])
    assert differences(ledger.state_dict(), before) == []
    assert dict(ledger.recently_evicted) == evicted
    assert not any(ledger.undrained().values())
    # Group 1 is still known to have been evicted.
    store(ledger, [1])
    assert ledger.drain_metrics()["ledger/false_evictions/lru"] == 1


REFUSED = {
    "groups": ([1, 7, 2], [0, 1, 2], [False] * 3, 3),
    "twice": ([1, 1], [0, 1], [False] * 2, 2),
    "width": ([1], [1], [False], 2),
    "cells": ([1, 7], [1], [False] * 2, 2),
    "ends": ([1, 7], [1, 1], [True], 2),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("mode", ["lru", "none", "periodic_stale", "full"])
def test_a_refused_store_changes_nothing_in_any_mode(mode: WipeMode, kind: str) -> None:
    """Not the step of the last store either, before which no step may begin again."""
    settings = {"stale_threshold": 3, "wipe_every": 100}
    ledger, other = (Ledger(state_width=2, capacity=2, wipe_mode=mode, **settings) for _ in range(2))
    groups, cells, is_last, count = REFUSED[kind]
    for one in (ledger, other):
        one.begin_step(3)
        one.store(np.array([5, 9]), np.array([0, 0]), np.array([False, kind == "twice"]), torch.ones(2, 2))
        one.begin_step(4)
    with pytest.raises((UserError, ValueError)):
        ledger.store(np.array(groups), np.array(cells), np.array(is_last), torch.ones(count, 2))
    assert differences(ledger.state_dict(), other.state_dict()) == []
    assert ledger.undrained() == other.undrained()
    for one in (ledger, other):
        one.begin_step(3)
        one.store(np.array([5, 9]), np.array([1, 1]), np.array([False, True]), torch.zeros(2, 2))
    assert differences(ledger.state_dict(), other.state_dict()) == []


def test_a_group_that_was_evicted_again_is_not_the_oldest() -> None:
    ledger = new_ledger("lru", capacity=2)
    for step, group in enumerate([1, 2, 3, 4, 1, 5, 6], start=1):
        ledger.begin_step(step)
        store(ledger, [group])
    # 1 and 2 were evicted first; 1 came back at step 5, and was evicted again at step 7.
    assert list(ledger.recently_evicted.items()) == [(4, ("lru", 6)), (1, ("lru", 7))]


def test_two_groups_that_keep_evicting_each_other_are_counted_each_time() -> None:
    ledger = new_ledger("lru", capacity=1)
    for step in range(1, 3000):
        ledger.begin_step(step)
        store(ledger, [step % 2])
    assert ledger.drain_metrics()["ledger/false_evictions/lru"] == 2997
    assert dict(ledger.recently_evicted) == {0: ("lru", 2999)}


@pytest.mark.parametrize("mode", ["full", "periodic_stale"])
def test_a_wipe_or_sweep_of_a_step_that_is_never_begun_happens_at_the_next(mode: str) -> None:
    ledger = new_ledger(mode, wipe_every=3, sweep_every=3, stale_threshold=1)
    ledger.begin_step(2)
    store(ledger, [1])
    ledger.begin_step(4)
    assert lookup(ledger, [1]) == [0.0]
    metrics = ledger.drain_metrics()
    assert metrics["ledger_wipe_count"] + metrics["ledger/evictions/stale"] == 1
    ledger.begin_step(4)
    ledger.begin_step(5)
    assert ledger.drain_metrics()["ledger_wipe_count"] == 0


def test_order_of_stores_stays_small_over_many_steps() -> None:
    ledger = new_ledger("lru", capacity=8)
    for step in range(1, 3000):
        ledger.begin_step(step)
        store(ledger, [step % 5, 5 + step % 3])
    assert ledger._index._order is not None
    assert ledger._index._order.num_entries <= 2 * 8 + 1024
    assert sum(slots.size for _, slots in ledger._index._order._buckets) <= 2 * 8 + 1024
    store(ledger, [100])
    # Of groups 0..4 and 5..7 all slots are used; group 0 was stored longest ago (step 2995).
    assert dict(ledger.recently_evicted) == {0: ("lru", 2999)}
