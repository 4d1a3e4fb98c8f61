"""The compiled placement's arithmetic: plain loops over whole numbers, which numba turns into machine code.

Everything lies in four arrays, so that a call hands over few of them:

- `a`, one-dimensional: a head of numbers (the names below), then, at offsets that stand in the head, the group, the step of
  the last store and a mark of each slot, the stack of free slots, and an open-addressing hash table of pairs (group, place)
  with linear probing. A place is a slot, below the capacity, or, above the capacity, the key under which the group was evicted.
- `queue` [n, 2]: (step, slot) of every store, a ring in order of the steps. What lies before `SEGMENT` is in order of
  (step, slot); what lies behind is of the current step. An entry counts only while it is the slot's last store.
- `ghosts` [n, 3]: (group, key, step) of every eviction, a ring. An entry counts only while the group's place is its key.
- `log` [n, 3]: what was changed, to be undone: (index in `a`, old number, 0), or (-1, group, old place).

The head itself is not logged: who can undo keeps a copy of it. Rings and log are never full: the caller sees to that.

All of it is in one file, because numba's cache of machine code watches no other file than that of the function itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Function = TypeVar("Function", bound=Callable[..., Any])

(
    CAPACITY,
    NUM_LIVE,
    NUM_FREE,
    QUEUE_HEAD,
    QUEUE_TAIL,
    SEGMENT,
    GHOST_HEAD,
    GHOST_TAIL,
    NUM_KNOWN,
    NEXT_KEY,
    LOG_LENGTH,
    IS_LOGGED,
    HAS_QUEUE,
    IS_LRU,
    GROUPS,
    STEPS,
    MARKS,
    FREE,
    TABLE,
    TABLE_MASK,
    TABLE_SHIFT,
    HEAD,
) = range(22)

NONE = -1
LRU, STALE = 0, 1
# What `store` returns beside the counts.
FITS, BATCH_TOO_LARGE, EXHAUSTED, IS_TWICE = range(4)
# Log entries that one row of a store can need, and one group that is evicted or dropped.
LOGGED_PER_ROW = 16
LOGGED_PER_EVICTION = 8
# 2**64 over the golden ratio (Knuth, The Art of Computer Programming 3, 6.4): neighbouring ids are spread over the table.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


def compiled(function: Function) -> Function:
    """Compile on the first call; the machine code is kept in a cache where there is a place for it."""
    try:
        return cast(Function, numba.njit(cache=True)(function))
    except RuntimeError:  # no directory can be written
        return cast(Function, numba.njit(function))


@compiled
def _home(a: Ints, group: int) -> np.int64:
    """Where a group's search in the table begins."""
    return np.int64((np.uint64(group) * _SPREAD) >> np.uint64(a[TABLE_SHIFT]))


@compiled
def _find(a: Ints, group: int) -> int:
    """The group's place; the capacity if it has none."""
    table, mask = a[TABLE], a[TABLE_MASK]
    h = _home(a, group)
    while True:
        at = table + 2 * h
        if a[at] == group:
            return int(a[at + 1])
        if a[at] == NONE:
            return int(a[CAPACITY])
        h = (h + 1) & mask


@compiled
def _write_place(a: Ints, group: int, place: int) -> None:
    table, mask = a[TABLE], a[TABLE_MASK]
    h = _home(a, group)
    while a[table + 2 * h] != NONE and a[table + 2 * h] != group:
        h = (h + 1) & mask
    a[table + 2 * h] = group
    a[table + 2 * h + 1] = place


@compiled
def _erase_place(a: Ints, group: int) -> None:
    """Take a group out of the table, and move back those behind it that would not be found otherwise."""
    table, mask = a[TABLE], a[TABLE_MASK]
    hole = _home(a, group)
    while a[table + 2 * hole] != group:
        hole = (hole + 1) & mask
    h = hole
    while True:
        h = (h + 1) & mask
        other = a[table + 2 * h]
        if other == NONE:
            break
        # It may move into the hole unless its search begins behind the hole.
        if ((h - _home(a, other)) & mask) >= ((h - hole) & mask):
            a[table + 2 * hole] = other
            a[table + 2 * hole + 1] = a[table + 2 * h + 1]
            hole = h
    a[table + 2 * hole] = NONE


