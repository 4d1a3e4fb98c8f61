"""The groups that were evicted lately: one that comes back in mid-document was evicted falsely."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import compress, repeat
from typing import NamedTuple

from trainer.ledger.eviction import EVICTION_MODES, EvictionMode

_NUM_MODES = len(EVICTION_MODES)


class Ghost(NamedTuple):
    """How and when a group was evicted."""

    mode: EvictionMode
    step: int


class RecentlyEvicted:
    """Evicted group -> how and when, at most `capacity` of them; the oldest are dropped first.

    `on_undo` is given the inverse of every change, to be called in reverse order; None keeps no inverses.

    The key of an eviction is its number times the number of modes, plus the index of the mode; no two are the same.
    Three queues hold group, key and step of all evictions, oldest first. A group that is taken leaves its entry in them
    behind, which counts for nothing, since the group has another key by then or none.
    """

    def __init__(self, capacity: int, on_undo: Callable[[Callable[[], object]], None] | None) -> None:
        self._capacity = capacity
        self._on_undo = on_undo
        self._next_number = 0
        self._key_of: dict[int, int] = {}
        self._groups: deque[int] = deque()
        self._keys: deque[int] = deque()
        self._steps: deque[int] = deque()

    def __contains__(self, group: int) -> bool:
        return group in self._key_of

    def items(self) -> Iterator[tuple[int, Ghost]]:
        """The groups and their ghosts, oldest first."""
        for group, key, step in zip(self._groups, self._keys, self._steps, strict=True):
            if self._key_of.get(group) == key:
                yield group, Ghost(EVICTION_MODES[key % _NUM_MODES], step)

    def add(self, groups: list[int], mode: EvictionMode, step: int) -> None:
        """Note that `groups`, none of them known, were evicted by `mode` at `step`."""
        first = self._next_number * _NUM_MODES + EVICTION_MODES.index(mode)
        keys = range(first, first + _NUM_MODES * len(groups), _NUM_MODES)
        self._key_of.update(zip(groups, keys, strict=True))
        self._groups.extend(groups)
        self._keys.extend(keys)
        self._steps.extend(repeat(step, len(groups)))
        self._next_number += len(groups)
        if self._on_undo is not None:
            self._on_undo(lambda: self._undo_add(groups))
        if len(self._key_of) > self._capacity:
            self._drop_oldest()

    def take(self, groups: list[int]) -> list[tuple[int, EvictionMode]]:
        """Forget those of `groups` that are known; returns their positions and what evicted them."""
        key_of = self._key_of
        if key_of.keys().isdisjoint(groups):
            return []
        places = list(compress(range(len(groups)), map(key_of.__contains__, groups)))
        known = [groups[place] for place in places]
        keys = list(map(key_of.pop, known))
        if self._on_undo is not None:
            self._on_undo(lambda: key_of.update(zip(known, keys, strict=True)))
        return [(place, EVICTION_MODES[key % _NUM_MODES]) for place, key in zip(places, keys, strict=True)]

    def clear(self) -> None:
        """Forget all groups."""
        old = self._key_of, self._groups, self._keys, self._steps
        self.reset()
        if self._on_undo is not None:
            self._on_undo(lambda: self._set(*old))

    def reset(self) -> None:
        """Forget all groups, with nothing to undo."""
        self._set({}, deque(), deque(), deque())

    def compact(self) -> None:
        """Drop what was left behind, if that is the greater part. Not undone: call it where nothing is left to undo."""
        if len(self._keys) > 2 * self._capacity + 1024:
            is_alive = [self._key_of.get(group) == key for group, key in zip(self._groups, self._keys, strict=True)]
            self._groups = deque(compress(self._groups, is_alive))
            self._keys = deque(compress(self._keys, is_alive))
            self._steps = deque(compress(self._steps, is_alive))

    def _drop_oldest(self) -> None:
        key_of, removed = self._key_of, []
        while len(key_of) > self._capacity:
            group, key, step = self._groups.popleft(), self._keys.popleft(), self._steps.popleft()
            is_alive = key_of.get(group) == key
            if is_alive:
                del key_of[group]
            removed.append((group, key, step, is_alive))
        if self._on_undo is not None:
            self._on_undo(lambda: self._undo_drop(removed))

    def _undo_add(self, groups: list[int]) -> None:
        for group in groups:
            del self._key_of[group]
            self._groups.pop()
            self._keys.pop()
            self._steps.pop()
        self._next_number -= len(groups)

    def _undo_drop(self, removed: list[tuple[int, int, int, bool]]) -> None:
        for group, key, step, was_alive in reversed(removed):
            self._groups.appendleft(group)
            self._keys.appendleft(key)
            self._steps.appendleft(step)
            if was_alive:
                self._key_of[group] = key

    def _set(self, key_of: dict[int, int], groups: deque[int], keys: deque[int], steps: deque[int]) -> None:
        self._key_of, self._groups, self._keys, self._steps = key_of, groups, keys, steps
