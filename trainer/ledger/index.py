"""Which slot holds which group, when it was stored, and the groups evicted recently.

| wipe mode | evicts |
|---|---|
| `none` | nothing |
| `full` | everything, every `wipe_every` steps |
| `lru` | the least recently stored groups, when more than `capacity` are live |
| `periodic_stale` | every `sweep_every` steps, the groups with `last_step < step - stale_threshold` |

Host memory only: groups, slots and steps are integers here, and nothing knows about states.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from itertools import repeat
from typing import Literal, get_args

import numpy as np

from trainer.arrays import Flags, Ints
from trainer.errors import UserError
from trainer.metrics.logger import get_logger
from trainer.options import LedgerOptions

logger = get_logger(__name__)

# Checkpoints store the position of a mode here: append a new one.
EvictionMode = Literal["lru", "stale"]
EVICTION_MODES: tuple[EvictionMode, ...] = get_args(EvictionMode)

Evicted = tuple[EvictionMode, int]
"""How a group was evicted, and at which step."""

MOST_EVICTED = 10**6
"""Evicted groups that are remembered, at about 200 bytes each: others' do not count."""
PINNED = -2  # the last step of slots that must not be evicted; -1 is a free slot


class GroupIndex:
    """Group -> slot, for the groups that one rank holds; `capacity` as a slot stands for none.

    Evictions and false evictions are added to `counts`, by metric key.
    """

    def __init__(self, options: LedgerOptions, counts: dict[str, int]) -> None:
        self.capacity = capacity = options.slots
        self.num_live = 0
        # Groups that have not come back since, oldest first.
        self.evicted: OrderedDict[int, Evicted] = OrderedDict()
        self.last_step: Ints = np.full(capacity, -1, np.int64)  # of the last store, by slot
        self.group_of: Ints = np.full(capacity, -1, np.int64)
        # Groups waiting to be read: no sweep evicts them until they are stored again or end.
        self.kept: set[int] = set()
        self._slot_of: dict[int, int] = {}
        # A stack: the first `capacity - num_live` entries are free, the last of them is used next.
        self._free: Ints = np.arange(capacity - 1, -1, -1)
        self._is_lru = options.wipe_mode == "lru"
        self._counts, self._has_forgotten = counts, False

    def find(self, group_ids: Ints) -> Ints:
        """The slots of the groups, [n]; `capacity` for a group that is not held.

        Raises ValueError if a group (not -1) appears twice.
        """
        groups: list[int] = group_ids.tolist()
        if len(set(groups)) < len(groups):
            for group, count in Counter(groups).most_common(2):  # -1 may be the first
                if group >= 0 and count > 1:
                    raise ValueError(f"group {group} appears twice in one micro-batch")
        slots = map(self._slot_of.get, groups, repeat(self.capacity))
        return np.fromiter(slots, np.int64, len(groups))

    def place(self, group_ids: Ints, cell_index: Ints, is_kept: Flags, step: int) -> Ints:
        """Assign slots for a store at `step`, [n]: free those of groups that end, then make room.

        Group -1 is no group, and not kept; slots of groups that are not kept mean nothing.
        Raises UserError if there are too few slots, ValueError as `find`; then nothing is changed.
        """
        slots = self.find(group_ids)
        is_held = slots < self.capacity
        ended = slots[is_held & ~is_kept]
        new = (is_kept & ~is_held).nonzero()[0]
        excess = self.num_live - ended.size + new.size - self.capacity
        if excess > 0:
            self._check_room(is_kept, excess)
        if self.kept:
            self.kept.difference_update(group_ids.tolist())
        if self.evicted:
            self._take_evicted(group_ids[~is_held].tolist(), cell_index[~is_held].tolist())
        if ended.size:
            self._vacate(ended)
        if excess > 0:
            # The groups of this micro-batch are in use, however long ago they were stored.
            self.last_step[slots[is_kept & is_held]] = PINNED
            self._evict(self._oldest(excess), "lru", step)
        if new.size:
            slots[new] = self._occupy(group_ids[new])
        self.last_step[slots[is_kept]] = step
        return slots

    def sweep(self, cutoff: int, step: int) -> None:
        """Evict, as stale, the groups not `kept` whose last store was before step `cutoff`."""
        stale = np.flatnonzero((self.last_step >= 0) & (self.last_step < cutoff))
        if self.kept:
            stale = stale[~np.isin(self.group_of[stale], list(self.kept))]
        self._evict(stale[np.argsort(self.last_step[stale], kind="stable")], "stale", step)

    def wipe(self) -> None:
        """Free all slots, and forget which groups were evicted."""
        self._vacate(self.held_slots())
        self.evicted.clear()

    def held_slots(self) -> Ints:
        """The slots in use, ascending."""
        return np.flatnonzero(self.last_step >= 0)

    def free_slots(self) -> Ints:
        """The slots not in use; the last is used next."""
        return self._free[: self.capacity - self.num_live].copy()

    def fill(self, entries: tuple[Ints, Ints, Ints], free_slots: Ints, evicted: Iterable[tuple[int, Evicted]]) -> None:
        """Replace everything by entries (groups, slots, last steps); `evicted` oldest first."""
        groups, slots, last_step = entries
        self._slot_of = dict(zip(groups.tolist(), slots.tolist(), strict=True))
        self.num_live = slots.size
        self.group_of[slots] = groups
        self.last_step.fill(-1)
        self.last_step[slots] = last_step
        self._free[: free_slots.size] = free_slots
        self.evicted.clear()
        self._remember(evicted)

    def _oldest(self, count: int) -> Ints:
        """The `count` slots that were stored least recently, in order of (last step, slot)."""
        slots = self.held_slots()
        keys = self.last_step[slots] * self.capacity + slots
        oldest: Ints = np.sort(np.partition(keys, count - 1)[:count]) % self.capacity
        return oldest

    def _check_room(self, is_kept: Flags, excess: int) -> None:
        """Refuse a store that lacks `excess` slots, unless that many can be evicted."""
        needed, held, fix = self.capacity + excess, "groups in flight", ", or wipe_mode to lru"
        if self._is_lru:
            needed, held, fix = int(np.count_nonzero(is_kept)), "groups of one micro-batch", ""
        if needed > self.capacity:
            problem = f"must hold the {held}: needs {needed}, got {self.capacity}"
            raise UserError("ledger.capacity", problem, f"set it to at least {needed}{fix}")

    def _take_evicted(self, groups: list[int], cells: list[int]) -> None:
        """Forget that groups, none of them held, were evicted; count those that continue."""
        for group, cell in zip(groups, cells, strict=True):
            if group in self.evicted:
                mode, _ = self.evicted.pop(group)
                # A first cell starts from zero anyway, so nothing was lost.
                if cell:
                    self._counts[f"ledger/false_evictions/{mode}"] += 1

    def _occupy(self, groups: Ints) -> Ints:
        """Give each of the groups, none of them held, a free slot; there must be enough."""
        num_free = self.capacity - self.num_live
        slots = self._free[num_free - groups.size : num_free][::-1]
        self.num_live += groups.size
        self._slot_of.update(zip(groups.tolist(), slots.tolist(), strict=True))
        self.group_of[slots] = groups
        return slots

    def _vacate(self, slots: Ints) -> list[int]:
        """Free the slots, all in use; returns their groups."""
        groups: list[int] = self.group_of[slots].tolist()
        for group in groups:
            del self._slot_of[group]
        num_free = self.capacity - self.num_live
        self._free[num_free : num_free + slots.size] = slots
        self.num_live -= slots.size
        self.last_step[slots] = -1
        return groups

    def _evict(self, slots: Ints, mode: EvictionMode, step: int) -> None:
        self._remember(zip(self._vacate(slots), repeat((mode, step))))
        self._counts[f"ledger/evictions/{mode}"] += slots.size

    def _remember(self, evicted: Iterable[tuple[int, Evicted]]) -> None:
        self.evicted.update(evicted)
        if len(self.evicted) > MOST_EVICTED and not self._has_forgotten:
            self._has_forgotten = True
            text = "ledger: over %d evicted groups have not come back: false evictions are at least those counted"
            logger.warning(text, MOST_EVICTED)
        while len(self.evicted) > MOST_EVICTED:
            self.evicted.popitem(last=False)


def is_due(step: int, previous_step: int, every: int) -> bool:
    """Whether an action with interval `every` is due at `step`, after `previous_step`.

    It is due if a multiple of `every` lies in (previous_step, step]: a step that is never begun
    delays the action instead of losing it.
    """
    return step // every > previous_step // every
