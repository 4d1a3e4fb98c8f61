"""Which slots were stored least recently: buckets of slots by step, in amortised constant time per stored slot.

A slot that is stored again is not taken out of its old bucket. An entry counts only while the slot's `last_step` is
still the bucket's step, so the old entry is dropped when its bucket is reached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Bucket(NamedTuple):
    """Distinct slots that were stored at one step; a step may have several buckets next to each other."""

    step: int
    slots: Ints
    is_sorted: bool


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
        self._buckets: deque[Bucket] = deque()
        self._num_entries = 0

    def __len__(self) -> int:
        """Number of entries held, those that no longer count included."""
        return self._num_entries

    def add(self, step: int, slots: Ints) -> None:
        """Note that `slots` were stored at `step`, which is not before any step added so far."""
        if not slots.size:
            return
        self._buckets.append(Bucket(step, slots, is_sorted=False))
        self._num_entries += slots.size
        if self._on_change is not None:
            self._on_change(self._undo_add)

    def take_oldest(self, count: int, pinned: Ints) -> Ints:
        """Remove and return the `count` first slots in order of (step, slot), or as many as there are.

        `pinned` slots, all of which were stored at the newest step, are passed over and stay.
        """
        taken: list[Ints] = []
        kept: list[Bucket] = []
        while count > 0 and self._buckets:
            bucket, removed = self._pop_step()
            chosen, rest = self._choose(bucket, count, pinned)
            taken.append(chosen)
            count -= chosen.size
            if rest.size:
                kept.append(Bucket(bucket.step, rest, is_sorted=True))
            self._num_entries -= sum(b.slots.size for b in removed) - rest.size
            self._log_removal(removed)
        self._put_back(kept)
        return _joined(taken)

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
        while self._buckets and self._buckets[0].step < cutoff:
            bucket, removed = self._pop_step()
            taken.append(bucket.slots[self._last_step[bucket.slots] == bucket.step])
            self._num_entries -= sum(b.slots.size for b in removed)
            self._log_removal(removed)
        return _joined(taken)

    def rebuild(self) -> None:
        """Forget every entry that no longer counts. Not undone: call it where nothing is left to undo."""
        live = np.flatnonzero(self._last_step >= 0)
        slots = live[np.argsort(self._last_step[live], kind="stable")]
        steps, starts = np.unique(self._last_step[slots], return_index=True)
        bounds = pairwise([*starts.tolist(), slots.size])
        runs = zip(steps.tolist(), bounds, strict=True)
        self._buckets = deque(Bucket(step, slots[a:b], is_sorted=True) for step, (a, b) in runs)
        self._num_entries = slots.size

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
                self._num_entries += sum(b.slots.size for b in removed)

            self._on_change(undo)

    def _put_back(self, kept: list[Bucket]) -> None:
        self._buckets.extendleft(reversed(kept))
        if self._on_change is not None and kept:

            def undo() -> None:
                for _ in kept:
                    self._num_entries -= self._buckets.popleft().slots.size

            self._on_change(undo)

    def _undo_add(self) -> None:
        self._num_entries -= self._buckets.pop().slots.size


def _joined(parts: list[Ints]) -> Ints:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
