"""A ledger whose steps are confirmed late, and taken back in between, is the ledger whose steps were known at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.support.ranks import differences
from trainer.ledger import kernels
from trainer.ledger.compiled_placement import CompiledPlacement
from trainer.ledger.ledger import Ledger

WIDTH, ROWS, GROUPS, CAPACITY = 3, 6, 40, 24


class Micro(NamedTuple):
    groups: np.ndarray
    cells: np.ndarray
    last: np.ndarray
    states: torch.Tensor


def new_ledger(mode: str, *, is_confirmed: bool, compiled: bool = False) -> Ledger:
    return Ledger(
        state_width=WIDTH,
        capacity=CAPACITY if mode in ("lru", "full") else GROUPS,
        wipe_mode=mode,  # type: ignore[arg-type]
        stale_threshold=2,
        sweep_every=2,
        wipe_every=3,
        keep_undo=True,
        is_confirmed=is_confirmed,
        compiled=compiled,
    )


def draw(rng: np.random.Generator, num_groups: int, nan_rate: float) -> list[Micro]:
    """A window of two micro-batches."""
    window = []
    for _ in range(2):
        states = torch.from_numpy(rng.normal(size=(ROWS, WIDTH)).astype(np.float32))
        states[torch.from_numpy(rng.random(ROWS) < nan_rate)] = float("nan")
        groups = rng.choice(num_groups, ROWS, replace=False)
        groups[0] = -1
        window.append(Micro(groups, rng.integers(0, 3, ROWS), rng.random(ROWS) < 0.1, states))
    return window


def run(ledger: Ledger, step: int, window: list[Micro]) -> list[torch.Tensor]:
    ledger.begin_step(step)
    read = []
    for micro in window:
        read.append(ledger.lookup(micro.groups, micro.cells))
        ledger.store(micro.groups, micro.cells, micro.last, micro.states)
    return read


def held(ledger: Ledger) -> dict[int, list[float]]:
    state = ledger.state_dict()
    return dict(zip(state["groups"].tolist(), state["rows"].tolist(), strict=True))


def settle(ledger: Ledger, *, is_bad: bool) -> None:
    """What the step does for the newest step once it is known."""
    if is_bad:
        ledger.rollback()
    else:
        if float(ledger.num_refused()):
            ledger.refuse()
        ledger.confirm()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mode", ["none", "full", "lru", "periodic_stale"])
@pytest.mark.parametrize("nan_rate", [0.0, 0.02])
def test_what_is_known_late_changes_nothing(mode: str, nan_rate: float, compiled: bool) -> None:
    # Which slot a group lies in may differ after a refusal, and with `lru` what is evicted follows the slots.
    if nan_rate and mode == "lru":
        pytest.skip("evictions within a step go by slot")
    rng = np.random.Generator(np.random.Philox(5))
    at_once, late = new_ledger(mode, is_confirmed=False), new_ledger(mode, is_confirmed=True, compiled=compiled)
    num_groups = GROUPS if mode != "full" else CAPACITY
    pending: tuple[int, bool, bool] | None = None
    for step in range(1, 260):
        window, is_bad, is_drained = draw(rng, num_groups, nan_rate), rng.random() < 0.15, rng.random() < 0.1
        expected = run(at_once, step, window)
        if is_bad:
            at_once.rollback()
        read = run(late, step, window)
        if pending is not None:
            _, was_bad, has_refused = pending
            if was_bad or has_refused:
                late.rollback()
                settle(late, is_bad=was_bad)
                read = run(late, step, window)
            else:
                late.confirm()
        assert all(torch.equal(one, other) for one, other in zip(expected, read, strict=True)), step
        pending = step, is_bad, float(late.num_refused()) > 0
        if is_drained:
            settle(late, is_bad=is_bad)
            pending = None
            assert held(at_once) == held(late)
            if not nan_rate:
                assert differences(at_once.state_dict(), late.state_dict()) == []
            assert at_once.drain_metrics() == late.drain_metrics()


@pytest.mark.parametrize("compiled", [False, True])
def test_order_and_evicted_groups_are_tidied_up_though_no_step_is_ever_settled_at_once(compiled: bool) -> None:
    rng = np.random.Generator(np.random.Philox(6))
    ledger = new_ledger("lru", is_confirmed=True, compiled=compiled)
    run(ledger, 1, draw(rng, 10**6, 0.0))
    for step in range(2, 400):
        run(ledger, step, draw(rng, 10**6, 0.0))
        ledger.confirm()
    num_stores, num_evicted = ring_sizes(ledger)
    assert num_stores <= 4 * CAPACITY + 1024 + 2 * ROWS
    assert num_evicted <= 2 * CAPACITY + 1024 + 2 * ROWS
    assert len(ledger._shard._journal._inverses) < 100
    if isinstance(ledger._shard.placement, CompiledPlacement):
        assert ledger._shard.placement._a[kernels.LOG_LENGTH] < 400
    else:
        assert len(ledger._shard.placement._journal._inverses) < 100


def ring_sizes(ledger: Ledger) -> tuple[int, int]:
    """Entries of stores and of evictions, those that no longer count included."""
    placement = ledger._shard.placement
    if isinstance(placement, CompiledPlacement):
        return placement.ring_sizes
    return len(placement.index.recency), placement.index.ghosts.num_entries


def test_a_row_that_is_not_finite_reads_as_zeros_until_it_is_refused() -> None:
    ledger = new_ledger("none", is_confirmed=True)
    groups, no, ones = np.array([1, 2]), np.zeros(2, bool), torch.ones(2, WIDTH)
    ledger.begin_step(1)
    ledger.store(groups, np.array([0, 0]), no, torch.tensor([[1.0] * WIDTH, [1.0, float("inf"), 1.0]]))
    assert torch.equal(ledger.lookup(groups, np.array([1, 1])), torch.tensor([[1.0] * WIDTH, [0.0] * WIDTH]))
    assert float(ledger.num_refused()) == 1
    ledger.refuse()
    ledger.confirm()
    counts = ledger.drain_metrics()
    assert (counts["ledger/refused_rows"], counts["ledger/cold_starts"], counts["ledger/live_groups"]) == (1, 1, 1)
    ledger.begin_step(2)
    ledger.store(groups, np.array([1, 1]), no, ones)
    assert float(ledger.num_refused()) == 0


def test_a_group_that_was_stored_again_in_the_same_step_stays() -> None:
    ledger = new_ledger("none", is_confirmed=True)
    group, no = np.array([1]), np.zeros(1, bool)
    ledger.begin_step(1)
    ledger.store(group, np.array([0]), no, torch.full((1, WIDTH), float("nan")))
    ledger.store(group, np.array([1]), no, torch.ones(1, WIDTH))
    ledger.refuse()
    ledger.confirm()
    assert held(ledger) == {1: [1.0] * WIDTH}
    assert ledger.drain_metrics()["ledger/refused_rows"] == 1


def test_steps_that_are_confirmed_need_the_undo_journal() -> None:
    with pytest.raises(ValueError, match="keep_undo=True"):
        Ledger(state_width=1, capacity=1, wipe_mode="none", is_confirmed=True)


@pytest.mark.parametrize("compiled", [False, True])
def test_tidying_up_in_a_step_that_is_taken_back_is_taken_back_too(compiled: bool) -> None:
    rng = np.random.Generator(np.random.Philox(7))
    at_once = new_ledger("lru", is_confirmed=False)
    late = new_ledger("lru", is_confirmed=True, compiled=compiled)
    num_rebuilt = num_compacted = 0
    for step in range(1, 900):
        # While all fit nothing is evicted, and the order of the stores grows; then those come back that were evicted.
        window = draw(rng, CAPACITY if step < 500 else GROUPS, 0.0)
        run(at_once, step, window)
        run(late, step, window)
        if step > 1:
            before = ring_sizes(late)
            late.confirm()
            num_rebuilt += ring_sizes(late)[0] < before[0]
            num_compacted += ring_sizes(late)[1] < before[1]
            late.rollback()
            run(late, step, window)
    late.confirm()
    assert num_rebuilt > 0
    assert num_compacted > 0
    assert differences(at_once.state_dict(), late.state_dict()) == []
    assert at_once.drain_metrics() == late.drain_metrics()
