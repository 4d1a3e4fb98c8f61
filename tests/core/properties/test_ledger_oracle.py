"""The ledger against an oracle made of plain dicts: contents and every counter, after each operation, in all modes."""

from __future__ import annotations

import io
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from trainer.errors import UserError
from trainer.ledger import COUNTER_KEYS, Ledger, LedgerOptions

WIDTH = 3
NUM_GROUPS = 10
MODES = ["none", "full", "lru", "periodic_stale"]


@dataclass
class Held:
    state: list[float]
    slot: int
    step: int
    is_valid: bool = True


@dataclass
class Oracle:
    """What the ledger must do, written out group by group."""

    mode: str
    capacity: int
    every: int
    threshold: int
    held: dict[int, Held] = field(default_factory=dict)
    evicted: dict[int, tuple[str, int]] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    step: int | None = None
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTER_KEYS, 0))

    def drop(self, group: int) -> None:
        self.free.append(self.held.pop(group).slot)

    def evict(self, groups: list[int], mode: str) -> None:
        for group in groups:
            self.drop(group)
            self.evicted[group] = (mode, self.step)
            self.counts[f"ledger/evictions/{mode}"] += 1

    def by_age(self) -> list[int]:
        return sorted(self.held, key=lambda g: (self.held[g].step, self.held[g].slot))

    def begin_step(self, step: int) -> None:
        previous = step - 1 if self.step is None else self.step
        is_due = any(s % self.every == 0 for s in range(previous + 1, step + 1))
        self.step = step
        if self.mode == "full" and is_due:
            for group in sorted(self.held, key=lambda g: self.held[g].slot):
                self.drop(group)
            self.evicted.clear()
            self.counts["ledger_wipe_count"] += 1
        if self.mode == "periodic_stale" and is_due:
            self.evict([g for g in self.by_age() if self.held[g].step < step - self.threshold], "stale")

    def lookup(self, groups: list[int], cells: list[int]) -> list[list[float]]:
        rows = []
        for group, cell in zip(groups, cells, strict=True):
            continues = group >= 0 and cell > 0
            has_state = group in self.held and self.held[group].is_valid
            self.counts["ledger/cold_starts"] += continues and not has_state
            rows.append(self.held[group].state if continues and has_state else [0.0] * WIDTH)
        return rows

    def needed(self, batch: list[tuple[int, int, bool, list[float]]]) -> int:
        """The capacity that a store takes."""
        kept = {g for g, _, last, _ in batch if g >= 0 and not last}
        gone = {g for g, _, _, _ in batch} - kept
        return len(kept if self.mode == "lru" else (set(self.held) - gone) | kept)

    def store(self, batch: list[tuple[int, int, bool, list[float]]]) -> None:
        batch = [item for item in batch if item[0] >= 0]
        for group, cell, _, _ in batch:
            if group not in self.held and group in self.evicted:
                mode, _ = self.evicted.pop(group)
                self.counts[f"ledger/false_evictions/{mode}"] += cell > 0
        stored = []
        for group, _, is_last, row in batch:
            if not is_last:
                is_finite = bool(np.isfinite(row).all())
                self.counts["ledger/refused_rows"] += not is_finite
                # A row that is not finite takes a slot all the same, with no state in it.
                stored.append((group, row if is_finite else [0.0] * WIDTH, is_finite))
            elif group in self.held:
                self.drop(group)
        for group, row, is_finite in stored:
            if group in self.held:
                self.held[group] = Held(row, self.held[group].slot, self.step, is_finite)
        if self.mode == "lru":
            pinned = {group for group, _, _ in stored}
            overflow = len(self.held) + sum(g not in self.held for g in pinned) - self.capacity
            if overflow > 0:
                self.evict([g for g in self.by_age() if g not in pinned][:overflow], "lru")
        for group, row, is_finite in stored:
            if group not in self.held:
                self.held[group] = Held(row, self.free.pop(), self.step, is_finite)


