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

    def items(self) -> Iterable[tuple[int, Ghost]]:
        """The groups and their ghosts, oldest first."""
        return self._ghosts.items()

    def add(self, groups: list[int], mode: EvictionMode, step: int) -> None:
        """Note that `groups`, none of them known, were evicted by `mode` at `step`."""
        ghosts = self._ghosts
        for order, group in enumerate(groups, start=self._next_order):
            ghosts[group] = Ghost(mode, step, order)
        self._next_order += len(groups)
        self._on_undo(lambda: [self._ghosts.pop(group) for group in groups])
        dropped = [ghosts.popitem(last=False) for _ in range(len(ghosts) - self._capacity)]
        if dropped:
            self._on_undo(lambda: self._ghosts.update(dropped))

    def take(self, groups: list[int]) -> list[tuple[int, EvictionMode]]:
        """Forget those of `groups` that are known; returns their positions and what evicted them."""
        ghosts = self._ghosts
        if not ghosts:
            return []
        known = [(i, group, ghosts.pop(group)) for i, group in enumerate(groups) if group in ghosts]
        if known:
            self._on_undo(lambda: self._ghosts.update((group, ghost) for _, group, ghost in known))
        return [(i, ghost.mode) for i, _, ghost in known]

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
