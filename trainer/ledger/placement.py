"""Which slot holds which group: what a placement can do, and the one that needs Python alone.

A placement knows groups, slots and steps, and nothing of states. The rules are those of `trainer.ledger.shard`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from trainer.errors import UserError
from trainer.ledger.eviction import EVICTION_MODES, EvictionMode, lru_overflow
from trainer.ledger.ghosts import Ghost
from trainer.ledger.index import Found, GroupIndex
from trainer.ledger.journal import Journal

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Placed(NamedTuple):
    """What a store did."""

    slots: Ints
    """Where each row is to be written, [n]; capacity + 1, the waste slot, for a row that is not kept."""
    num_evicted: int
    """By LRU."""
    false_evictions: tuple[int, int]
    """Of each of EVICTION_MODES."""


class NoRoomError(Exception):
    """The groups do not fit; nothing was changed.

    Args:
        needed: slots that they need.
    """

    def __init__(self, needed: int) -> None:
        super().__init__(needed)
        self.needed = needed


class Entries(NamedTuple):
    """What a placement holds, but for the groups that were evicted."""

    groups: Ints
    slots: Ints
    """Ascending where a placement returns them."""
    last_step: Ints
    free_slots: Ints
    """The last is the next to be used."""


class Placement(Protocol):
    """Group -> slot, for the groups of a shard. Group ids are distinct int64 or -1, which stands for no group."""

    @property
    def num_live(self) -> int:
        """Number of groups held."""

    def begin_step(self, step: int, *, keeps_previous: bool) -> None:
        """What follows happens at `step`, and can be undone if that was asked for; what came before is final, unless it is
        kept open: then it can be undone next.
        """

    def confirm(self) -> None:
        """The oldest open step is final."""

    def look_up(self, groups: Ints, cell_index: Ints) -> tuple[Ints, int]:
        """The slots to read, [n] (the capacity at a group's first cell, and where none is held), and how many are missing.

        Raises:
            ValueError: a group is there twice.
        """

    def store(self, groups: Ints, cell_index: Ints, is_dropped: Flags, step: int) -> Placed:
        """Free the slots of the dropped groups; with `lru` make room; give the others slots, stored last at `step`.

        Raises:
            ValueError: a group is there twice.
            NoRoomError: there are too few slots; with `lru`, for this call's groups alone.
        """

    def sweep(self, cutoff: int, step: int) -> int:
        """Evict, as stale, what was stored last before step `cutoff`; returns how many."""

    def wipe(self) -> None:
        """Free all slots and forget what was evicted."""

    def release(self, groups: Ints) -> None:
        """Free the slots of those of the groups that are held."""

    def undo(self) -> None:
        """Take back everything since the newest `begin_step`."""

    def evicted(self) -> Iterator[tuple[int, Ghost]]:
        """The groups evicted lately that have not come back, oldest first."""

    def entries(self) -> Entries:
        """What is held."""

    def fill(self, entries: Entries, evicted: list[tuple[int, Ghost]]) -> None:
        """Replace everything, with nothing to undo; of the evicted the oldest come first, and none is held."""


class DictPlacement:
    """A placement in dicts and small arrays.

    Args:
        capacity: number of slots.
        is_lru: evict the least recently stored where there is no room.
        has_recency: keep the order of the stores: for `is_lru`, and for sweeps.
        keep_undo: journal every change.
    """

    def __init__(self, *, capacity: int, is_lru: bool, has_recency: bool, keep_undo: bool) -> None:
        self._capacity = capacity
        self._is_lru = is_lru
        self._journal = Journal(is_kept=keep_undo)
        self.index = GroupIndex(capacity=capacity, has_recency=has_recency, journal=self._journal)
        self._checked_bytes = b""
        self._checked: list[int] = []

    @property
    def num_live(self) -> int:
        """Number of groups held."""
        return self.index.num_live

    def begin_step(self, step: int, *, keeps_previous: bool) -> None:
        """See `Placement`."""
        if not keeps_previous:
            self._journal.commit()
            self.index.tidy()
        self._journal.begin()

    def confirm(self) -> None:
        """See `Placement`."""
        self._journal.confirm()
        self.index.tidy()

    def look_up(self, groups: Ints, cell_index: Ints) -> tuple[Ints, int]:
        """See `Placement`."""
        found = self.index.find(self._distinct(groups))
        num_absent = len(found.absent)
        if np.count_nonzero(cell_index) == cell_index.size and (not num_absent or groups.min() >= 0):
            return found.slots, num_absent
        num_missing = sum(1 for i in found.absent if cell_index[i] and found.groups[i] >= 0)
        return np.where(cell_index == 0, self._capacity, found.slots), num_missing

    def store(self, groups: Ints, cell_index: Ints, is_dropped: Flags, step: int) -> Placed:
        """See `Placement`."""
        index = self.index
        found = index.find(self._distinct(groups))
        slots, new, num_kept, freed = found.slots.copy(), found.absent, len(found.groups), None
        kept = None
        if new and min(found.groups) < 0:
            is_dropped = is_dropped | (groups < 0)
        if np.count_nonzero(is_dropped):
            kept, freed = ~is_dropped, slots[is_dropped]
            freed = freed[freed < self._capacity]
            slots[is_dropped] = self._capacity + 1
            new = [i for i in new if kept[i]]
            num_kept = int(np.count_nonzero(kept))
        self._check_room(num_kept, index.num_live - (0 if freed is None else freed.size) + len(new))

        false_evictions = (0, 0)
        if found.absent and index.ghosts.num_known:
            false_evictions = self._take_evicted(found, cell_index)
        if freed is not None and freed.size:
            index.vacate(freed)
        num_evicted = 0
        if new:
            num_evicted = self._make_room(len(new), slots, step)
            slots[new] = index.acquire([found.groups[i] for i in new])
        kept_slots = slots if kept is None else slots[kept]
        index.touch(kept_slots, step)
        index.record(kept_slots, step)
        return Placed(slots, num_evicted, false_evictions)

    def sweep(self, cutoff: int, step: int) -> int:
        """See `Placement`."""
        assert self.index.recency is not None
        return self._evict(self.index.recency.take_before(cutoff), "stale", step)

    def wipe(self) -> None:
        """See `Placement`."""
        self.index.vacate(self.index.held())
        self.index.ghosts.clear()

    def release(self, groups: Ints) -> None:
        """See `Placement`."""
        slots = self.index.find(groups.tolist()).slots
        slots = slots[slots < self._capacity]
        if slots.size:
            self.index.vacate(slots)

    def undo(self) -> None:
        """See `Placement`."""
        self._journal.undo()

    def evicted(self) -> Iterator[tuple[int, Ghost]]:
        """See `Placement`."""
        return self.index.ghosts.items()

    def entries(self) -> Entries:
        """See `Placement`."""
        slots = self.index.held()
        return Entries(self.index.group_of[slots], slots, self.index.last_step[slots], self.index.free_slots())

    def fill(self, entries: Entries, evicted: list[tuple[int, Ghost]]) -> None:
        """See `Placement`."""
        self.index.place(entries.groups, entries.slots, entries.last_step, entries.free_slots)
        for group, ghost in evicted:
            self.index.ghosts.add([group], ghost.mode, ghost.step)
        self._journal.commit()

    def _distinct(self, group_ids: Ints) -> list[int]:
        """The ids as a list, found to be distinct."""
        # A store comes with the groups of the look-up before it.
        as_bytes = group_ids.tobytes()
        if as_bytes != self._checked_bytes:
            groups: list[int] = group_ids.tolist()
            check_distinct(groups)
            self._checked, self._checked_bytes = groups, as_bytes
        return self._checked

    def _check_room(self, num_rows: int, num_live: int) -> None:
        needed = num_rows if self._is_lru else num_live
        if needed > self._capacity:
            raise NoRoomError(needed)

    def _take_evicted(self, found: Found, cell_index: Ints) -> tuple[int, int]:
        """Those of the absent groups that were evicted lately are known no more; counts those in mid-document."""
        modes = [self.index.ghosts.mode_of(found.places[i]) for i in self.index.take_evicted(found) if cell_index[i]]
        return modes.count(EVICTION_MODES[0]), modes.count(EVICTION_MODES[1])

    def _make_room(self, num_new: int, slots: Ints, step: int) -> int:
        """With `lru`, evict until `num_new` groups fit beside those that are held; those in `slots` stay."""
        overflow = lru_overflow(self.index.num_live, num_new, self._capacity)
        if not overflow:
            return 0
        assert self.index.recency is not None
        pinned = slots[slots < self._capacity]
        self.index.touch(pinned, step)
        return self._evict(self.index.recency.take_oldest(overflow, pinned), "lru", step)

    def _evict(self, slots: Ints, mode: EvictionMode, step: int) -> int:
        self.index.evict(slots, mode, step)
        return slots.size


def check_distinct(groups: list[int]) -> None:
    """Raise a ValueError that names a group (not -1) that appears twice."""
    if len(set(groups)) < len(groups):
        known = [group for group in groups if group >= 0]
        twice = next((group for i, group in enumerate(known) if group in known[:i]), None)
        if twice is not None:
            raise ValueError(f"group {twice} appears twice in one micro-batch")


def make_placement(*, compiled: bool, capacity: int, is_lru: bool, has_recency: bool, keep_undo: bool) -> Placement:
    """The placement of a ledger; see `Ledger`.

    Raises:
        UserError: it is to be compiled, and numba is not installed.
    """
    if not compiled:
        return DictPlacement(capacity=capacity, is_lru=is_lru, has_recency=has_recency, keep_undo=keep_undo)
    try:
        from trainer.ledger.compiled_placement import CompiledPlacement, compile_all
    except ModuleNotFoundError as error:
        raise UserError("ledger.index", f"compiled needs {error.name}", "pip install 'trainer[jit]'") from None
    compile_all()
    return CompiledPlacement(capacity=capacity, is_lru=is_lru, has_recency=has_recency, keep_undo=keep_undo)