@compiled
def _note(a: Ints, log: Ints, index: int, first: int, second: int) -> None:
    n = a[LOG_LENGTH]
    log[n, 0] = index
    log[n, 1] = first
    log[n, 2] = second
    a[LOG_LENGTH] = n + 1


@compiled
def _set(a: Ints, log: Ints, index: int, value: int) -> None:
    if a[IS_LOGGED]:
        _note(a, log, index, a[index], 0)
    a[index] = value


@compiled
def _lead(a: Ints, log: Ints, group: int, place: int) -> None:
    """Let the group lead to a place."""
    if a[IS_LOGGED]:
        _note(a, log, NONE, group, _find(a, group))
    _write_place(a, group, place)


@compiled
def _forget(a: Ints, log: Ints, group: int, place: int) -> None:
    """Let the group, which leads to `place`, lead nowhere."""
    if a[IS_LOGGED]:
        _note(a, log, NONE, group, place)
    _erase_place(a, group)


@compiled
def _push_free(a: Ints, log: Ints, slot: int) -> None:
    _set(a, log, a[STEPS] + slot, NONE)
    _set(a, log, a[FREE] + a[NUM_FREE], slot)
    a[NUM_FREE] += 1
    a[NUM_LIVE] -= 1


@compiled
def _drop_oldest(a: Ints, ghosts: Ints, log: Ints) -> None:
    """Forget evicted groups until no more are known than there are slots."""
    while a[NUM_KNOWN] > a[CAPACITY]:
        at = a[GHOST_HEAD] & (ghosts.shape[0] - 1)
        a[GHOST_HEAD] += 1
        if _find(a, ghosts[at, 0]) == ghosts[at, 1]:
            _forget(a, log, ghosts[at, 0], ghosts[at, 1])
            a[NUM_KNOWN] -= 1


@compiled
def remember(a: Ints, ghosts: Ints, log: Ints, group: int, mode: int, step: int) -> None:
    """Note that `group` was evicted by `mode` at `step`."""
    key = a[CAPACITY] + 1 + 2 * a[NEXT_KEY] + mode
    a[NEXT_KEY] += 1
    _lead(a, log, group, key)
    at = a[GHOST_TAIL] & (ghosts.shape[0] - 1)
    ghosts[at, 0] = group
    ghosts[at, 1] = key
    ghosts[at, 2] = step
    a[GHOST_TAIL] += 1
    a[NUM_KNOWN] += 1
    _drop_oldest(a, ghosts, log)


@compiled
def _segment(a: Ints, queue: Ints) -> Ints:
    """The slots stored at the current step, ascending."""
    mask = queue.shape[0] - 1
    slots = np.empty(a[QUEUE_TAIL] - a[SEGMENT], np.int64)
    for i in range(slots.size):
        slots[i] = queue[(a[SEGMENT] + i) & mask, 1]
    slots.sort()
    return slots


@compiled
def _evict(a: Ints, ghosts: Ints, log: Ints, slot: int, mode: int, step: int) -> None:
    _push_free(a, log, slot)
    remember(a, ghosts, log, a[a[GROUPS] + slot], mode, step)


