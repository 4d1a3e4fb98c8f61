"""The groups that were evicted lately: one that comes back in mid-document was evicted falsely."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice, repeat
from typing import NamedTuple

from trainer.ledger.eviction import EVICTION_MODES, EvictionMode

_NUM_MODES = len(EVICTION_MODES)


class Ghost(NamedTuple):
    """How and when a group was evicted."""

    mode: EvictionMode
    step: int


class Batch(NamedTuple):
    """The groups that were evicted together, in order of eviction."""

    key: int
    step: int
    groups: list[int]


class RecentlyEvicted:
    """Evicted group -> how and when, at most `capacity` of them; the oldest are dropped first.

    `on_undo` is given the inverse of every change, to be called in reverse order; None keeps no inverses.

    The key of a batch is its number times the number of modes, plus the index of the mode; no two are the same. A group
    that is taken stays in its batch, and counts for nothing there, since it has another key by then or none.
    """

    def __init__(self, capacity: int, on_undo: Callable[[Callable[[], object]], None] | None) -> None:
        self._capacity = capacity
        self._on_undo = on_undo
        self._next_number = 0
        self._key_of: dict[int, int] = {}
        self._batches: deque[Batch] = deque()
        self._at = 0  # groups of the first batch that were dropped
        self.num_entries = 0  # groups in the batches, those that were taken included, those that were dropped not

    def __contains__(self, group: int) -> bool:
        return group in self._key_of

    def items(self) -> Iterator[tuple[int, Ghost]]:
        """The groups and their ghosts, oldest first."""
        at = self._at
        for key, step, groups in self._batches:
            for group in islice(groups, at, None):
                if self._key_of.get(group) == key:
                    yield group, Ghost(EVICTION_MODES[key % _NUM_MODES], step)
            at = 0

    def add(self, groups: list[int], mode: EvictionMode, step: int) -> None:
        """Note that `groups`, none of them known, were evicted by `mode` at `step`."""
        if not groups:
            return
        key = self._next_number * _NUM_MODES + EVICTION_MODES.index(mode)
        self._next_number += 1
        self._key_of.update(zip(groups, repeat(key)))
        self._batches.append(Batch(key, step, groups))
        self.num_entries += len(groups)
        if self._on_undo is not None:
            self._on_undo(self._undo_add)
        if len(self._key_of) > self._capacity:
            self._drop_oldest()

    def take(self, groups: list[int]) -> list[tuple[int, EvictionMode]]:
        """Forget those of `groups` that are known; returns their positions and what evicted them."""
        key_of = self._key_of
        if not key_of:
            return []
        keys = list(map(key_of.pop, groups, repeat(-1)))
        taken = [(place, EVICTION_MODES[key % _NUM_MODES]) for place, key in enumerate(keys) if key >= 0]
        if self._on_undo is not None and taken:
            self._on_undo(lambda: key_of.update((groups[place], keys[place]) for place, _ in taken))
        return taken

    def clear(self) -> None:
        """Forget all groups."""
        old = self._key_of, self._batches, self._at, self.num_entries
        self.reset()
        if self._on_undo is not None:
            self._on_undo(lambda: self._set(*old))

    def reset(self) -> None:
        """Forget all groups, with nothing to undo."""
        self._set({}, deque(), 0, 0)

    def compact(self) -> None:
        """Drop what was left behind, if that is the greater part. Not undone: call it where nothing is left to undo."""
        if self.num_entries > 2 * self._capacity + 1024:
            batches: deque[Batch] = deque()
            # A dropped group has no key, or one of a later batch: it does not come back here.
            for key, step, groups in self._batches:
                if alive := [group for group in groups if self._key_of.get(group) == key]:
                    batches.append(Batch(key, step, alive))
            self._set(self._key_of, batches, 0, len(self._key_of))

    def _drop_oldest(self) -> None:
        """Drop the oldest groups until no more are known than may be."""
        key_of, batches, before = self._key_of, self._batches, (self._at, self.num_entries)
        gone: list[Batch] = []
        dropped: list[tuple[int, int]] = []
        excess = len(key_of) - self._capacity
        while excess > 0:
            key, _, groups = batches[0]
            tried = groups[self._at : self._at + excess]
            alive = [group for group in tried if key_of.get(group) == key]
            for group in alive:
                del key_of[group]
            excess -= len(alive)
            self._at += len(tried)
            self.num_entries -= len(tried)
            if self._at == len(groups):
                gone.append(batches.popleft())
                self._at = 0
            if self._on_undo is not None:
                dropped.extend((group, key) for group in alive)
        if self._on_undo is not None:
            self._on_undo(lambda: self._undo_drop(gone, dropped, before))

    def _undo_add(self) -> None:
        batch = self._batches.pop()
        for group in batch.groups:
            del self._key_of[group]
        self.num_entries -= len(batch.groups)
        self._next_number -= 1

    def _undo_drop(self, gone: list[Batch], dropped: list[tuple[int, int]], before: tuple[int, int]) -> None:
        self._batches.extendleft(reversed(gone))
        self._at, self.num_entries = before
        self._key_of.update(dropped)

    def _set(self, key_of: dict[int, int], batches: deque[Batch], at: int, num_entries: int) -> None:
        self._key_of, self._batches, self._at, self.num_entries = key_of, batches, at, num_entries
