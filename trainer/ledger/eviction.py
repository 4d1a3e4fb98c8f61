"""The wipe modes: their names, their settings, when they are due, and the groups that they evicted recently.

| mode | evicts |
|---|---|
| `none` | nothing |
| `full` | everything, every `wipe_every` steps |
| `lru` | the least recently stored groups, when more than `capacity` are live |
| `periodic_stale` | every `sweep_every` steps, the groups with `last_step < step - stale_threshold` |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Literal, get_args

from trainer.errors import UserError

WipeMode = Literal["none", "full", "lru", "periodic_stale"]
WIPE_MODES: tuple[WipeMode, ...] = get_args(WipeMode)

# Checkpoints store the position of a mode here: append a new one.
EvictionMode = Literal["lru", "stale"]
EVICTION_MODES: tuple[EvictionMode, ...] = get_args(EvictionMode)

Evicted = tuple[EvictionMode, int]
"""How a group was evicted, and at which step."""


def check_settings(*, wipe_mode: str, capacity: int, stale_threshold: int, sweep_every: int, wipe_every: int) -> None:
    """Raise a `UserError` for a setting that is out of range for the mode."""
    if wipe_mode not in WIPE_MODES:
        raise UserError("ledger.wipe_mode", f"must be one of {', '.join(WIPE_MODES)}, got {wipe_mode!r}")
    if capacity < 1:
        raise UserError("ledger.capacity", f"must be >= 1, got {capacity}")
    if wipe_mode == "full" and wipe_every < 1:
        raise UserError("ledger.wipe_every", f"must be >= 1 with wipe_mode full, got {wipe_every}")
    if wipe_mode == "periodic_stale" and sweep_every < 1:
        raise UserError("ledger.sweep_every", f"must be >= 1 with wipe_mode periodic_stale, got {sweep_every}")
    if wipe_mode == "periodic_stale" and stale_threshold < 1:
        raise UserError("ledger.stale_threshold", f"must be >= 1 with wipe_mode periodic_stale, got {stale_threshold}")


def is_due(step: int, previous_step: int, every: int) -> bool:
    """Whether an action with interval `every` is due at `step`, when the last step begun was `previous_step`.

    It is due if a multiple of `every` lies in (previous_step, step]: a step that is never begun delays the action
    instead of losing it.
    """
    return step // every > previous_step // every


class EvictedGroups:
    """The groups evicted recently that have not come back; of more than `capacity` the oldest are forgotten.

    A queue tells which are the oldest. A group that comes back stays in it: an entry counts only while `entries` still
    holds the very tuple that the entry's groups were added with.
    """

    def __init__(self, capacity: int) -> None:
        self.entries: dict[int, Evicted] = {}
        """Oldest first. Whoever finds a group here may delete it."""
        self._capacity = capacity
        # Groups that were evicted together, the oldest last.
        self._queue: deque[tuple[Evicted, list[int]]] = deque()
        self._num_queued = 0

    def add(self, groups: Iterable[int], mode: EvictionMode, step: int) -> None:
        """Remember groups, none of them known, that were evicted at `step`."""
        evicted = (mode, step)
        known = dict.fromkeys(groups, evicted)
        self.entries.update(known)
        self._queue.append((evicted, list(reversed(known))))
        self._num_queued += len(known)
        while len(self.entries) > self._capacity:
            self._forget_oldest()
        if self._num_queued > 2 * self._capacity + 1024:
            self._queue = deque((evicted, [group]) for group, evicted in self.entries.items())
            self._num_queued = len(self._queue)

    def clear(self) -> None:
        """Forget all groups."""
        self.entries.clear()
        self._queue.clear()
        self._num_queued = 0

    def _forget_oldest(self) -> None:
        """Take one group out of the queue, and forget it if it has not come back."""
        evicted, groups = self._queue[0]
        if not groups:
            self._queue.popleft()
            return
        group = groups.pop()
        self._num_queued -= 1
        if self.entries.get(group) is evicted:
            del self.entries[group]
