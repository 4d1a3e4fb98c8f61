"""One rank's part of the ledger: the states of the groups it owns, when they go, and what is counted. No communication.

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
from trainer.ledger.eviction import EVICTION_MODES, WipeMode, is_due, stale_cutoff
from trainer.ledger.journal import Journal
from trainer.ledger.pending import PendingRows
from trainer.ledger.placement import NoRoomError, Placement
from trainer.ledger.slab import Ints, Slab

Flags = NDArray[np.bool_]


class LedgerShard:
    """The groups that one rank owns.

    Args:
        slab: where the states lie.
        placement: which slot holds which group.
        counters: what is counted goes here.
        wipe_mode, stale_threshold, sweep_every, wipe_every: as in `trainer.ledger.eviction`.
        keep_undo: note every change, so that `roll_back` can take a step back; the placement must do so too.
        is_owned: tells for group ids whether this rank owns them; None: all that it is given.
        pending: takes in rows before it is known whether they are finite; steps then become final by `confirm`. None: rows
            are checked as they come, and a step becomes final when the next begins.
    """

    def __init__(
        self,
        slab: Slab,
        placement: Placement,
        counters: Counters,
        *,
        wipe_mode: WipeMode,
        stale_threshold: int,
        sweep_every: int,
        wipe_every: int,
        keep_undo: bool = False,
        is_owned: Callable[[Ints], Flags] | None = None,
        pending: PendingRows | None = None,
    ) -> None:
        self.slab = slab
        self.pending = pending
        self.placement = placement
        self.counters = counters
        self.step: int | None = None
        self._journal = Journal(is_kept=keep_undo)
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
        keeps_previous = self.pending is not None and self._journal.has_open_step
        self.placement.begin_step(step, keeps_previous=keeps_previous)
        if not keeps_previous:
            self._journal.commit()
        self._journal.begin()
        self.counters.begin_step(keeps_previous=keeps_previous)
        if self.pending is not None:
            self.pending.begin_step()
        if self._journal.is_kept:
            before = self.step
            self._journal.add(lambda: setattr(self, "step", before))
        self.step = step
        if self._wipe_mode == "full" and is_due(step, previous, self._wipe_every):
            self.placement.wipe()
            self.counters.add("ledger_wipe_count", 1)
        if self._wipe_mode == "periodic_stale" and is_due(step, previous, self._sweep_every):
            num_evicted = self.placement.sweep(stale_cutoff(step, self._stale_threshold), step)
            self.counters.add("ledger/evictions/stale", num_evicted)

    def lookup(self, group_ids: Ints, cell_index: Ints) -> tuple[Tensor, Ints, int]:
        """The states from which cells go on ([n, width]), the slots they lie in, and how many are missing.

        Zeros at the start of a group, for group id -1, and where none is held, which is slot `capacity`; only the last
        of these counts as missing.

        Raises:
            ValueError: a group appears twice.
        """
        slots, num_missing = self.placement.look_up(group_ids, cell_index)
        if self.pending is not None:
            self.pending.look_up(group_ids.tolist(), slots < self.slab.capacity)
        return self.slab.read(slots), slots, num_missing

    def store(self, group_ids: Ints, cell_index: Ints, is_last: Flags, states: Tensor) -> None:
        """Store the states, which have no gradient; see `Ledger.store`."""
        if self.step is None:
            raise RuntimeError("the ledger has no step yet: call begin_step before store")
        self._check_owned(group_ids)
        if states.dtype != self.slab.dtype or states.device != self.slab.device:
            states = states.to(self.slab.device, self.slab.dtype)
        if self.pending is None:
            is_finite = self._finite_rows(states)
        else:
            is_finite, states = None, self.pending.store(group_ids.tolist(), is_last | (group_ids < 0), states)
        is_dropped = is_last if is_finite is None else is_last | ~is_finite
        try:
            slots, num_evicted, false_evictions = self.placement.store(group_ids, cell_index, is_dropped, self.step)
        except NoRoomError as error:
            raise self._no_room(error.needed) from None
        if is_finite is not None:
            num_refused = int(np.count_nonzero(~(is_last | is_finite) & (group_ids >= 0)))
            self.counters.add("ledger/refused_rows", num_refused)
        if num_evicted:
            self.counters.add("ledger/evictions/lru", num_evicted)
        for mode, count in zip(EVICTION_MODES, false_evictions, strict=True):
            if count:
                self.counters.add(f"ledger/false_evictions/{mode}", count)
        if self._journal.is_kept:
            old = self.slab.read(slots)
            self._journal.add(lambda: self.slab.write(slots, old))
        self.slab.write(slots, states)

    def release(self, groups: Ints) -> None:
        """Free the slots of those of the distinct `groups` that are held; not an eviction."""
        self._check_owned(groups)
        self.placement.release(groups)

    def roll_back(self) -> None:
        """Undo everything since `begin_step`, and `begin_step` itself.

        Raises:
            RuntimeError: no changes are noted.
        """
        self._journal.undo()
        self.placement.undo()
        self.counters.roll_back()
        if self.pending is not None:
            self.pending.forget_newest()

    def refuse(self) -> None:
        """Drop the rows of the newest step that are not finite. Waits for the device."""
        assert self.pending is not None
        refusals = self.pending.read()
        self.counters.add("ledger/refused_rows", refusals.num_rows)
        self.counters.add("ledger/cold_starts", refusals.num_cold_starts)
        self.release(np.array(refusals.groups, np.int64))

    def confirm(self) -> None:
        """The oldest open step is final."""
        assert self.pending is not None
        self.placement.confirm()
        self._journal.confirm()
        self.counters.confirm()
        self.pending.forget_oldest()

    def _check_owned(self, groups: Ints) -> None:
        if self._is_owned is not None and not (owned := self._is_owned(groups)).all():
            raise RuntimeError(f"group {groups[int(owned.argmin())]} belongs to another rank's ledger")

    def _finite_rows(self, states: Tensor) -> Flags | None:
        """Which rows are finite; None: all of them."""
        # A sum of squares is not finite if any term is not; it may also overflow, so only then each row is looked at.
        if math.isfinite(_square_sum(states)):
            return None
        finite: Flags = states.isfinite().all(dim=1).cpu().numpy()
        return None if finite.all() else finite

    def _no_room(self, needed: int) -> UserError:
        capacity = self.slab.capacity
        if self._wipe_mode == "lru":
            problem = f"must hold the groups of one micro-batch: needs {needed}, got {capacity}"
            return UserError("ledger.capacity", problem, f"set it to at least {needed}")
        problem = f"is exhausted: {needed} groups are in flight, got {capacity}"
        return UserError("ledger.capacity", problem, f"set it to at least {needed}, or wipe_mode to lru")


def _square_sum(states: Tensor) -> float:
    """The sum of the squares of all numbers; not exact."""
    if states.is_cpu and states.dtype in (torch.float32, torch.float64):
        # By BLAS, and unlike `dot` without a warning: a third of the time of `sum`.
        values = states.numpy()
        return float(np.vdot(values, values))
    return float(states.square().sum())
