"""The placement whose loops numba compiles (extra `jit`): about a fifth of the time of the one in dicts."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.ledger import kernels
from trainer.ledger.eviction import EVICTION_MODES
from trainer.ledger.ghosts import Ghost
from trainer.ledger.placement import Entries, NoRoomError, Placed, check_distinct

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

FIRST_SIZE = 64  # of the rings; a power of 2


class CompiledPlacement:
    """See `trainer.ledger.placement.Placement`, and `trainer.ledger.kernels` for what lies where.

    Args:
        capacity: number of slots.
        is_lru: evict the least recently stored where there is no room.
        has_recency: keep the order of the stores: for `is_lru`, and for sweeps.
        keep_undo: log every change.
    """

    def __init__(self, *, capacity: int, is_lru: bool, has_recency: bool, keep_undo: bool) -> None:
        self._capacity = capacity
        # Half full when as many groups were evicted lately as are held.
        bits = max(4, (4 * capacity - 1).bit_length())
        offsets = np.cumsum([kernels.HEAD, capacity, capacity, capacity, capacity])
        self._a = np.full(int(offsets[-1]) + 2 * 2**bits, kernels.NONE, np.int64)
        self._a[: kernels.HEAD] = 0
        for at, value in {
            kernels.CAPACITY: capacity,
            kernels.IS_LOGGED: keep_undo,
            kernels.HAS_QUEUE: has_recency,
            kernels.IS_LRU: is_lru,
            kernels.GROUPS: offsets[0],
            kernels.STEPS: offsets[1],
            kernels.MARKS: offsets[2],
            kernels.FREE: offsets[3],
            kernels.TABLE: offsets[4],
            kernels.TABLE_MASK: 2**bits - 1,
            kernels.TABLE_SHIFT: 64 - bits,
        }.items():
            self._a[at] = value
        # They grow as they are used.
        self._queue = np.zeros((FIRST_SIZE, 2), np.int64)
        self._ghosts = np.zeros((FIRST_SIZE, 3), np.int64)
        self._log = np.zeros((0, 3), np.int64)
        self._mark = 0
        self._set_free(np.arange(capacity - 1, -1, -1))
        self._open: list[_Begin] = []
        self._floor = (0, 0)

    @property
    def num_live(self) -> int:
        """Number of groups held."""
        return int(self._a[kernels.NUM_LIVE])

    @property
    def ring_sizes(self) -> tuple[int, int]:
        """Entries of stores and of evictions, those that no longer count included."""
        a = self._a
        queued = a[kernels.QUEUE_TAIL] - a[kernels.QUEUE_HEAD]
        return int(queued), int(a[kernels.GHOST_TAIL] - a[kernels.GHOST_HEAD])

    def begin_step(self, step: int, *, keeps_previous: bool) -> None:
        """See `Placement`."""
        if not keeps_previous:
            self._commit()
        begin = _Begin(self._a[: kernels.HEAD].copy())
        if self._a[kernels.IS_LOGGED]:
            self._open.append(begin)
        if keeps_previous:
            first, last = begin.head[kernels.SEGMENT], begin.head[kernels.QUEUE_TAIL]
            begin.segment = self._queue[np.arange(first, last) & (len(self._queue) - 1)]
        kernels.begin_step(self._a, self._queue, step)

    def confirm(self) -> None:
        """See `Placement`."""
        if len(self._open) < 2:
            self._commit()
            return
        del self._open[0]
        final = int(self._open[0].head[kernels.LOG_LENGTH])
        length = int(self._a[kernels.LOG_LENGTH]) - final
        self._log[:length] = self._log[final : final + length]
        self._a[kernels.LOG_LENGTH] = length
        for begin in self._open:
            begin.head[kernels.LOG_LENGTH] -= final
        if kernels.is_littered(self._a):
            # The open steps go back to the rings as they are.
            for begin in self._open:
                begin.rings = begin.rings or (self._queue, self._ghosts, self._floor)
            self._queue, self._ghosts = self._queue.copy(), self._ghosts.copy()
            self._floor = self._heads(self._a)
            kernels.compact(self._a, self._queue, self._ghosts)
        elif self._open[0].rings is None:
            self._floor = self._heads(self._open[0].head)

    def look_up(self, groups: Ints, cell_index: Ints) -> tuple[Ints, int]:
        """See `Placement`."""
        slots = np.empty(groups.size, np.int64)
        num_missing = kernels.look_up(self._a, groups, cell_index, slots)
        if num_missing < 0:
            check_distinct(groups.tolist())
        return slots, num_missing

    def store(self, groups: Ints, cell_index: Ints, is_dropped: Flags, step: int) -> Placed:
        """See `Placement`."""
        self._reserve(groups.size, groups.size, kernels.LOGGED_PER_ROW * groups.size)
        self._mark += 1
        slots = np.empty(groups.size, np.int64)
        fits, needed, num_evicted, by_lru, by_stale = kernels.store(
            self._a, self._queue, self._ghosts, self._log, groups, cell_index, is_dropped, slots, step, self._mark
        )
        if fits == kernels.IS_TWICE:
            check_distinct(groups.tolist())
        elif fits != kernels.FITS:
            raise NoRoomError(needed)
        return Placed(slots, num_evicted, (by_lru, by_stale))

    def sweep(self, cutoff: int, step: int) -> int:
        """See `Placement`."""
        self._reserve(0, self.num_live, kernels.LOGGED_PER_EVICTION * self.num_live)
        num_evicted: int = kernels.sweep(self._a, self._queue, self._ghosts, self._log, cutoff, step)
        return num_evicted

    def wipe(self) -> None:
        """See `Placement`."""
        num_known = int(self._a[kernels.NUM_KNOWN])
        self._reserve(0, 0, kernels.LOGGED_PER_EVICTION * (self.num_live + num_known))
        kernels.wipe(self._a, self._ghosts, self._log)

    def release(self, groups: Ints) -> None:
        """See `Placement`."""
        self._reserve(0, 0, kernels.LOGGED_PER_EVICTION * groups.size)
        kernels.release(self._a, self._log, groups)

    def undo(self) -> None:
        """See `Placement`."""
        begin = self._open.pop()
        kernels.undo(self._a, self._log, begin.head[kernels.LOG_LENGTH])
        self._a[: kernels.HEAD] = begin.head
        if begin.rings is not None:
            self._queue, self._ghosts, self._floor = begin.rings
        if begin.segment is not None:
            first = begin.head[kernels.SEGMENT]
            self._queue[np.arange(first, first + len(begin.segment)) & (len(self._queue) - 1)] = begin.segment

    def evicted(self) -> Iterator[tuple[int, Ghost]]:
        """See `Placement`."""
        entries = self._ghosts[kernels.known(self._a, self._ghosts)]
        modes = (entries[:, 1] - self._capacity - 1) % len(EVICTION_MODES)
        for group, mode, step in zip(entries[:, 0].tolist(), modes.tolist(), entries[:, 2].tolist(), strict=True):
            yield group, Ghost(EVICTION_MODES[mode], step)

    def entries(self) -> Entries:
        """See `Placement`."""
        a, n = self._a, self._capacity
        last_step = a[a[kernels.STEPS] :][:n]
        slots = np.flatnonzero(last_step >= 0)
        free = a[a[kernels.FREE] :][: a[kernels.NUM_FREE]]
        return Entries(a[a[kernels.GROUPS] :][:n][slots], slots, last_step[slots], free.copy())

    def fill(self, entries: Entries, evicted: list[tuple[int, Ghost]]) -> None:
        """See `Placement`."""
        a = self._a
        first_place = int(a[kernels.GROUPS])
        a[first_place:] = kernels.NONE
        for at in (kernels.QUEUE_HEAD, kernels.QUEUE_TAIL, kernels.SEGMENT, kernels.GHOST_HEAD, kernels.GHOST_TAIL):
            a[at] = 0
        a[kernels.NUM_KNOWN] = 0
        self._commit()
        self._reserve(entries.groups.size, len(evicted), kernels.LOGGED_PER_EVICTION * len(evicted))
        by_age = np.lexsort((entries.slots, entries.last_step))
        kernels.fill(a, self._queue, entries.groups, entries.slots, entries.last_step, by_age)
        self._set_free(entries.free_slots)
        for group, ghost in evicted:
            mode = EVICTION_MODES.index(ghost.mode)
            kernels.remember(a, self._ghosts, self._log, group, mode, ghost.step)
        self._commit()

    def _set_free(self, slots: Ints) -> None:
        start = int(self._a[kernels.FREE])
        self._a[start : start + slots.size] = slots
        self._a[kernels.NUM_FREE] = slots.size

    def _commit(self) -> None:
        self._a[kernels.LOG_LENGTH] = 0
        self._open.clear()
        if kernels.is_littered(self._a):
            kernels.compact(self._a, self._queue, self._ghosts)
        self._floor = self._heads(self._a)

    @staticmethod
    def _heads(head: Ints) -> tuple[int, int]:
        return int(head[kernels.QUEUE_HEAD]), int(head[kernels.GHOST_HEAD])

    def _reserve(self, num_stored: int, num_evicted: int, num_logged: int) -> None:
        """Make the rings and the log large enough; what the open steps have taken from the rings must stay there."""
        a, (queue_floor, ghost_floor) = self._a, self._floor
        if a[kernels.QUEUE_TAIL] - queue_floor + num_stored > len(self._queue):
            self._queue = _grown(self._queue, queue_floor, int(a[kernels.QUEUE_TAIL]), num_stored)
        if a[kernels.GHOST_TAIL] - ghost_floor + num_evicted > len(self._ghosts):
            self._ghosts = _grown(self._ghosts, ghost_floor, int(a[kernels.GHOST_TAIL]), num_evicted)
        if a[kernels.IS_LOGGED] and a[kernels.LOG_LENGTH] + num_logged > len(self._log):
            log = np.zeros((2 * (int(a[kernels.LOG_LENGTH]) + num_logged), 3), np.int64)
            log[: len(self._log)] = self._log
            self._log = log


@dataclass
class _Begin:
    """What an open step goes back to, beside the log."""

    head: Ints
    segment: Ints | None = None
    """What the step before had stored, before it was put in order; None if it was final."""
    rings: tuple[Ints, Ints, tuple[int, int]] | None = None
    """Rings and floor, where others have taken their place since."""


@functools.cache
def compile_all() -> None:
    """Compile every loop, or load its machine code, so that no step has to wait for that: 0.5 s, the first time 10 s."""
    placement = CompiledPlacement(capacity=1, is_lru=True, has_recency=True, keep_undo=True)
    zero, no = np.zeros(1, np.int64), np.zeros(1, np.bool_)
    placement.begin_step(0, keeps_previous=False)
    placement.look_up(zero, zero)
    placement.store(zero, zero, no, 0)
    placement.store(zero + 1, zero, no, 0)
    placement.release(zero)
    placement.undo()
    placement.begin_step(0, keeps_previous=False)
    placement.sweep(0, 0)
    placement.fill(placement.entries(), [*placement.evicted(), (0, Ghost("lru", 0))])
    placement.wipe()
    kernels.compact(placement._a, placement._queue, placement._ghosts)


def _grown(ring: Ints, head: int, tail: int, num_more: int) -> Ints:
    """A ring with room for `num_more` entries, twice as large at least; an entry's position, modulo the size, is kept."""
    grown = np.zeros((1 << (tail - head + num_more).bit_length(), ring.shape[1]), np.int64)
    positions = np.arange(head, tail)
    grown[positions & (len(grown) - 1)] = ring[positions & (len(ring) - 1)]
    return grown
