"""The rows of one ledger shard: a slab of states, the index from groups to rows, and a journal to undo changes.

Nothing here knows why a group is stored or dropped; that is the shard's part.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.ledger.recency import RecencyBuckets

Ints = NDArray[np.int64]

# Numbers that numpy does not know are moved as whole numbers of their size.
_CARRIERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


class StateStore:
    """A preallocated slab `[capacity + 2, width]`: a row a slot, a row that is never written and reads as zeros, and a
    row that is never read, for what is not kept: writing all rows of a batch there costs less than picking some.

    Args:
        width: numbers per state.
        capacity: most groups that can be held.
        device, dtype: of the slab.
        has_recency: keep the order of the stores, which `recency` then answers for.
        keep_undo: journal every change, so that `undo()` can take back what came since the last `begin()` or `commit()`.
    """

    def __init__(
        self,
        *,
        width: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
        has_recency: bool,
        keep_undo: bool,
    ) -> None:
        self.width = width
        self.capacity = capacity
        self.device = device
        self.slab = torch.zeros(capacity + 2, width, device=device, dtype=dtype)
        self._carrier = None if _is_known_to_numpy(dtype) else _CARRIERS[dtype.itemsize]
        # On the CPU rows are copied by numpy, which takes two thirds of the time of `index_select` and `index_copy_`.
        self._cpu_rows: NDArray[Any] | None = None
        if device.type == "cpu":
            self._cpu_rows = (self.slab if self._carrier is None else self.slab.view(self._carrier)).numpy()
        self.slot_of: dict[int, int] = {}
        # The last groups looked for, their slots and how many are not held, until a group comes or goes.
        self._found: tuple[list[int], Ints, int] | None = None
        # Of a free slot the last group that it had.
        self.group_of: Ints = np.full(capacity, -1, np.int64)
        self.last_step: Ints = np.full(capacity, -1, np.int64)
        self.free_slots: list[int] = list(range(capacity - 1, -1, -1))
        self._journal: list[Callable[[], object]] | None = [] if keep_undo else None
        # Where in the journal the steps begin that are not final.
        self._begins: list[int] = []
        self.recency = RecencyBuckets(self.last_step, self.on_undo if keep_undo else None) if has_recency else None

    @property
    def keeps_undo(self) -> bool:
        """Whether changes can be taken back."""
        return self._journal is not None

    @property
    def has_open_step(self) -> bool:
        """Whether a step has begun that is not final."""
        return bool(self._begins)

    @property
    def num_live(self) -> int:
        """Number of groups held."""
        return len(self.slot_of)

    @property
    def no_slot(self) -> int:
        """What stands for the slot of a group that is not held: the row of zeros."""
        return self.capacity

    @property
    def waste_slot(self) -> int:
        """Where rows are written that are not kept."""
        return self.capacity + 1

    def find(self, groups: list[int]) -> tuple[Ints, int]:
        """The slot of each group (the caller's own copy), and how many are not held; those have `no_slot`."""
        # A store asks for what its look-up asked for, mostly with nothing moved in between.
        if self._found is None or self._found[0] is not groups:
            slots = list(map(self.slot_of.get, groups, repeat(self.capacity)))
            self._found = groups, np.array(slots, np.int64), slots.count(self.capacity)
        return self._found[1].copy(), self._found[2]

    def read(self, slots: Ints) -> Tensor:
        """The rows of `slots`, [len(slots), width], copied; zeros for `no_slot`."""
        if self._cpu_rows is not None:
            rows = torch.from_numpy(self._cpu_rows.take(slots, 0))
            return rows if self._carrier is None else rows.view(self.slab.dtype)
        return self.slab.index_select(0, self._index(slots))

    def write(self, slots: Ints, rows: Tensor) -> None:
        """Copy `rows`, of the slab's device and dtype, into `slots`, distinct but for `waste_slot`."""
        if self._journal is not None:
            old = self.read(slots)
            self.on_undo(lambda: self._copy(slots, old))
        self._copy(slots, rows)

    def _copy(self, slots: Ints, rows: Tensor) -> None:
        if self._cpu_rows is not None:
            self._cpu_rows[slots] = (rows if self._carrier is None else rows.view(self._carrier)).numpy()
        else:
            self.slab.index_copy_(0, self._index(slots), rows)

    def touch(self, slots: Ints, step: int) -> None:
        """Note that the distinct live `slots` are stored at `step`; `record` must follow."""
        if self._journal is not None:
            old = self.last_step[slots]
            self.on_undo(lambda: self.last_step.__setitem__(slots, old))
        self.last_step[slots] = step

    def record(self, slots: Ints, step: int) -> None:
        """Enter the slots touched at `step` into the order of the stores, if it is kept."""
        if self.recency is not None:
            self.recency.add(step, slots)

    def acquire(self, groups: list[int]) -> Ints:
        """Give each of the distinct groups that are not held a free slot; there must be enough of them."""
        num_left = len(self.free_slots) - len(groups)
        taken = self.free_slots[num_left:][::-1]
        del self.free_slots[num_left:]
        self._found = None
        self.slot_of.update(zip(groups, taken, strict=True))
        slots = np.array(taken, np.int64)
        self.group_of[slots] = groups
        if self._journal is not None:
            self.on_undo(lambda: self._drop(groups, slots))
        return slots

    def vacate(self, slots: Ints) -> list[int]:
        """Free the distinct live `slots`; returns their groups."""
        groups: list[int] = self.group_of[slots].tolist()
        if self._journal is not None:
            steps = self.last_step[slots]
            self.on_undo(lambda: self._restore(groups, slots, steps))
        self._found = None
        for group in groups:
            del self.slot_of[group]
        self.free_slots.extend(slots.tolist())
        self.last_step[slots] = -1
        return groups

    def clear(self) -> None:
        """Empty the store, with nothing left to undo."""
        self.place(
            np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64), range(self.capacity - 1, -1, -1)
        )

    def place(self, groups: Ints, slots: Ints, steps: Ints, free_slots: Iterable[int]) -> None:
        """Set the whole index at once, with nothing left to undo; the rows are to be written next."""
        self._found = None
        self.slot_of = dict(zip(groups.tolist(), slots.tolist(), strict=True))
        self.free_slots = list(free_slots)
        self.last_step.fill(-1)
        self.group_of[slots] = groups
        self.last_step[slots] = steps
        if self.recency is not None:
            self.recency.rebuild()
        if self._journal is not None:
            self._journal.clear()
            self._begins.clear()

    def live_slots(self) -> Ints:
        """The slots in use, ascending."""
        return np.flatnonzero(self.last_step >= 0)

    def on_undo(self, inverse: Callable[[], object]) -> None:
        """Add the inverse of a change to the journal, if one is kept."""
        if self._journal is not None:
            self._journal.append(inverse)

    def begin(self) -> None:
        """Open a step: `undo` goes back to here."""
        if self._journal is not None:
            self._begins.append(len(self._journal))

    def confirm(self) -> None:
        """Keep the changes of the oldest open step for good."""
        if self._journal is None or len(self._begins) < 2:
            self.commit()
            return
        end = self._begins[1]
        del self._journal[:end]
        self._begins = [begin - end for begin in self._begins[1:]]
        self._compact()

    def commit(self) -> None:
        """Keep all changes so far for good."""
        if self._journal is not None:
            self._journal.clear()
            self._begins.clear()
        self._compact()

    def _compact(self) -> None:
        # An entry is kept per store; dropping the outdated ones once they outnumber the rows costs O(1) per store.
        if self.recency is not None and len(self.recency) > 4 * self.capacity + 1024:
            if self._begins:
                # What is journalled belongs to the order as it is: rebuild a copy, which an undo puts away again.
                old, self.recency = self.recency, copy.copy(self.recency)
                self.on_undo(lambda: setattr(self, "recency", old))
            self.recency.rebuild()

    def undo(self) -> None:
        """Take back all changes of the newest open step; without one, since the last commit. Needs `keep_undo`."""
        if self._journal is None:
            raise RuntimeError("the ledger keeps no undo journal: construct it with keep_undo=True")
        begin = self._begins.pop() if self._begins else 0
        while len(self._journal) > begin:
            self._journal.pop()()

    def _index(self, slots: Ints) -> Tensor:
        return to_device(slots, self.device)

    def _drop(self, groups: list[int], slots: Ints) -> None:
        """Inverse of `acquire`."""
        self._found = None
        for group in groups:
            del self.slot_of[group]
        self.free_slots.extend(reversed(slots.tolist()))
        self.last_step[slots] = -1

    def _restore(self, groups: list[int], slots: Ints, steps: Ints) -> None:
        """Inverse of `vacate`."""
        del self.free_slots[len(self.free_slots) - slots.size :]
        self._found = None
        self.slot_of.update(zip(groups, slots.tolist(), strict=True))
        self.group_of[slots] = groups
        self.last_step[slots] = steps


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A tensor of `array` on the device, which the host does not wait for: a copy from pageable memory would make it."""
    tensor = torch.from_numpy(array)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def _is_known_to_numpy(dtype: torch.dtype) -> bool:
    try:
        torch.empty(0, dtype=dtype).numpy()
    except TypeError:
        return False
    return True