@compiled
def _evict_oldest(a: Ints, queue: Ints, ghosts: Ints, log: Ints, count: int, step: int, mark: int) -> int:
    """Evict the first `count` slots in order of (step, slot) that do not bear `mark`; returns how many there were."""
    mask, left = queue.shape[0] - 1, count
    while left > 0 and a[QUEUE_HEAD] < a[SEGMENT]:
        at = a[QUEUE_HEAD] & mask
        a[QUEUE_HEAD] += 1
        # What is marked was stored at this step, and so does not count here.
        if a[a[STEPS] + queue[at, 1]] == queue[at, 0]:
            _evict(a, ghosts, log, queue[at, 1], LRU, step)
            left -= 1
    if left > 0:
        for slot in _segment(a, queue):
            if left > 0 and a[a[STEPS] + slot] == step and a[a[MARKS] + slot] != mark:
                _evict(a, ghosts, log, slot, LRU, step)
                left -= 1
    return count - left


@compiled
def _is_one_twice(groups: Ints) -> bool:
    size = 4
    while size < 2 * groups.size:
        size *= 2
    seen = np.full(size, NONE, np.int64)
    for group in groups:
        if group >= 0:
            h = np.int64((np.uint64(group) * _SPREAD) >> np.uint64(32)) & (size - 1)
            while seen[h] != NONE:
                if seen[h] == group:
                    return True
                h = (h + 1) & (size - 1)
            seen[h] = group
    return False


@compiled
def look_up(a: Ints, groups: Ints, cells: Ints, slots: Ints) -> int:
    """Write the slot of every group that is held and not at its first cell, else the capacity, into `slots`.

    Returns how many of those that are not at their first cell are not held; -1 if a group is there twice.
    """
    if _is_one_twice(groups):
        return NONE
    capacity, num_missing = a[CAPACITY], 0
    for i in range(groups.size):
        slots[i] = capacity
        if groups[i] >= 0 and cells[i] != 0:
            place = _find(a, groups[i])
            if place < capacity:
                slots[i] = place
            else:
                num_missing += 1
    return num_missing


@compiled
def _look_for_store(a: Ints, groups: Ints, is_dropped: NDArray[np.bool_], places: Ints) -> tuple[int, int, int]:
    """Write each group's place into `places`; returns how many are kept, how many of those are new, and how many are freed."""
    num_kept, num_new, num_freed = 0, 0, 0
    for i in range(groups.size):
        if groups[i] < 0:
            continue
        places[i] = _find(a, groups[i])
        is_held = places[i] < a[CAPACITY]
        if is_dropped[i]:
            num_freed += is_held
        else:
            num_kept += 1
            num_new += not is_held
    return num_kept, num_new, num_freed


@compiled
def _take_evicted(a: Ints, log: Ints, groups: Ints, cells: Ints, places: Ints) -> tuple[int, int]:
    """Forget that some of the groups were evicted; returns how many of those in mid-document, by each mode."""
    by_lru, by_stale = 0, 0
    for i in range(groups.size):
        if groups[i] >= 0 and places[i] > a[CAPACITY]:
            _forget(a, log, groups[i], places[i])
            a[NUM_KNOWN] -= 1
            if cells[i] != 0:
                if (places[i] - a[CAPACITY] - 1) % 2 == LRU:
                    by_lru += 1
                else:
                    by_stale += 1
            places[i] = a[CAPACITY]
    return by_lru, by_stale


@compiled
def _settle_known(
    a: Ints, log: Ints, groups: Ints, is_dropped: NDArray[np.bool_], slots: Ints, step: int, mark: int
) -> None:
    """Free the slots of the dropped groups, which are not written, and mark those of the others as stored now."""
    capacity = a[CAPACITY]
    for i in range(groups.size):
        if groups[i] < 0:
            slots[i] = capacity + 1
        elif is_dropped[i]:
            if slots[i] < capacity:
                _forget(a, log, groups[i], slots[i])
                _push_free(a, log, slots[i])
            slots[i] = capacity + 1
        elif slots[i] < capacity:
            _set(a, log, a[STEPS] + slots[i], step)
            a[a[MARKS] + slots[i]] = mark


