"""What is evicted, what is remembered of it, and what counts as a false eviction."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.ranks import differences
from tests.unit.ledger.test_ledger import new_ledger, store
from trainer.errors import UserError
from trainer.ledger import Ledger, index
from trainer.ledger.index import WipeMode


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


@pytest.mark.parametrize("queued", [1, 5, 4096])
def test_the_oldest_slots_are_those_of_a_sort_of_all(queued: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "QUEUED", queued)
    rng, step = np.random.default_rng(queued), 1
    ledger, oldest_first = new_ledger("lru", capacity=20), {}
    for _ in range(1000):
        step += int(rng.integers(0, 2))
        groups = rng.permutation(60)[: rng.integers(1, 8)].tolist()
        ledger.begin_step(step)
        store(ledger, groups)
        places = dict(
            zip(*(ledger.state_dict(with_rows=False)[key].tolist() for key in ("groups", "slots")), strict=True)
        )
        others = sorted(oldest_first.keys() - set(groups), key=oldest_first.get)
        gone = len(others) + len(groups) - len(places)
        assert places.keys() == {*others[gone:], *groups}
        oldest_first = {group: oldest_first[group] for group in others[gone:]}
        oldest_first |= {group: (step, places[group]) for group in groups}
