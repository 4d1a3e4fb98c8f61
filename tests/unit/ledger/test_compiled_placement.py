"""The compiled placement where it differs from the one in dicts: its rings, its log, and numba itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from trainer.errors import UserError
from trainer.ledger import Ledger
from trainer.ledger.compiled_placement import CompiledPlacement
from trainer.training.setup.assembly import wants_compiled

REPOSITORY = Path(__file__).parents[3]


def test_rings_stay_small_over_many_steps_and_the_rows_right() -> None:
    ledger = Ledger(state_width=1, capacity=8, wipe_mode="lru", compiled=True)
    for step in range(1, 6000):
        ledger.begin_step(step)
        groups = np.array([step % 5, 5 + step % 7])
        ledger.store(groups, np.ones(2, np.int64), np.zeros(2, np.bool_), torch.full((2, 1), float(step)))
    placement = ledger._shard.placement
    assert isinstance(placement, CompiledPlacement)
    queued, evicted = placement.ring_sizes
    assert queued <= 4 * 8 + 1024 + 4
    assert evicted <= 2 * 8 + 1024 + 4
    assert ledger.lookup(np.array([5999 % 5]), np.array([1])).item() == 5999.0


def test_a_step_with_more_than_the_rings_hold_is_taken_back_whole() -> None:
    """Thousands of stores, evictions and returns in one step: rings and log grow, wrap, and are undone."""
    ledgers = [
        Ledger(state_width=1, capacity=40, wipe_mode="lru", keep_undo=True, compiled=compiled)
        for compiled in (False, True)
    ]
    rng = np.random.default_rng(0)
    for step in range(1, 5):
        for ledger in ledgers:
            ledger.begin_step(step)
        before = [ledger.state_dict() for ledger in ledgers]
        for _ in range(400):
            groups, is_last = rng.permutation(300)[:25], rng.random(25) < 0.2
            for ledger in ledgers:
                ledger.store(groups, np.ones(25, np.int64), is_last, torch.from_numpy(groups[:, None] + 0.5 * step))
        counts = [ledger.drain_metrics() for ledger in ledgers]
        assert counts[0] == counts[1]
        assert counts[0]["ledger/false_evictions/lru"] > 1000
        assert_same(*(ledger.state_dict() for ledger in ledgers))
        if step % 2:
            for ledger, old in zip(ledgers, before, strict=True):
                ledger.rollback()
                ledger.begin_step(step)
                assert_same(ledger.state_dict(), old)


def assert_same(one: dict[str, object], other: dict[str, object]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name], name


def test_a_group_that_is_there_twice_is_refused() -> None:
    ledger = Ledger(state_width=1, capacity=4, wipe_mode="none", compiled=True)
    ledger.begin_step(1)
    twice, zeros = np.array([-1, 7, -1, 7]), np.zeros(4, np.int64)
    with pytest.raises(ValueError, match="group 7 appears twice"):
        ledger.lookup(twice, zeros)
    with pytest.raises(ValueError, match="group 7 appears twice"):
        ledger.store(twice, zeros, zeros > 0, torch.zeros(4, 1))
    assert ledger.last_extra_metrics["ledger/live_groups"] == 0


def test_without_numba_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "trainer.ledger.compiled_placement")
    monkeypatch.delitem(sys.modules, "trainer.ledger.kernels")
    monkeypatch.delattr("trainer.ledger.kernels")
    with pytest.raises(UserError, match=r"trainer\[jit\]"):
        Ledger(state_width=1, capacity=4, wipe_mode="none", compiled=True)


def test_auto_compiles_long_runs_where_numba_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [wants_compiled("auto", count) for count in (9_999, 10_000)] == [False, True]
    assert [wants_compiled(index, 1) for index in ("dicts", "compiled")] == [False, True]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not wants_compiled("auto", 10**6)


@pytest.mark.slow
def test_no_loop_leaves_its_arrays(tmp_path: Path) -> None:
    """The comparison with the oracle, with every index checked: otherwise a wrong one would go unseen."""
    environment = {**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    oracle = ["tests/properties/test_ledger_oracle.py", "tests/properties/test_ledger_oracle_runs.py", __file__]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        "-k",
        "not dicts",
        *oracle,
    ]
    ended = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-4000:]