@compiled
def store(
    a: Ints,
    queue: Ints,
    ghosts: Ints,
    log: Ints,
    groups: Ints,
    cells: Ints,
    is_dropped: NDArray[np.bool_],
    slots: Ints,
    step: int,
    mark: int,
) -> tuple[int, int, int, int, int]:
    """Place the rows of a micro-batch: `slots` says where to write them; see `Placement.store`.

    Returns (FITS, 0, evictions, false evictions of LRU, of stale), or what is wrong and the number needed; then nothing
    was changed.
    """
    if _is_one_twice(groups):
        return IS_TWICE, 0, 0, 0, 0
    capacity = a[CAPACITY]
    num_kept, num_new, num_freed = _look_for_store(a, groups, is_dropped, slots)
    if a[IS_LRU]:
        if num_kept > capacity:
            return BATCH_TOO_LARGE, num_kept, 0, 0, 0
    elif a[NUM_LIVE] - num_freed + num_new > capacity:
        return EXHAUSTED, a[NUM_LIVE] - num_freed + num_new, 0, 0, 0
    by_lru, by_stale = _take_evicted(a, log, groups, cells, slots)
    _settle_known(a, log, groups, is_dropped, slots, step, mark)
    num_evicted, overflow = 0, a[NUM_LIVE] + num_new - capacity
    if overflow > 0:
        num_evicted = _evict_oldest(a, queue, ghosts, log, overflow, step, mark)
    mask = queue.shape[0] - 1
    for i in range(groups.size):
        if slots[i] == capacity:
            a[NUM_FREE] -= 1
            a[NUM_LIVE] += 1
            slots[i] = a[a[FREE] + a[NUM_FREE]]
            _lead(a, log, groups[i], slots[i])
            _set(a, log, a[GROUPS] + slots[i], groups[i])
            _set(a, log, a[STEPS] + slots[i], step)
        if a[HAS_QUEUE] and slots[i] < capacity:
            queue[a[QUEUE_TAIL] & mask, 0] = step
            queue[a[QUEUE_TAIL] & mask, 1] = slots[i]
            a[QUEUE_TAIL] += 1
    return FITS, 0, num_evicted, by_lru, by_stale


@compiled
def begin_step(a: Ints, queue: Ints, step: int) -> None:
    """Order what the step before has stored."""
    mask = queue.shape[0] - 1
    if a[QUEUE_TAIL] > a[SEGMENT] and queue[a[SEGMENT] & mask, 0] != step:
        for slot in _segment(a, queue):
            queue[a[SEGMENT] & mask, 1] = slot
            a[SEGMENT] += 1


@compiled
def is_littered(a: Ints) -> bool:
    """Whether outdated entries are the greater part of a ring."""
    capacity = a[CAPACITY]
    queued, evicted = a[QUEUE_TAIL] - a[QUEUE_HEAD], a[GHOST_TAIL] - a[GHOST_HEAD]
    return bool(queued > 4 * capacity + 1024 or evicted > 2 * capacity + 1024)


@compiled
def compact(a: Ints, queue: Ints, ghosts: Ints) -> None:
    """Drop outdated entries from a ring where they are the greater part."""
    mask, capacity = queue.shape[0] - 1, a[CAPACITY]
    if a[QUEUE_TAIL] - a[QUEUE_HEAD] > 4 * capacity + 1024:
        end, segment = a[QUEUE_HEAD], a[SEGMENT]
        for i in range(a[QUEUE_HEAD], a[QUEUE_TAIL]):
            if i == segment:
                a[SEGMENT] = end
            if a[a[STEPS] + queue[i & mask, 1]] == queue[i & mask, 0]:
                queue[end & mask, 0] = queue[i & mask, 0]
                queue[end & mask, 1] = queue[i & mask, 1]
                end += 1
        if segment == a[QUEUE_TAIL]:
            a[SEGMENT] = end
        a[QUEUE_TAIL] = end
    if a[GHOST_TAIL] - a[GHOST_HEAD] > 2 * capacity + 1024:
        mask = ghosts.shape[0] - 1
        end = a[GHOST_HEAD]
        for i in range(a[GHOST_HEAD], a[GHOST_TAIL]):
            if _find(a, ghosts[i & mask, 0]) == ghosts[i & mask, 1]:
                ghosts[end & mask] = ghosts[i & mask]
                end += 1
        a[GHOST_TAIL] = end


