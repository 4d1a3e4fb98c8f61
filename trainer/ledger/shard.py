"""One rank's part of the ledger: the groups it owns, what evicts them, and what is counted. No communication.

The order in a step: `begin_step` sweeps or wipes; then, micro-batch by micro-batch, `lookup` and, after the backward,
`store`, which first frees the groups that ended, then makes room (LRU), then writes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import compress

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trainer.errors import UserError
from trainer.ledger.counters import Counters
from trainer.ledger.eviction import EvictionMode, WipeMode, is_due, lru_overflow, stale_cutoff
from trainer.ledger.ghosts import RecentlyEvicted
from trainer.ledger.pending import PendingRows
from trainer.ledger.store import Ints, StateStore

Flags = NDArray[np.bool_]


class LedgerShard:
    """The groups that one rank owns.

    Args:
        store: where the states lie.
        counters: what is counted goes here.
        wipe_mode, stale_threshold, sweep_every, wipe_every: as in `trainer.ledger.eviction`.
        is_owned: tells for group ids whether this rank owns them; None: all that it is given.
        pending: takes in rows before it is known whether they are finite; steps then become final by `confirm`. None: rows
            are checked as they come, and a step becomes final when the next begins.
    """

    def __init__(
        self,
        store: StateStore,
        counters: Counters,
        *,
        wipe_mode: WipeMode,
        stale_threshold: int,
        sweep_every: int,
        wipe_every: int,
        is_owned: Callable[[Ints], Flags] | None = None,
        pending: PendingRows | None = None,
    ) -> None:
        self.data = store
        self.pending = pending
        self.counters = counters
        self.ghosts = RecentlyEvicted(store.capacity, store.on_undo if store.keeps_undo else None)
        self.step: int | None = None
        self._wipe_mode = wipe_mode
        self._stale_threshold = stale_threshold
        self._sweep_every = sweep_every
        self._wipe_every = wipe_every
        self._is_owned = is_owned

    def begin_step(self, step: int) -> None:
        """Commit the step before, unless it is to be confirmed, then wipe or sweep where it is due."""
        previous = step - 1 if self.step is None else self.step
        if step < 0 or step < previous:
            raise RuntimeError(f"ledger steps go forward from 0: step {step} after step {previous}")
        keeps_previous = self.pending is not None and self.data.has_open_step
        if not keeps_previous:
            self.data.commit()
            self.ghosts.compact()
        self.counters.begin_step(keeps_previous=keeps_previous)
        if self.pending is not None:
            self.pending.begin_step()
        self.data.begin()
        if self.data.keeps_undo:
            before = self.step
            self.data.on_undo(lambda: setattr(self, "step", before))
        self.step = step
        if self._wipe_mode == "full" and is_due(step, previous, self._wipe_every):
            self._wipe()
        if self._wipe_mode == "periodic_stale" and is_due(step, previous, self._sweep_every):
            assert self.data.recency is not None
            self._evict(self.data.recency.take_before(stale_cutoff(step, self._stale_threshold)), "stale")

    def lookup(self, groups: list[int], is_fresh: Flags) -> tuple[Tensor, int]:
        """The states of `groups` ([n, width]), and how many of those that are not fresh are not held.

        What is fresh (a group's start, or no group at all) or not held is zeros.
        """
        slots, num_missing = self.data.find(groups)
        if np.count_nonzero(is_fresh):
            if num_missing:
                num_missing = int(np.count_nonzero((slots == self.data.no_slot) & ~is_fresh))
            slots[is_fresh] = self.data.no_slot
        if self.pending is not None:
            self.pending.look_up(groups, slots != self.data.no_slot)
        return self.data.read(slots), num_missing

    def store(self, groups: list[int], is_start: Flags, is_last: Flags, states: Tensor) -> None:
        """Store the states of distinct groups; see `Ledger.store`."""
        step = self._require_step()
        self._check_owned(groups)
        data = self.data
        slots, num_absent = data.find(groups)
        states = states.to(data.device, data.slab.dtype)
        if self.pending is None:
            is_finite = self._finite_rows(states)
        else:
            is_finite, states = None, self.pending.store(groups, is_last, states)
        is_dropped = is_last if is_finite is None else is_last | ~is_finite
        is_absent = is_new = slots == data.no_slot
        freed, num_new, num_kept = slots[:0], num_absent, len(groups)
        if num_dropped := int(np.count_nonzero(is_dropped)):
            freed = slots[is_dropped & ~is_absent]
            slots[is_dropped] = data.waste_slot
            is_new = slots == data.no_slot
            num_new, num_kept = int(np.count_nonzero(is_new)), num_kept - num_dropped
        self._check_capacity(num_kept, data.num_live - freed.size + num_new)

        if is_finite is not None:
            self.counters.add("ledger/refused_rows", int(np.count_nonzero(~(is_last | is_finite))))
        if num_absent:
            self._count_false_evictions(list(compress(groups, is_absent.tolist())), is_start[is_absent])
        if freed.size:
            data.vacate(freed)
        if num_new:
            self._make_room(num_new, slots, step)
            slots[is_new] = data.acquire(list(compress(groups, is_new.tolist())))
        kept_slots = slots[~is_dropped] if num_dropped else slots
        data.touch(kept_slots, step)
        data.record(kept_slots, step)
        data.write(slots, states)

    def release(self, groups: list[int]) -> None:
        """Free the slots of those of the distinct `groups` that are held; not an eviction."""
        self._check_owned(groups)
        slots, _ = self.data.find(groups)
        slots = slots[slots != self.data.no_slot]
        if slots.size:
            self.data.vacate(slots)

    def roll_back(self) -> None:
        """Undo everything since `begin_step`, and `begin_step` itself."""
        self.data.undo()
        self.counters.roll_back()
        if self.pending is not None:
            self.pending.forget_newest()

    def refuse(self) -> None:
        """Drop the rows of the newest step that are not finite. Waits for the device."""
        assert self.pending is not None
        refusals = self.pending.read()
        self.counters.add("ledger/refused_rows", refusals.num_rows)
        self.counters.add("ledger/cold_starts", refusals.num_cold_starts)
        self.release(refusals.groups)

    def confirm(self) -> None:
        """The oldest open step is final."""
        assert self.pending is not None
        self.data.confirm()
        self.counters.confirm()
        self.pending.forget_oldest()
        if self.data.has_open_step:
            # As in the store: what is journalled belongs to the object as it is.
            old, self.ghosts = self.ghosts, copy.copy(self.ghosts)
            self.data.on_undo(lambda: setattr(self, "ghosts", old))
        self.ghosts.compact()

    def _require_step(self) -> int:
        if self.step is None:
            raise RuntimeError("the ledger has no step yet: call begin_step before store")
        return self.step

    def _check_owned(self, groups: list[int]) -> None:
        if self._is_owned is not None and not (owned := self._is_owned(np.array(groups, np.int64))).all():
            raise RuntimeError(f"group {groups[int(owned.argmin())]} belongs to another rank's ledger")

    def _finite_rows(self, states: Tensor) -> Flags | None:
        """Which rows are finite; None: all of them."""
        # A sum is not finite if any term is not; it may also overflow, so only then each row is looked at.
        if math.isfinite(states.sum().item()):
            return None
        finite: Flags = states.isfinite().all(dim=1).cpu().numpy()
        return None if finite.all() else finite

    def _check_capacity(self, num_rows: int, num_live: int) -> None:
        capacity = self.data.capacity
        if self._wipe_mode == "lru":
            if num_rows > capacity:
                raise UserError(
                    "ledger.capacity",
                    f"must hold the groups of one micro-batch: needs {num_rows}, got {capacity}",
                    f"set it to at least {num_rows}",
                )
        elif num_live > capacity:
            raise UserError(
                "ledger.capacity",
                f"is exhausted: {num_live} groups are in flight, got {capacity}",
                f"set it to at least {num_live}, or wipe_mode to lru",
            )

    def _count_false_evictions(self, groups: list[int], is_start: Flags) -> None:
        taken = self.ghosts.take(groups)
        if not taken:
            return
        starts = is_start.tolist()
        modes = [mode for i, mode in taken if not starts[i]]
        for mode in set(modes):
            self.counters.add(f"ledger/false_evictions/{mode}", modes.count(mode))

    def _make_room(self, num_new: int, slots: Ints, step: int) -> None:
        """With `lru`, evict until `num_new` groups fit beside those that are held; those in `slots` stay."""
        overflow = lru_overflow(self.data.num_live, num_new, self.data.capacity)
        if overflow and self._wipe_mode == "lru":
            assert self.data.recency is not None
            pinned = slots[slots < self.data.capacity]
            self.data.touch(pinned, step)
            self._evict(self.data.recency.take_oldest(overflow, pinned), "lru")

    def _evict(self, slots: Ints, mode: EvictionMode) -> None:
        groups = self.data.vacate(slots)
        self.ghosts.add(groups, mode, self._require_step())
        self.counters.add(f"ledger/evictions/{mode}", len(groups))

    def _wipe(self) -> None:
        self.data.vacate(self.data.live_slots())
        self.ghosts.clear()
        self.counters.add("ledger_wipe_count", 1)
