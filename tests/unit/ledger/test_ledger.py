"""The ledger's meaning, rule by rule, on one rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainer.errors import UserError
from trainer.ledger import COUNTER_KEYS, GAUGE_KEYS, Ledger

WIDTH = 2


def new_ledger(wipe_mode: str = "none", capacity: int = 4, **settings: object) -> Ledger:
    defaults = {"stale_threshold": 2, "sweep_every": 1, "wipe_every": 3}
    return Ledger(state_width=WIDTH, capacity=capacity, wipe_mode=wipe_mode, **{**defaults, **settings})


def store(ledger: Ledger, groups: list[int], value: float = 1.0, *, cell: int = 1, is_last: bool = False) -> None:
    count = len(groups)
    ledger.store(
        np.array(groups, np.int64),
        np.full(count, cell, np.int64),
        np.full(count, is_last),
        torch.full((count, WIDTH), value),
    )


def lookup(ledger: Ledger, groups: list[int], *, cell: int = 1) -> list[float]:
    rows = ledger.lookup(np.array(groups, np.int64), np.full(len(groups), cell, np.int64))
    return rows[:, 0].tolist()


def test_stored_state_is_found_by_the_next_cell() -> None:
    ledger = new_ledger()
    ledger.begin_step(1)
    store(ledger, [7, 8], 3.0, cell=0)
    assert lookup(ledger, [8, 9, -1, 7]) == [3.0, 0.0, 0.0, 3.0]


def test_group_start_begins_from_zero_whatever_is_held() -> None:
    ledger = new_ledger()
    ledger.begin_step(1)
    store(ledger, [7], 3.0)
    assert lookup(ledger, [7], cell=0) == [0.0]
    assert ledger.drain_metrics()["ledger/cold_starts"] == 0


def test_loaded_states_are_detached_copies() -> None:
    ledger = new_ledger()
    ledger.begin_step(1)
    states = torch.ones(1, WIDTH, requires_grad=True) * 2
    ledger.store(np.array([7]), np.array([0]), np.array([False]), states)
    found = ledger.lookup(np.array([7]), np.array([1]))
    assert found.is_leaf
    assert not found.requires_grad
    found += 1
    assert lookup(ledger, [7]) == [2.0]


def test_every_key_is_always_present_as_a_float() -> None:
    ledger = new_ledger()
    for metrics in (ledger.drain_metrics(), ledger.last_extra_metrics):
        assert set(metrics) == {*COUNTER_KEYS, *GAUGE_KEYS}
        assert all(type(value) is float for value in metrics.values())


def test_cold_start_counts_each_missing_continuation_once() -> None:
    ledger = new_ledger()
    ledger.begin_step(1)
    lookup(ledger, [1, 2, -1])
    store(ledger, [1, 2])
    lookup(ledger, [1, 2])
    assert ledger.drain_metrics()["ledger/cold_starts"] == 2
    assert ledger.drain_metrics()["ledger/cold_starts"] == 0


def test_step_metrics_are_shown_without_clearing_and_start_again_each_step() -> None:
    ledger = new_ledger()
    ledger.begin_step(1)
    lookup(ledger, [1])
    assert ledger.last_extra_metrics["ledger/cold_starts"] == 1
    assert ledger.last_extra_metrics["ledger/cold_starts"] == 1
    ledger.begin_step(2)
    assert ledger.last_extra_metrics["ledger/cold_starts"] == 0
    assert ledger.drain_metrics()["ledger/cold_starts"] == 1


def test_last_cell_frees_its_slot_and_is_no_eviction() -> None:
    ledger = new_ledger("lru", capacity=2)
    ledger.begin_step(1)
    store(ledger, [1, 2])
    store(ledger, [1], is_last=True)
    store(ledger, [3])
    metrics = ledger.drain_metrics()
    assert metrics["ledger/evictions/lru"] == 0
    assert metrics["ledger/live_groups"] == 2
    assert metrics["ledger/fill_fraction"] == 1.0


def test_full_capacity_without_eviction_names_the_capacity_needed_and_changes_nothing() -> None:
    ledger = new_ledger("none", capacity=2)
    ledger.begin_step(1)
    store(ledger, [1])
    with pytest.raises(UserError, match=r"ledger\.capacity: is exhausted: 4 groups .* got 2; set it to at least 4"):
        store(ledger, [2, 3, 4])
    assert lookup(ledger, [1]) == [1.0]
    assert ledger.drain_metrics()["ledger/live_groups"] == 1


def test_lru_refuses_a_micro_batch_that_exceeds_the_capacity() -> None:
    ledger = new_ledger("lru", capacity=2)
    ledger.begin_step(1)
    with pytest.raises(UserError, match=r"ledger\.capacity: must hold the groups of one micro-batch: needs 3, got 2"):
        store(ledger, [1, 2, 3])


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
    assert ledger.last_extra_metrics["ledger/evictions/stale"] == 1
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


def test_non_finite_rows_are_refused_and_their_groups_start_cold() -> None:
    ledger = new_ledger()
    ledger.begin_step(1)
    store(ledger, [1, 2])
    bad = torch.tensor([[1.0, float("inf")], [5.0, 5.0]])
    ledger.store(np.array([1, 2]), np.array([2, 2]), np.array([False, False]), bad)
    assert lookup(ledger, [1, 2]) == [0.0, 5.0]
    metrics = ledger.drain_metrics()
    assert metrics["ledger/refused_rows"] == 1
    assert metrics["ledger/cold_starts"] == 1


def test_duplicate_group_is_an_error_that_names_it() -> None:
    ledger = new_ledger()
    ledger.begin_step(1)
    with pytest.raises(ValueError, match="group 42 appears twice"):
        store(ledger, [42, 1, 42])
    with pytest.raises(ValueError, match="group 42 appears twice"):
        lookup(ledger, [42, 42])
    store(ledger, [-1, -1])


def test_store_without_a_step_and_steps_that_go_back_are_errors() -> None:
    ledger = new_ledger()
    with pytest.raises(RuntimeError, match="call begin_step before store"):
        store(ledger, [1])
    ledger.begin_step(5)
    with pytest.raises(RuntimeError, match="step 4 after step 5"):
        ledger.begin_step(4)


def test_rollback_needs_the_undo_journal() -> None:
    with pytest.raises(RuntimeError, match="keep_undo=True"):
        new_ledger().rollback()


def test_wipe_that_was_rolled_back_is_made_up_for_at_the_next_step() -> None:
    ledger = new_ledger("full", wipe_every=3, keep_undo=True)
    ledger.begin_step(2)
    store(ledger, [1])
    ledger.begin_step(3)
    ledger.rollback()
    assert lookup(ledger, [1]) == [1.0]
    ledger.begin_step(4)
    assert ledger.last_extra_metrics["ledger_wipe_count"] == 1
    assert lookup(ledger, [1]) == [0.0]


def test_index_of_recency_stays_small_over_many_steps() -> None:
    ledger = new_ledger("lru", capacity=8)
    for step in range(1, 3000):
        ledger.begin_step(step)
        store(ledger, [step % 5, 5 + step % 3])
    assert len(ledger._store.recency) <= 2 * 8 + 1024 + 2
    store(ledger, [100])
    # Of groups 0..4 and 5..7 all slots are used; group 0 was stored longest ago (step 2995).
    assert dict(ledger.recently_evicted) == {0: ("lru", 2999)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"wipe_mode": "lur"}, r"ledger\.wipe_mode: must be one of none, full, lru, periodic_stale, got 'lur'"),
        ({"capacity": 0}, r"ledger\.capacity: must be >= 1, got 0"),
        ({"wipe_mode": "full", "wipe_every": 0}, r"ledger\.wipe_every: must be >= 1 with wipe_mode full, got 0"),
        ({"wipe_mode": "periodic_stale", "sweep_every": 0}, r"ledger\.sweep_every: must be >= 1"),
        ({"wipe_mode": "periodic_stale", "stale_threshold": 0}, r"ledger\.stale_threshold: must be >= 1"),
        ({"ownership": "auto"}, r"ledger\.ownership: must be one of reader, exchange, got 'auto'"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        new_ledger(**settings)