@compiled
def sweep(a: Ints, queue: Ints, ghosts: Ints, log: Ints, cutoff: int, step: int) -> int:
    """Evict, as stale, every group stored last before step `cutoff`; returns how many."""
    mask, count = queue.shape[0] - 1, 0
    while a[QUEUE_HEAD] < a[SEGMENT] and queue[a[QUEUE_HEAD] & mask, 0] < cutoff:
        at = a[QUEUE_HEAD] & mask
        a[QUEUE_HEAD] += 1
        slot = queue[at, 1]
        if a[a[STEPS] + slot] == queue[at, 0]:
            _evict(a, ghosts, log, slot, STALE, step)
            count += 1
    return count


@compiled
def wipe(a: Ints, ghosts: Ints, log: Ints) -> None:
    """Free all slots and forget all that were evicted."""
    for slot in range(a[CAPACITY]):
        if a[a[STEPS] + slot] >= 0:
            _forget(a, log, a[a[GROUPS] + slot], slot)
            _push_free(a, log, slot)
    mask = ghosts.shape[0] - 1
    for i in range(a[GHOST_HEAD], a[GHOST_TAIL]):
        group, key = ghosts[i & mask, 0], ghosts[i & mask, 1]
        if _find(a, group) == key:
            _forget(a, log, group, key)
    a[GHOST_HEAD] = a[GHOST_TAIL]
    a[NUM_KNOWN] = 0


@compiled
def release(a: Ints, log: Ints, groups: Ints) -> None:
    """Free the slots of those of the distinct groups that are held."""
    for group in groups:
        place = _find(a, group)
        if place < a[CAPACITY]:
            _forget(a, log, group, place)
            _push_free(a, log, place)


@compiled
def undo(a: Ints, log: Ints, start: int) -> None:
    """Take back what was logged from `start` on; the head is left to the caller."""
    for n in range(a[LOG_LENGTH] - 1, start - 1, -1):
        if log[n, 0] >= 0:
            a[log[n, 0]] = log[n, 1]
        elif log[n, 2] == a[CAPACITY]:
            _erase_place(a, log[n, 1])
        else:
            _write_place(a, log[n, 1], log[n, 2])


@compiled
def fill(a: Ints, queue: Ints, groups: Ints, slots: Ints, steps: Ints, by_age: Ints) -> None:
    """Enter groups into an empty placement; `by_age` is their order by (step, slot). The free slots are the caller's."""
    for i in range(groups.size):
        _write_place(a, groups[i], slots[i])
        a[a[GROUPS] + slots[i]] = groups[i]
        a[a[STEPS] + slots[i]] = steps[i]
    a[NUM_LIVE] = groups.size
    if a[HAS_QUEUE]:
        for n in range(by_age.size):
            # The last step may go on.
            if n == 0 or steps[by_age[n]] != steps[by_age[n - 1]]:
                a[SEGMENT] = n
            queue[n, 0] = steps[by_age[n]]
            queue[n, 1] = slots[by_age[n]]
        a[QUEUE_TAIL] = by_age.size


@compiled
def known(a: Ints, ghosts: Ints) -> Ints:
    """Positions in the ring of the evicted groups that are known, oldest first."""
    mask = ghosts.shape[0] - 1
    positions = np.empty(a[NUM_KNOWN], np.int64)
    n = 0
    for i in range(a[GHOST_HEAD], a[GHOST_TAIL]):
        if _find(a, ghosts[i & mask, 0]) == ghosts[i & mask, 1]:
            positions[n] = i & mask
            n += 1
    return positions
