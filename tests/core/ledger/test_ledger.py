"""The ledger's meaning, rule by rule, on one rank: what is evicted, what is remembered of it, and rows that are not finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.ranks import differences
from trainer.arrays import splitmix64
from trainer.errors import UserError
from trainer.ledger import Ledger, LedgerOptions, index
from trainer.options import WipeMode

WIDTH = 2


def new_ledger(wipe_mode="none", capacity=4, dtype=None, **settings):
    settings = {"stale_threshold": 2, "wipe_every": 3 if wipe_mode == "full" else 0, **settings}
    options = LedgerOptions(wipe_mode, capacity, **settings)
    return Ledger(options, state_width=WIDTH, dtype=dtype)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_states_of_any_dtype_come_back_to_the_bit(dtype: torch.dtype) -> None:
    ledger = new_ledger(dtype=dtype)
    groups, no = np.array([4, 9]), np.array([False, False])
    rows = torch.tensor([[0.1, -3.7], [1e-3, 250.3]], dtype=dtype)
    ledger.begin_step(1)
    ledger.store(groups, np.array([0, 0]), no, rows)
    ledger.begin_step(2)
    ledger.store(groups, np.array([1, 1]), no, rows.t())
    found = ledger.lookup(groups, np.array([2, 2]))
    assert found.dtype == torch.promote_types(dtype, torch.float32)  # wide enough for any model
    assert torch.equal(found.to(dtype), rows.t())


def test_duplicate_group_is_an_error_that_names_it() -> None:
    ledger = new_ledger()
    ledger.begin_step(1)
    with pytest.raises(ValueError, match="group 42 appears twice"):
        store(ledger, [-1, -1, -1, 42, 1, 42])
    with pytest.raises(ValueError, match="group 42 appears twice"):
        lookup(ledger, [42, 42])
    store(ledger, [-1, -1])


def test_store_without_a_step_and_steps_that_go_back_are_errors() -> None:
    ledger = new_ledger()
    with pytest.raises(RuntimeError, match="call begin_step before store"):
        store(ledger, [1])
    ledger.begin_step(5)
    store(ledger, [1])
    with pytest.raises(RuntimeError, match="step 4 after a store at step 5"):
        ledger.begin_step(4)
    with pytest.raises(RuntimeError, match="step -1 after"):
        new_ledger().begin_step(-1)


@pytest.mark.parametrize("resumes", [False, True])
def test_steps_that_stored_nothing_may_begin_again(resumes: bool) -> None:
    """A run that finds its data exhausted has begun steps without tokens, which a resumed run begins again."""
    ledger = new_ledger("lru")
    ledger.begin_step(5)
    store(ledger, [1])
    for step in (6, 7):
        ledger.begin_step(step)
        store(ledger, [-1])
    if resumes:
        saved, ledger = ledger.state_dict(), new_ledger("lru")
        ledger.load_state_dict(saved)
    ledger.begin_step(6)
    assert lookup(ledger, [1]) == [1.0]
    ledger.begin_step(5)
    with pytest.raises(RuntimeError, match="step 4 after a store at step 5"):
        ledger.begin_step(4)


@pytest.mark.parametrize("wrong", [np.array([3, -2]), np.array([3, 2**63 + 5], np.uint64), np.array([3, hash(-7)])])
def test_an_id_outside_of_63_bits_is_refused_by_both_calls(wrong):
    ledger = Ledger(LedgerOptions(capacity=4), state_width=2)
    ledger.begin_step(1)
    cells, last = np.zeros(2, np.int64), np.zeros(2, np.bool_)
    with pytest.raises(ValueError, match=r"must be -1 \(no group\) or in \[0, 2\^63\)"):
        ledger.lookup(wrong, cells)
    with pytest.raises(ValueError, match="group id"):
        ledger.store(wrong, cells, last, torch.ones(2, 2))
    assert ledger.last_extra_metrics["ledger/live_groups"] == 0
    ledger.store(np.array([-1, 2**63 - 1]), cells, last, torch.ones(2, 2))
    assert ledger.last_extra_metrics["ledger/live_groups"] == 1


def test_hash_is_splitmix64() -> None:
    # The first three outputs of the reference generator seeded with 0; each call adds the golden gamma to the state.
    gamma = 0x9E3779B97F4A7C15
    seeds = np.array([0, gamma, 2 * gamma % 2**64], np.uint64).view(np.int64)
    assert [hex(x) for x in splitmix64(seeds).tolist()] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]


def test_full_wipe_forgets_who_was_evicted() -> None:
    before = new_ledger("lru", capacity=1)
    before.begin_step(1)
    store(before, [1])
    store(before, [2])
    ledger = new_ledger("full", capacity=1, wipe_every=3)
    ledger.load_state_dict(before.state_dict())
    assert 1 in ledger._index.evicted
    ledger.begin_step(3)
    store(ledger, [1])
    assert ledger.drain_metrics()["ledger/false_evictions/lru"] == 0


def test_every_lost_state_is_counted_however_many_wait(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """32 groups in turn, room for 8: each continues from zero, but the newest 8 are not all that is remembered."""

    def lost() -> dict[str, float]:
        ledger = new_ledger("lru", capacity=8)
        for step in range(32):
            ledger.begin_step(step + 1)
            groups = [8 * (step % 4) + row for row in range(8)]
            lookup(ledger, groups, cell=step // 4)
            store(ledger, groups, cell=step // 4)
        return ledger.drain_metrics()

    counts = lost()
    assert counts["ledger/false_evictions/lru"] == counts["ledger/cold_starts"] == 32 * 7
    assert "evicted groups" not in capsys.readouterr().err
    monkeypatch.setattr(index, "MOST_EVICTED", 16)
    assert lost()["ledger/false_evictions/lru"] < 32 * 7
    assert capsys.readouterr().err.count("false evictions are at least those counted") == 1


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
    settings = {"stale_threshold": 3, "wipe_every": 100 if mode == "full" else 0}
    options = LedgerOptions(capacity=2, wipe_mode=mode, **settings)
    ledger, other = (Ledger(options, state_width=2) for _ in range(2))
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


def test_the_oldest_slots_are_those_of_a_sort_of_all() -> None:
    rng, step = np.random.default_rng(5), 1
    ledger, oldest_first = new_ledger("lru", capacity=20), {}
    for _ in range(1000):
        step += int(rng.integers(0, 2))
        groups = rng.permutation(60)[: rng.integers(1, 8)].tolist()
        ledger.begin_step(step)
        store(ledger, groups)
        saved = ledger.state_dict(with_rows=False)
        places = dict(zip(saved["groups"].tolist(), saved["slots"].tolist(), strict=True))
        others = sorted(oldest_first.keys() - set(groups), key=oldest_first.get)
        gone = len(others) + len(groups) - len(places)
        assert places.keys() == {*others[gone:], *groups}
        oldest_first = {group: oldest_first[group] for group in others[gone:]}
        oldest_first |= {group: (step, places[group]) for group in groups}
