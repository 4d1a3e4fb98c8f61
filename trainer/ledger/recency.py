"""Which slots were stored least recently: buckets of slots by step, in amortised constant time per stored slot.

A slot that is stored again is not taken out of its old bucket. An entry counts only while the slot's `last_step` is
still the bucket's step, so the old entry is dropped when its bucket is reached. Buckets are reached many at a time: what
counts in the oldest of them is sorted into the front, from which slots are then taken a few at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

# Entries that are sorted into the front together: enough to share out the cost of a dozen array operations.
FRONT_ENTRIES = 2048
# Most steps that they may span: a sort key is a step of the span times the number of slots, plus the slot.
FRONT_SPAN = 1 << 20


class Bucket(NamedTuple):
    """Distinct slots that were stored at one step; a step may have several buckets next to each other."""

    step: int
    slots: Ints
    is_sorted: bool


class Front(NamedTuple):
    """The oldest slots, in order of (step, slot); every bucket is of a later step than all of them."""

    slots: Ints
    steps: Ints


_EMPTY = np.empty(0, np.int64)
_NO_FRONT = Front(_EMPTY, _EMPTY)


class RecencyBuckets:
    """Slots ordered by (step of the last store, slot).

    Args:
        last_step: the step of each slot's last store, -1 where the slot is free; shared with and kept by the owner of
            this object, which writes a slot's step before it adds the slot.
        on_change: given the inverse of every change, to be called in reverse order to undo; None keeps no inverses.
    """

    def __init__(self, last_step: Ints, on_change: Callable[[Callable[[], object]], None] | None = None) -> None:
        self._last_step = last_step
        self._on_change = on_change
        self._front = _NO_FRONT
        self._at = 0  # what lies before this in the front was taken
        self._buckets: deque[Bucket] = deque()
        self._num_in_buckets = 0

    def __len__(self) -> int:
        """Number of entries held, those that no longer count included."""
        return self._num_in_buckets + self._front.slots.size - self._at

    def add(self, step: int, slots: Ints) -> None:
        """Note that `slots` were stored at `step`, which is not before any step added so far."""
        if not slots.size:
            return
        self._buckets.append(Bucket(step, slots, False))
        self._num_in_buckets += slots.size
        if self._on_change is not None:
            self._on_change(self._undo_add)

    def take_oldest(self, count: int, pinned: Ints) -> Ints:
        """Remove and return the `count` first slots in order of (step, slot), or as many as there are.

        `pinned` slots, all of which were stored at the newest step, are passed over and stay.
        """
        taken: list[Ints] = []
        buckets = self._buckets
        while count > 0:
            if self._at < self._front.slots.size:
                taken.append(self._take_front(count))
                count -= taken[-1].size
            elif buckets and buckets[0].step < buckets[-1].step:
                self._refill_front()
            else:
                # What is added next may be of the last step too: its slots cannot be sorted for good.
                if buckets:
                    taken.append(self._take_newest(count, pinned))
                break
        return _joined(taken)

    def _take_front(self, count: int) -> Ints:
        """Remove and return at most `count` of the first slots in the front."""
        (slots, steps), at = self._front, self._at
        stop = at + count + count // 2 + 8  # some of them no longer count
        piece = slots[at:stop]
        counts = (self._last_step[piece] == steps[at:stop]).nonzero()[0]
        if counts.size > count:
            counts = counts[:count]
            self._move_front(self._front, at + int(counts[-1]) + 1)
        else:
            self._move_front(self._front, min(stop, slots.size))
        chosen: Ints = piece[counts]
        return chosen

    def _refill_front(self) -> None:
        """Sort the entries that count of the oldest buckets, none of them of the last step, into the empty front."""
        buckets = self._buckets
        first, newest = buckets[0].step, buckets[-1].step
        removed = [buckets.popleft()]
        size = removed[0].slots.size
        while (step := buckets[0].step) < newest and (
            step == removed[-1].step or (size < FRONT_ENTRIES and step - first < FRONT_SPAN)
        ):
            removed.append(buckets.popleft())
            size += removed[-1].slots.size
        self._num_in_buckets -= size
        self._log_removal(removed)
        slots = _joined([bucket.slots for bucket in removed])
        steps = np.repeat([bucket.step for bucket in removed], [bucket.slots.size for bucket in removed])
        counts = self._last_step[slots] == steps
        slots, steps = slots[counts], steps[counts]
        if len(removed) > 1 or not removed[0].is_sorted:
            num_slots = self._last_step.size
            # A slot may be twice in one step: stored by two micro-batches, or freed in between.
            keys = np.unique((steps - first) * num_slots + slots)
            steps, slots = np.divmod(keys, num_slots)
            steps += first
        self._move_front(Front(slots, steps), 0)

    def _move_front(self, front: Front, at: int) -> None:
        if self._on_change is not None:
            old = self._front, self._at
            self._on_change(lambda: self._set_front(*old))
        self._set_front(front, at)

    def _set_front(self, front: Front, at: int) -> None:
        self._front, self._at = front, at

    def _take_newest(self, count: int, pinned: Ints) -> Ints:
        """Remove and return at most `count` of the first slots of the only step that has buckets."""
        bucket, removed = self._pop_step()
        chosen, rest = self._choose(bucket, count, pinned)
        self._num_in_buckets -= sum(b.slots.size for b in removed)
        self._log_removal(removed)
        if rest.size:
            self._buckets.append(Bucket(bucket.step, rest, is_sorted=True))
            self._num_in_buckets += rest.size
            if self._on_change is not None:
                self._on_change(self._undo_add)
        return chosen

    def _choose(self, bucket: Bucket, count: int, pinned: Ints) -> tuple[Ints, Ints]:
        """The first `count` slots of a sorted bucket that count and are not pinned, and what must stay."""
        can_be_pinned = pinned.size > 0 and self._last_step[pinned[0]] == bucket.step
        if not can_be_pinned and bucket.slots.size <= max(64, 2 * count):
            valid = bucket.slots[self._last_step[bucket.slots] == bucket.step]
            return valid[:count], valid[count:]
        # A long bucket is searched from its front in pieces, so that taking few of many stays cheap.
        position = 0
        chosen: list[Ints] = []
        passed: list[Ints] = []
        while count > 0 and position < bucket.slots.size:
            piece = bucket.slots[position : position + max(64, 2 * count)]
            valid = piece[self._last_step[piece] == bucket.step]
            is_pinned = np.isin(valid, pinned) if can_be_pinned else np.zeros(valid.size, np.bool_)
            free = valid[~is_pinned]
            if free.size > count:
                # Look no further than the last slot chosen: the rest of the piece stays as it is.
                free = free[:count]
                piece = piece[: int(np.searchsorted(piece, free[-1])) + 1]
            passed.append(valid[is_pinned & (valid <= piece[-1])])
            chosen.append(free)
            count -= free.size
            position += piece.size
        rest = bucket.slots[position:]
        if any(part.size for part in passed):
            rest = np.concatenate([*passed, rest])
        return np.concatenate(chosen), rest

    def take_before(self, cutoff: int) -> Ints:
        """Remove and return all slots whose step is before `cutoff`, in order of (step, slot)."""
        taken: list[Ints] = []
        (slots, steps), at = self._front, self._at
        stop = int(np.searchsorted(steps, cutoff))
        if stop > at:
            taken.append(slots[at:stop][self._last_step[slots[at:stop]] == steps[at:stop]])
            self._move_front(self._front, stop)
        while self._buckets and self._buckets[0].step < cutoff:
            bucket, removed = self._pop_step()
            taken.append(bucket.slots[self._last_step[bucket.slots] == bucket.step])
            self._num_in_buckets -= sum(b.slots.size for b in removed)
            self._log_removal(removed)
        return _joined(taken)

    def rebuild(self) -> None:
        """Forget every entry that no longer counts. Not undone: call it where nothing is left to undo."""
        live = np.flatnonzero(self._last_step >= 0)
        slots = live[np.argsort(self._last_step[live], kind="stable")]
        steps = self._last_step[slots]
        # The last step may go on, so it stays a bucket.
        num_older = int(np.searchsorted(steps, steps[-1])) if steps.size else 0
        self._set_front(Front(slots[:num_older], steps[:num_older]), 0)
        self._buckets = deque()
        self._num_in_buckets = slots.size - num_older
        if slots.size:
            self._buckets.append(Bucket(int(steps[-1]), slots[num_older:], is_sorted=True))

    def _pop_step(self) -> tuple[Bucket, list[Bucket]]:
        """Remove all buckets of the first step; returns them as one sorted bucket, and as they were."""
        removed = [self._buckets.popleft()]
        step = removed[0].step
        while self._buckets and self._buckets[0].step == step:
            removed.append(self._buckets.popleft())
        if len(removed) == 1:
            bucket = removed[0]
            return bucket if bucket.is_sorted else Bucket(step, np.sort(bucket.slots), is_sorted=True), removed
        return Bucket(step, np.unique(np.concatenate([b.slots for b in removed])), is_sorted=True), removed

    def _log_removal(self, removed: list[Bucket]) -> None:
        if self._on_change is not None:

            def undo() -> None:
                self._buckets.extendleft(reversed(removed))
                self._num_in_buckets += sum(b.slots.size for b in removed)

            self._on_change(undo)

    def _undo_add(self) -> None:
        self._num_in_buckets -= self._buckets.pop().slots.size


def _joined(parts: list[Ints]) -> Ints:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else _EMPTY
