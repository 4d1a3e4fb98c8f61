"""The groups that were evicted lately: one that comes back in mid-document was evicted falsely."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice, repeat
from typing import NamedTuple

from trainer.ledger.eviction import EVICTION_MODES, EvictionMode
from trainer.ledger.journal import Journal

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

    A batch has a key above `capacity`, no two the same: `capacity` + 1, plus its number times the number of modes, plus
    the index of its mode. A group that is taken stays in its batch, and counts for nothing there, since it leads to
    something else by then or to nothing.

    Args:
        capacity: most groups known.
        place_of: where group -> key is kept, among what others keep there, which is `capacity` at most.
        journal: of the changes.
    """

    def __init__(self, capacity: int, place_of: dict[int, int], journal: Journal) -> None:
        self._capacity = capacity
        self._place_of = place_of
        self._journal = journal
        self._next_number = 0
        self._batches: deque[Batch] = deque()
        self._at = 0  # groups of the first batch that were dropped
        self.num_known = 0
        self.num_entries = 0  # groups in the batches, those that were taken included, those that were dropped not

    def items(self) -> Iterator[tuple[int, Ghost]]:
        """The groups and their ghosts, oldest first."""
        at = self._at
        for key, step, groups in self._batches:
            for group in islice(groups, at, None):
                if self._place_of.get(group) == key:
                    yield group, Ghost(self.mode_of(key), step)
            at = 0

    def mode_of(self, key: int) -> EvictionMode:
        """What evicted the groups of a batch."""
        return EVICTION_MODES[(key - self._capacity - 1) % _NUM_MODES]

    def add(self, groups: list[int], mode: EvictionMode, step: int) -> None:
        """Note that `groups`, none of them known, were evicted by `mode` at `step`."""
        if not groups:
            return
        key = self._capacity + 1 + self._next_number * _NUM_MODES + EVICTION_MODES.index(mode)
        self._next_number += 1
        self._place_of.update(zip(groups, repeat(key)))
        self._batches.append(Batch(key, step, groups))
        self.num_known += len(groups)
        self.num_entries += len(groups)
        if self._journal.is_kept:
            self._journal.add(self._undo_add)
        if self.num_known > self._capacity:
            self._drop_oldest()

    def take(self, groups: list[int], keys: list[int]) -> None:
        """Forget `groups`, which are known by `keys`."""
        for group in groups:
            del self._place_of[group]
        self.num_known -= len(groups)
        if self._journal.is_kept:
            self._journal.add(lambda: self._bring_back(groups, keys))

    def clear(self) -> None:
        """Forget all groups."""
        for key, _, groups in self._batches:
            known = [group for group in groups if self._place_of.get(group) == key]
            self.take(known, [key] * len(known))
        old = self._batches, self._at, self.num_entries
        self.reset()
        if self._journal.is_kept:
            self._journal.add(lambda: self._set(*old))

    def reset(self) -> None:
        """Forget all batches, of which nothing is left in `place_of`; with nothing to undo."""
        self._set(deque(), 0, 0)
        self.num_known = 0

    @property
    def is_littered(self) -> bool:
        """Whether what was left behind is the greater part."""
        return self.num_entries > 2 * self._capacity + 1024

    def compact(self) -> None:
        """Drop what was left behind. Not undone: call it where nothing is left to undo."""
        batches: deque[Batch] = deque()
        # A dropped group has no key, or one of a later batch: it does not come back here.
        for key, step, groups in self._batches:
            if alive := [group for group in groups if self._place_of.get(group) == key]:
                batches.append(Batch(key, step, alive))
        self._set(batches, 0, self.num_known)

    def _drop_oldest(self) -> None:
        """Drop the oldest groups until no more are known than may be."""
        place_of, batches, before = self._place_of, self._batches, (self._at, self.num_entries)
        gone: list[Batch] = []
        dropped: list[tuple[int, int]] = []
        excess = self.num_known - self._capacity
        while excess > 0:
            key, _, groups = batches[0]
            tried = groups[self._at : self._at + excess]
            alive = [group for group in tried if place_of.get(group) == key]
            for group in alive:
                del place_of[group]
            excess -= len(alive)
            self._at += len(tried)
            self.num_known -= len(alive)
            self.num_entries -= len(tried)
            if self._at == len(groups):
                gone.append(batches.popleft())
                self._at = 0
            if self._journal.is_kept:
                dropped.extend((group, key) for group in alive)
        if self._journal.is_kept:
            self._journal.add(lambda: self._undo_drop(gone, dropped, before))

    def _undo_add(self) -> None:
        key, _, groups = self._batches.pop()
        for group in groups:
            if self._place_of.get(group) == key:
                del self._place_of[group]
        self.num_known -= len(groups)
        self.num_entries -= len(groups)
        self._next_number -= 1

    def _undo_drop(self, gone: list[Batch], dropped: list[tuple[int, int]], before: tuple[int, int]) -> None:
        self._batches.extendleft(reversed(gone))
        self._at, self.num_entries = before
        self._bring_back([group for group, _ in dropped], [key for _, key in dropped])

    def _bring_back(self, groups: list[int], keys: list[int]) -> None:
        self._place_of.update(zip(groups, keys, strict=True))
        self.num_known += len(groups)

    def _set(self, batches: deque[Batch], at: int, num_entries: int) -> None:
        self._batches, self._at, self.num_entries = batches, at, num_entries
