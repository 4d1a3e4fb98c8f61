"""One rank's part of the ledger: the groups it owns, what evicts them, and what is counted. No communication.

The order in a step: `begin_step` sweeps or wipes; then, micro-batch by micro-batch, `lookup` and, after the backward,
`store`, which first frees the groups that ended, then makes room (LRU), then writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.errors import UserError
from trainer.ledger.counters import Counters
from trainer.ledger.eviction import EvictionMode, WipeMode, is_due, lru_overflow, stale_cutoff
from trainer.ledger.index import Found, GroupIndex
from trainer.ledger.journal import Journal
from trainer.ledger.slab import Ints, Slab

Flags = NDArray[np.bool_]


class LedgerShard:
    """The groups that one rank owns.

    Args:
        slab: where the states lie.
        counters: what is counted goes here.
        wipe_mode, stale_threshold, sweep_every, wipe_every: as in `trainer.ledger.eviction`.
        keep_undo: journal every change, so that `roll_back` can take a step back.
        is_owned: tells for group ids whether this rank owns them; None: all that it is given.
    """

    def __init__(
        self,
        slab: Slab,
        counters: Counters,
        *,
        wipe_mode: WipeMode,
        stale_threshold: int,
        sweep_every: int,
        wipe_every: int,
        keep_undo: bool = False,
        is_owned: Callable[[Ints], Flags] | None = None,
    ) -> None:
        self.slab = slab
        self.journal = Journal(is_kept=keep_undo)
        has_recency = wipe_mode in ("lru", "periodic_stale")
        self.index = GroupIndex(capacity=slab.capacity, has_recency=has_recency, journal=self.journal)
        self.counters = counters
        self.step: int | None = None
        self._wipe_mode = wipe_mode
        self._stale_threshold = stale_threshold
        self._sweep_every = sweep_every
        self._wipe_every = wipe_every
        self._is_owned = is_owned

    def begin_step(self, step: int) -> None:
        """Commit the step before, then wipe or sweep where it is due."""
        previous = step - 1 if self.step is None else self.step
        if step < 0 or step < previous:
            raise RuntimeError(f"ledger steps go forward from 0: step {step} after step {previous}")
        self.journal.commit()
        self.index.tidy()
        self.counters.begin_step()
        if self.journal.is_kept:
            before = self.step
            self.journal.add(lambda: setattr(self, "step", before))
        self.step = step
        if self._wipe_mode == "full" and is_due(step, previous, self._wipe_every):
            self._wipe()
        if self._wipe_mode == "periodic_stale" and is_due(step, previous, self._sweep_every):
            assert self.index.recency is not None
            self._evict(self.index.recency.take_before(stale_cutoff(step, self._stale_threshold)), "stale")

    def lookup(self, groups: list[int], is_fresh: Flags | None) -> tuple[Tensor, list[int]]:
        """The states of `groups` ([n, width]), and the positions of those that are neither fresh nor held.

        What is fresh (a group's start, or no group at all; None: nothing is) or not held is zeros.
        """
        found = self.index.find(groups)
        if is_fresh is None:
            return self.slab.read(found.slots), found.absent
        slots = np.where(is_fresh, self.slab.capacity, found.slots)
        return self.slab.read(slots), [i for i in found.absent if not is_fresh[i]]

    def store(self, groups: list[int], cell_index: Ints, is_last: Flags, states: Tensor) -> None:
        """Store the states of distinct groups; see `Ledger.store`. What comes to nothing for most steps is passed by."""
        step = self._require_step()
        self._check_owned(groups)
        index = self.index
        found = index.find(groups)
        slots, new, num_kept = found.slots.copy(), found.absent, len(groups)
        if states.dtype != self.slab.dtype or states.device != self.slab.device:
            states = states.to(self.slab.device, self.slab.dtype)
        is_finite = self._finite_rows(states)
        kept, freed = None, None
        if is_finite is not None or is_last.any():
            is_dropped = is_last if is_finite is None else is_last | ~is_finite
            kept, freed = ~is_dropped, slots[is_dropped]
            freed = freed[freed < self.slab.capacity]
            slots[is_dropped] = self.slab.waste_slot
            new = [i for i in new if kept[i]]
            num_kept = int(np.count_nonzero(kept))
        self._check_capacity(num_kept, index.num_live - (0 if freed is None else freed.size) + len(new))

        if is_finite is not None:
            self.counters.add("ledger/refused_rows", int(np.count_nonzero(~(is_last | is_finite))))
        if found.absent and index.ghosts.num_known:
            self._count_false_evictions(found, cell_index)
        if freed is not None and freed.size:
            index.vacate(freed)
        if new:
            self._make_room(len(new), slots, step)
            slots[new] = index.acquire([groups[i] for i in new])
        kept_slots = slots if kept is None else slots[kept]
        index.touch(kept_slots, step)
        index.record(kept_slots, step)
        if self.journal.is_kept:
            old = self.slab.read(slots)
            self.journal.add(lambda: self.slab.write(slots, old))
        self.slab.write(slots, states)

    def release(self, groups: list[int]) -> None:
        """Free the slots of those of the distinct `groups` that are held; not an eviction."""
        self._check_owned(groups)
        slots = self.index.find(groups).slots
        slots = slots[slots < self.slab.capacity]
        if slots.size:
            self.index.vacate(slots)

    def roll_back(self) -> None:
        """Undo everything since `begin_step`, and `begin_step` itself."""
        self.journal.undo()
        self.counters.roll_back()

    def _require_step(self) -> int:
        if self.step is None:
            raise RuntimeError("the ledger has no step yet: call begin_step before store")
        return self.step

    def _check_owned(self, groups: list[int]) -> None:
        if self._is_owned is not None and not (owned := self._is_owned(np.array(groups, np.int64))).all():
            raise RuntimeError(f"group {groups[int(owned.argmin())]} belongs to another rank's ledger")

    def _finite_rows(self, states: Tensor) -> Flags | None:
        """Which rows are finite; None: all of them."""
        # A sum of squares is not finite if any term is not; it may also overflow, so only then each row is looked at.
        if math.isfinite(_square_sum(states)):
            return None
        finite: Flags = states.isfinite().all(dim=1).cpu().numpy()
        return None if finite.all() else finite

    def _check_capacity(self, num_rows: int, num_live: int) -> None:
        capacity = self.slab.capacity
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

    def _count_false_evictions(self, found: Found, cell_index: Ints) -> None:
        """Those of the absent groups that were evicted lately are known no more; count those in mid-document."""
        for i in self.index.take_evicted(found):
            if cell_index[i]:
                self.counters.add(f"ledger/false_evictions/{self.index.ghosts.mode_of(found.places[i])}", 1)

    def _make_room(self, num_new: int, slots: Ints, step: int) -> None:
        """With `lru`, evict until `num_new` groups fit beside those that are held; those in `slots` stay."""
        overflow = lru_overflow(self.index.num_live, num_new, self.slab.capacity)
        if overflow and self._wipe_mode == "lru":
            assert self.index.recency is not None
            pinned = slots[slots < self.slab.capacity]
            self.index.touch(pinned, step)
            self._evict(self.index.recency.take_oldest(overflow, pinned), "lru")

    def _evict(self, slots: Ints, mode: EvictionMode) -> None:
        self.index.evict(slots, mode, self._require_step())
        self.counters.add(f"ledger/evictions/{mode}", slots.size)

    def _wipe(self) -> None:
        self.index.vacate(self.index.held())
        self.index.ghosts.clear()
        self.counters.add("ledger_wipe_count", 1)


def _square_sum(states: Tensor) -> float:
    """The sum of the squares of all numbers; not exact."""
    if states.is_cpu and states.dtype in (torch.float32, torch.float64):
        values = states.numpy()
        return float(
            np.vdot(values, values)
        )  # by BLAS, and unlike `dot` without a warning: a third of the time of `sum`
    return float(states.square().sum())