class LedgerMachine(RuleBasedStateMachine):
    mode = "none"
    dtype = torch.float32

    def new_ledger(self) -> Ledger:
        own = self.oracle
        options = LedgerOptions(self.mode, own.capacity, "float32", own.threshold, own.every, own.every)
        return Ledger(options, state_width=WIDTH, dtype=self.dtype)

    @initialize(capacity=st.integers(1, 8), every=st.integers(1, 4), threshold=st.integers(1, 4))
    def start(self, capacity: int, every: int, threshold: int) -> None:
        self.oracle = Oracle(self.mode, capacity, every, threshold, free=list(range(capacity - 1, -1, -1)))
        self.ledger = self.new_ledger()
        self.begin_step(1)

    @rule(advance=st.integers(0, 3))
    def begin_step(self, advance: int) -> None:
        step = (self.oracle.step or 0) + advance
        self.oracle.begin_step(step)
        self.ledger.begin_step(step)

    @rule(seed=st.integers(0, 2**32 - 1), size=st.integers(0, 4), share_not_finite=st.sampled_from([0.1, 0.5]))
    def micro_batch(self, seed: int, size: int, share_not_finite: float) -> None:
        rng = np.random.default_rng(seed)
        ids = rng.permutation(NUM_GROUPS)[:size]
        ids[rng.random(size) < 0.1] = -1
        index, is_last = rng.integers(0, 4, size), rng.random(size) < 0.15
        states = torch.from_numpy(rng.random((size, WIDTH))).to(self.dtype)
        states[torch.from_numpy(rng.random(size) < share_not_finite), 1] = rng.choice([np.nan, np.inf, -np.inf])
        self.lookup_and_store(ids, index, is_last, states)

    def lookup_and_store(self, ids: np.ndarray, index: np.ndarray, is_last: np.ndarray, states: torch.Tensor) -> None:
        groups, cells, rows = ids.tolist(), index.tolist(), states.tolist()
        assert self.ledger.lookup(ids, index).tolist() == self.oracle.lookup(groups, cells)
        batch = list(zip(groups, cells, is_last.tolist(), rows, strict=True))
        if (needed := self.oracle.needed(batch)) <= self.oracle.capacity:
            self.oracle.store(batch)
            self.ledger.store(ids, index, is_last, states)
        else:
            # `agrees` then finds no trace of it: no counts, nothing evicted or freed, no group forgotten.
            held = "groups of one micro-batch" if self.mode == "lru" else "groups in flight"
            message = f"must hold the {held}: needs {needed}, got {self.oracle.capacity}; set it to at least {needed}"
            with pytest.raises(UserError, match=rf"ledger\.capacity: {message}"):
                self.ledger.store(ids, index, is_last, states)

    @rule()
    def drain(self) -> None:
        drained = self.ledger.drain_metrics()
        assert {key: drained[key] for key in COUNTER_KEYS} == self.oracle.counts
        self.oracle.counts = dict.fromkeys(COUNTER_KEYS, 0)

    @rule(keeps_counts=st.booleans())
    def save_and_resume(self, keeps_counts: bool) -> None:
        buffer = io.BytesIO()
        torch.save(self.ledger.state_dict(), buffer)
        buffer.seek(0)
        undrained = self.ledger.undrained()
        self.ledger = self.new_ledger()
        self.ledger.load_state_dict(torch.load(buffer, weights_only=True))
        if keeps_counts:
            self.ledger.load_undrained(undrained)
        else:
            self.oracle.counts = dict.fromkeys(COUNTER_KEYS, 0)
        self.begin_step(0)

    @rule(num_shards=st.integers(2, 4))
    def reshard_and_resume(self, num_shards: int) -> None:
        """Save on one rank, load on several with a part of the groups each, save those, and load on one again."""
        saved = self.ledger.state_dict()
        shards = []
        for rank in range(num_shards):
            part = self.new_ledger()
            part.load_shards([saved], owned=lambda groups, rank=rank: groups % num_shards == rank)
            shards.append(part.state_dict())
            assert all(int(group) % num_shards == rank for group in shards[-1]["groups"])
        self.ledger = self.new_ledger()
        self.ledger.load_shards(shards)
        self.adopt_places()
        self.oracle.counts = dict.fromkeys(COUNTER_KEYS, 0)
        self.begin_step(0)

    def adopt_places(self) -> None:
        """Slots are dealt out anew, oldest first, and evictions of one step may change places; nothing else may."""
        saved = self.ledger.state_dict()
        slots = dict(zip(saved["groups"].tolist(), saved["slots"].tolist(), strict=True))
        assert sorted(slots.values()) == list(range(len(self.oracle.held)))
        for group, slot in slots.items():
            self.oracle.held[group].slot = slot
        steps = [self.oracle.held[group].step for group in sorted(slots, key=slots.get)]
        assert steps == sorted(steps)
        self.oracle.free = list(range(self.oracle.capacity - 1, len(slots) - 1, -1))
        evicted = dict(self.ledger._index.evicted)
        assert evicted == self.oracle.evicted
        assert [step for _, step in evicted.values()] == sorted(step for _, step in evicted.values())
        self.oracle.evicted = evicted

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "ledger"):
            return
        saved = self.ledger.state_dict()
        held = {
            int(group): Held(row, int(slot), int(step), bool(is_valid))
            for group, row, slot, step, is_valid in zip(
                saved["groups"], saved["rows"].tolist(), saved["slots"], saved["last_step"], saved["valid"], strict=True
            )
        }
        assert held == self.oracle.held
        assert saved["free_slots"].tolist() == self.oracle.free
        assert list(self.ledger._index.evicted.items()) == list(self.oracle.evicted.items())
        assert self.ledger.undrained() == self.oracle.counts
        metrics = self.ledger.last_extra_metrics
        assert {key: metrics[key] for key in COUNTER_KEYS} == self.oracle.counts
        assert metrics["ledger/live_groups"] == len(self.oracle.held)
        assert metrics["ledger/fill_fraction"] == len(self.oracle.held) / self.oracle.capacity


def machine_for(mode: str, dtype: torch.dtype) -> type[LedgerMachine]:
    return type(f"LedgerMachine_{mode}", (LedgerMachine,), {"mode": mode, "dtype": dtype})


# numpy has no bfloat16: those states lie in torch tensors, as on other devices.
DTYPES = {"numpy": torch.float32, "torch": torch.bfloat16}
# Modes differ in the index alone, and libraries in the rows alone.
REPEATS = ("none-torch", "full-torch")
CASES = pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        pytest.param(mode, dtype, id=name, marks=[pytest.mark.slow] * (name in REPEATS))
        for mode in MODES
        for library, dtype in DTYPES.items()
        if (name := f"{mode}-{library}")
    ],
)


@CASES
def test_ledger_equals_the_oracle(mode: str, dtype: torch.dtype) -> None:
    run_state_machine_as_test(
        machine_for(mode, dtype),
        settings=settings(max_examples=50, stateful_step_count=25, deadline=None, derandomize=True),
    )
