"""Which slot holds which group, and what became of the groups that were evicted lately.

One dict answers both. The value of a group is its slot, below the capacity, or, above the capacity, the key under which
it was evicted: a look-up, which is what costs where the dict is not in the cache, is made once a group and step.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from itertools import repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.ledger.eviction import EvictionMode
from trainer.ledger.ghosts import RecentlyEvicted
from trainer.ledger.journal import Journal
from trainer.ledger.recency import RecencyBuckets

Ints = NDArray[np.int64]


class Found(NamedTuple):
    """Where the groups of a micro-batch are. Not to be written to."""

    groups: list[int]
    places: list[int]
    """The slot of a group that is held; the index's capacity for one that is not known, more for one evicted lately."""
    slots: Ints
    """[n]; the capacity, which is the slot of zeros, for every group that is not held."""
    absent: list[int]
    """Positions of the groups that are not held, ascending."""


class GroupIndex:
    """Group -> slot, the step of each slot's last store, and the groups evicted lately.

    Args:
        capacity: number of slots.
        has_recency: keep the order of the stores, which `recency` then answers for.
        journal: of the changes.
    """

    def __init__(self, *, capacity: int, has_recency: bool, journal: Journal) -> None:
        self.capacity = capacity
        self.num_live = 0
        # Of a free slot the last group that it had.
        self.group_of: Ints = np.full(capacity, -1, np.int64)
        self.last_step: Ints = np.full(capacity, -1, np.int64)
        self._journal = journal
        self._place_of: dict[int, int] = {}
        self.ghosts = RecentlyEvicted(capacity, self._place_of, journal)
        self.recency = RecencyBuckets(self.last_step, journal.add if journal.is_kept else None) if has_recency else None
        # A stack: the first `_num_free` are free, the last of them is the next to be used.
        self._free: Ints = np.arange(capacity - 1, -1, -1)
        self._num_free = capacity
        # What was looked for last, until a group comes or goes.
        self._found: Found | None = None

    def find(self, groups: list[int]) -> Found:
        """Look `groups` up."""
        # A store asks for what its look-up asked for, mostly with nothing moved in between.
        if self._found is None or self._found.groups is not groups:
            capacity = self.capacity
            places = list(map(self._place_of.get, groups, repeat(capacity)))
            slots = np.fromiter(places, np.int64, len(places))
            absent: list[int] = []
            if places and max(places) >= capacity:
                absent = [i for i, place in enumerate(places) if place >= capacity]
                np.minimum(slots, capacity, out=slots)
            self._found = Found(groups, places, slots, absent)
        return self._found

    def held(self) -> Ints:
        """The slots in use, ascending."""
        return np.flatnonzero(self.last_step >= 0)

    def free_slots(self) -> Ints:
        """The slots not in use; the last is the next to be used."""
        return self._free[: self._num_free].copy()

    def touch(self, slots: Ints, step: int) -> None:
        """Note that the distinct live `slots` are stored at `step`; `record` must follow."""
        if self._journal.is_kept:
            old = self.last_step[slots]
            self._journal.add(lambda: self.last_step.__setitem__(slots, old))
        self.last_step[slots] = step

    def record(self, slots: Ints, step: int) -> None:
        """Enter the slots touched at `step` into the order of the stores, if it is kept."""
        if self.recency is not None:
            self.recency.add(step, slots)

    def acquire(self, groups: list[int]) -> Ints:
        """Give each of the distinct groups that are not held a free slot; there must be enough of them."""
        num_left = self._num_free - len(groups)
        slots = self._free[num_left : self._num_free][::-1].copy()
        self._num_free = num_left
        self.num_live += slots.size
        self._found = None
        self._place_of.update(zip(groups, slots.tolist(), strict=True))
        self.group_of[slots] = groups
        if self._journal.is_kept:
            self._journal.add(lambda: self._drop(groups, slots))
        return slots

    def vacate(self, slots: Ints) -> None:
        """Free the distinct live `slots` and forget their groups."""
        for group in self._free_slots_of(slots):
            del self._place_of[group]

    def evict(self, slots: Ints, mode: EvictionMode, step: int) -> None:
        """Free the distinct live `slots` and remember that their groups were evicted by `mode` at `step`."""
        self.ghosts.add(self._free_slots_of(slots), mode, step)

    def _free_slots_of(self, slots: Ints) -> list[int]:
        """Free the slots; returns their groups, which still lead to them."""
        groups: list[int] = self.group_of[slots].tolist()
        if self._journal.is_kept:
            steps = self.last_step[slots]
            self._journal.add(lambda: self._restore(groups, slots, steps))
        self._found = None
        self._push(slots)
        self.last_step[slots] = -1
        return groups

    def _push(self, slots: Ints) -> None:
        self._free[self._num_free : self._num_free + slots.size] = slots
        self._num_free += slots.size
        self.num_live -= slots.size

    def take_evicted(self, found: Found) -> list[int]:
        """Forget that some of the groups were evicted lately; returns their positions."""
        capacity = self.capacity
        taken = [i for i in found.absent if found.places[i] > capacity]
        if taken:
            self._found = None
            self.ghosts.take([found.groups[i] for i in taken], [found.places[i] for i in taken])
        return taken

    def place(self, groups: Ints, slots: Ints, steps: Ints, free_slots: Ints) -> None:
        """Set the whole index at once, with nothing evicted and nothing left to undo."""
        self._found = None
        self._place_of.clear()
        self._place_of.update(zip(groups.tolist(), slots.tolist(), strict=True))
        self.ghosts.reset()
        self.num_live, self._num_free = slots.size, free_slots.size
        self._free[: free_slots.size] = free_slots
        self.last_step.fill(-1)
        self.group_of[slots] = groups
        self.last_step[slots] = steps
        if self.recency is not None:
            self.recency.rebuild()
        self._journal.commit()

    def tidy(self) -> None:
        """Drop outdated entries where they are the greater part: O(1) per store. Call it where a step has become final."""
        if self.ghosts.is_littered:
            if self._journal.has_open_step:
                # What is journalled belongs to the object as it is: an undo puts it back.
                old_ghosts, self.ghosts = self.ghosts, copy.copy(self.ghosts)
                self._journal.add(lambda: setattr(self, "ghosts", old_ghosts))
            self.ghosts.compact()
        if self.recency is not None and len(self.recency) > 4 * self.capacity + 1024:
            if self._journal.has_open_step:
                old_recency, self.recency = self.recency, copy.copy(self.recency)
                self._journal.add(lambda: setattr(self, "recency", old_recency))
            self.recency.rebuild()

    def _drop(self, groups: Iterable[int], slots: Ints) -> None:
        """Inverse of `acquire`."""
        self._found = None
        for group in groups:
            del self._place_of[group]
        self._push(slots[::-1])
        self.last_step[slots] = -1

    def _restore(self, groups: list[int], slots: Ints, steps: Ints) -> None:
        """Inverse of `_free_slots_of`."""
        self._found = None
        self._num_free -= slots.size
        self.num_live += slots.size
        self._place_of.update(zip(groups, slots.tolist(), strict=True))
        self.group_of[slots] = groups
        self.last_step[slots] = steps
