"""The groups that were evicted lately: one that comes back in mid-document was evicted falsely."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from trainer.ledger.eviction import EvictionMode


class Ghost(NamedTuple):
    """How and when a group was evicted."""

    mode: EvictionMode
    step: int
    order: int
    """Number of the eviction; the lower, the longer ago."""


class RecentlyEvicted:
    """Evicted group -> how and when, at most `capacity` of them; the oldest are dropped first.

    `on_undo` is given the inverse of every change, to be called in reverse order; `restore_order` must follow.
    """

    def __init__(self, capacity: int, on_undo: Callable[[Callable[[], object]], None]) -> None:
        self._capacity = capacity
        self._on_undo = on_undo
        self._ghosts: OrderedDict[int, Ghost] = OrderedDict()
        self._next_order = 0

    def __len__(self) -> int:
        return len(self._ghosts)

    def items(self) -> Iterable[tuple[int, Ghost]]:
        """The groups and their ghosts, oldest first."""
        return self._ghosts.items()

    def add(self, groups: Iterable[int], mode: EvictionMode, step: int) -> None:
        """Note that `groups` were evicted by `mode` at `step`."""
        for group in groups:
            self._set(group, Ghost(mode, step, self._next_order))
            self._next_order += 1
        while len(self._ghosts) > self._capacity:
            self.pop(next(iter(self._ghosts)))

    def pop(self, group: int) -> EvictionMode | None:
        """Forget `group`; returns the mode that evicted it, None if it is not known."""
        ghost = self._ghosts.pop(group, None)
        if ghost is None:
            return None
        self._on_undo(lambda: self._ghosts.__setitem__(group, ghost))
        return ghost.mode

    def clear(self) -> None:
        """Forget all groups."""
        old = self._ghosts
        self._ghosts = OrderedDict()
        self._on_undo(lambda: setattr(self, "_ghosts", old))

    def reset(self) -> None:
        """Forget all groups, with nothing to undo."""
        self._ghosts = OrderedDict()
        self._next_order = 0

    def restore_order(self) -> None:
        """Sort by age again, after inverses have put groups back at the end."""
        self._ghosts = OrderedDict(sorted(self._ghosts.items(), key=lambda item: item[1].order))

    def _set(self, group: int, ghost: Ghost) -> None:
        self.pop(group)
        self._ghosts[group] = ghost
        self._on_undo(lambda: self._ghosts.pop(group))
