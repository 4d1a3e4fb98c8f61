"""The wipe modes: their names, their settings, and when they are due.

| mode | evicts |
|---|---|
| `none` | nothing |
| `full` | everything, every `wipe_every` steps |
| `lru` | the least recently stored groups, when more than `capacity` are live |
| `periodic_stale` | every `sweep_every` steps, the groups with `last_step < step - stale_threshold` |
"""

from __future__ import annotations

from typing import Literal, get_args

from trainer.errors import UserError

WipeMode = Literal["none", "full", "lru", "periodic_stale"]
WIPE_MODES: tuple[WipeMode, ...] = get_args(WipeMode)

EvictionMode = Literal["lru", "stale"]
EVICTION_MODES: tuple[EvictionMode, ...] = get_args(EvictionMode)


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
