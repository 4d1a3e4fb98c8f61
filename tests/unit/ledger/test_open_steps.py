"""Two open steps, taken back one by one, at any moment: also when outdated entries were dropped in between.

What a ledger holds is compared at once; what it will do (the order of the stores, of the evictions, of the free slots) with
a twin that was loaded from it and has never taken anything back.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.ranks import differences
from trainer.ledger.compiled_placement import CompiledPlacement
from trainer.ledger.ledger import Ledger

# All groups of a calm phase fit, so that stores pile up; twice as many come and go, so that evictions do.
CAPACITY, GROUPS, CALM, ROWS = 64, 120, 62, 60


def new_ledger(*, compiled: bool, is_confirmed: bool = True, mode: str = "lru") -> Ledger:
    return Ledger(
        state_width=1,
        capacity=CAPACITY if mode == "lru" else GROUPS,
        wipe_mode=mode,  # type: ignore[arg-type]
        stale_threshold=3,
        sweep_every=2,
        keep_undo=True,
        is_confirmed=is_confirmed,
        compiled=compiled,
    )


Window = list[tuple[np.ndarray, np.ndarray]]


def draw(rng: np.random.Generator, num_groups: int) -> Window:
    return [(rng.choice(num_groups, ROWS, replace=False), rng.random(ROWS) < 0.1) for _ in range(2)]


def run(ledger: Ledger, step: int, window: Window) -> None:
    ledger.begin_step(step)
    store(ledger, step, window)


def store(ledger: Ledger, step: int, window: Window) -> None:
    for groups, is_last in window:
        ledger.store(groups, np.ones(ROWS, np.int64), is_last, torch.from_numpy(groups[:, None] + 0.001 * step).float())


def num_entries(ledger: Ledger) -> tuple[int, int]:
    """Of stores and of evictions, those that no longer count included."""
    placement = ledger._shard.placement
    if isinstance(placement, CompiledPlacement):
        return placement.ring_sizes
    return len(placement.index.recency), placement.index.ghosts.num_entries


class Subject:
    """A ledger, how many of its steps are open, and the states to which it would go back."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.before: list[dict[str, Any]] = []

    def run(self, step: int, window: Window) -> None:
        self.before.append(self.ledger.state_dict())
        run(self.ledger, step, window)

    def confirm(self) -> None:
        self.ledger.confirm()
        del self.before[0]

    def take_back(self) -> None:
        self.ledger.rollback()
        assert differences(self.ledger.state_dict(), self.before.pop()) == []


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mode", ["lru", "periodic_stale"])
@pytest.mark.parametrize("seed", range(3))
def test_a_step_that_is_taken_back_leaves_nothing_to_be_seen_later(mode: str, compiled: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    subject = Subject(new_ledger(compiled=compiled, mode=mode))
    tidied_and_taken_back = [0, 0]
    step = 1
    for count in range(120):
        num_groups = CALM if count // 15 % 2 else GROUPS
        for _ in range(int(rng.integers(0, 3))):
            subject.run(step, draw(rng, num_groups))
            step += 1
            subject.confirm()
        # The number of the step before is allowed too.
        first = max(step - int(rng.integers(2)), 1)
        subject.run(first, draw(rng, num_groups))
        subject.run(first + int(rng.integers(2)), draw(rng, num_groups))
        if rng.random() < 0.7:
            sizes = num_entries(subject.ledger)
            subject.confirm()
            for which, (old, new) in enumerate(zip(sizes, num_entries(subject.ledger), strict=True)):
                tidied_and_taken_back[which] += new < old
        for _ in range(int(rng.integers(4))):  # what the open step goes on to store must leave what it may go back to
            store(subject.ledger, first + 1, draw(rng, num_groups))
        subject.take_back()
        if subject.before and rng.random() < 0.5:
            subject.take_back()
        while subject.before:
            subject.confirm()
        step += 2
        twin = new_ledger(compiled=False, is_confirmed=False, mode=mode)
        twin.load_state_dict([subject.ledger.state_dict()])
        for _ in range(2):
            window = draw(rng, num_groups)
            subject.run(step, window)
            run(twin, step, window)
            step += 1
            assert differences(subject.ledger.state_dict(), twin.state_dict()) == []
            subject.confirm()
    if mode == "lru":
        assert min(tidied_and_taken_back) > 0
