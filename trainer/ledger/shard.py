"""One rank's part of the ledger: the groups it owns, what evicts them, and what is counted. No communication.

The order in a step: `begin_step` sweeps or wipes; then, micro-batch by micro-batch, `lookup` and, after the backward,
`store`, which first frees the groups that ended, then makes room (LRU), then writes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.errors import UserError
from trainer.ledger.counters import Counters
from trainer.ledger.eviction import EvictionMode, WipeMode, is_due, lru_overflow, stale_cutoff
from trainer.ledger.ghosts import RecentlyEvicted
from trainer.ledger.store import NO_SLOT, Ints, StateStore

Flags = NDArray[np.bool_]


class LedgerShard:
    """The groups that one rank owns.

    Args:
        store: where the states lie.
        counters: what is counted goes here.
        wipe_mode, stale_threshold, sweep_every, wipe_every: as in `trainer.ledger.eviction`.
        is_owned: tells for group ids whether this rank owns them; None: all that it is given.
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
    ) -> None:
        self.data = store
        self.counters = counters
        self.ghosts = RecentlyEvicted(store.capacity, store.on_undo)
        self.step: int | None = None
        self._wipe_mode = wipe_mode
        self._stale_threshold = stale_threshold
        self._sweep_every = sweep_every
        self._wipe_every = wipe_every
        self._is_owned = is_owned

    def begin_step(self, step: int) -> None:
        """Commit the step before, then wipe or sweep where it is due."""
        previous = step - 1 if self.step is None else self.step
        if step < previous:
            raise RuntimeError(f"ledger steps go forward: step {step} after step {previous}")
        self.data.commit()
        self.counters.begin_step()
        before = self.step
        self.data.on_undo(lambda: setattr(self, "step", before))
        self.step = step
        if self._wipe_mode == "full" and is_due(step, previous, self._wipe_every):
            self._wipe()
        if self._wipe_mode == "periodic_stale" and is_due(step, previous, self._sweep_every):
            assert self.data.recency is not None
            self._evict(self.data.recency.take_before(stale_cutoff(step, self._stale_threshold)), "stale")

    def lookup(self, groups: Ints) -> tuple[Tensor, Flags]:
        """The states of `groups` ([n, width], zeros where none is held) and whether each is held."""
        slots = self.data.find(groups)
        return self.data.read(slots), slots != NO_SLOT

    def store(self, groups: Ints, is_start: Flags, is_last: Flags, states: Tensor) -> None:
        """Store the states of distinct groups; see `Ledger.store`."""
        step = self._require_step()
        self._check_owned(groups)
        is_finite = self._finite_rows(states)
        slots = self.data.find(groups)
        is_kept = ~is_last & is_finite
        is_missing = slots == NO_SLOT
        freed = slots[~(is_kept | is_missing)]
        kept = np.flatnonzero(is_kept)
        is_new = is_missing[kept]
        num_new = int(is_new.sum())
        self._check_capacity(kept.size, self.data.num_live - freed.size + num_new)

        self.counters.add("ledger/refused_rows", int((~(is_last | is_finite)).sum()))
        self._count_false_evictions(groups[is_missing], is_start[is_missing])
        self.data.vacate(freed)
        kept_slots = slots[kept]
        self.data.touch(kept_slots[~is_new], step)
        self._evict_overflow(num_new, pinned=kept_slots[~is_new])
        kept_slots[is_new] = self.data.acquire(groups[kept[is_new]])
        self.data.touch(kept_slots[is_new], step)
        rows = states if kept.size == groups.size else states[torch.from_numpy(kept).to(states.device)]
        self.data.write(kept_slots, rows.detach().to(self.data.slab.dtype))

    def release(self, groups: Ints) -> None:
        """Free the slots of those of `groups` that are held; not an eviction."""
        self._check_owned(groups)
        slots = self.data.find(groups)
        self.data.vacate(slots[slots != NO_SLOT])

    def roll_back(self) -> None:
        """Undo everything since `begin_step`, and `begin_step` itself."""
        self.data.undo()
        self.ghosts.restore_order()
        self.counters.roll_back()

    def _require_step(self) -> int:
        if self.step is None:
            raise RuntimeError("the ledger has no step yet: call begin_step before store")
        return self.step

    def _check_owned(self, groups: Ints) -> None:
        if self._is_owned is not None and not (owned := self._is_owned(groups)).all():
            raise RuntimeError(f"group {int(groups[~owned][0])} belongs to another rank's ledger")

    def _finite_rows(self, states: Tensor) -> Flags:
        # x * 0 is 0 for every finite x, and NaN otherwise; several times faster than isfinite().all().
        finite: Flags = states.mul(0.0).sum(dim=1).eq(0.0).cpu().numpy()
        return finite

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

    def _count_false_evictions(self, groups: Ints, is_start: Flags) -> None:
        modes = [mode for i, mode in self.ghosts.take(groups.tolist()) if not is_start[i]]
        for mode in set(modes):
            self.counters.add(f"ledger/false_evictions/{mode}", modes.count(mode))

    def _evict_overflow(self, num_new: int, pinned: Ints) -> None:
        if self._wipe_mode != "lru":
            return
        overflow = lru_overflow(self.data.num_live, num_new, self.data.capacity)
        if overflow:
            assert self.data.recency is not None
            self._evict(self.data.recency.take_oldest(overflow, pinned), "lru")

    def _evict(self, slots: Ints, mode: EvictionMode) -> None:
        groups = self.data.vacate(slots)
        self.ghosts.add(groups.tolist(), mode, self._require_step())
        self.counters.add(f"ledger/evictions/{mode}", groups.size)

    def _wipe(self) -> None:
        self.data.vacate(self.data.live_slots())
        self.ghosts.clear()
        self.counters.add("ledger_wipe_count", 1)
