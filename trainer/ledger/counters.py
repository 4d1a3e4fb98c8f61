"""The ledger's numbers: their keys, and counters that can be drained and rolled back."""

from __future__ import annotations

from collections.abc import Mapping

COUNTER_KEYS = (
    "ledger/evictions/lru",
    "ledger/evictions/stale",
    "ledger/false_evictions/lru",
    "ledger/false_evictions/stale",
    "ledger/cold_starts",
    "ledger/refused_rows",
    "ledger_wipe_count",
)
"""Summed over the window and over ranks (with the worst rank beside, as `<key>_max`)."""

GAUGE_KEYS = ("ledger/live_groups", "ledger/fill_fraction")

_NONE = dict.fromkeys(COUNTER_KEYS, 0)


class Counters:
    """Counts per key since the last drain and since the step began."""

    def __init__(self) -> None:
        self._total = _NONE.copy()
        self._step = _NONE.copy()
        self._undrained = _NONE.copy()
        # Of the step before, while that can be rolled back too.
        self._before = _NONE.copy()

    def add(self, key: str, count: int) -> None:
        """Count `count` more of `key`."""
        if count:
            self._total[key] += count
            self._step[key] += count
            self._undrained[key] += count

    def begin_step(self, *, keeps_previous: bool = False) -> None:
        """Start a step: what is counted from here on can be rolled back, and then, if wanted, the step before."""
        self._before = self._undrained if keeps_previous else _NONE.copy()
        self._step = _NONE.copy()
        self._undrained = _NONE.copy()

    def roll_back(self) -> None:
        """Forget what was counted since the step began, but for what was drained already."""
        for key, count in self._undrained.items():
            self._total[key] -= count
        before = self._before
        self.begin_step()
        self._undrained = before

    def confirm(self) -> None:
        """The step before can no longer be rolled back."""
        self._before = _NONE.copy()

    def step(self) -> Mapping[str, float]:
        """The counts since the step began, drained or not."""
        return {key: float(count) for key, count in self._step.items()}

    def undrained(self) -> dict[str, int]:
        """The counts since the last drain, which go on."""
        return dict(self._total)

    def load(self, counts: Mapping[str, int]) -> None:
        """Go on from `undrained`; nothing of it can be rolled back."""
        self._total = {**_NONE, **counts}
        self.begin_step()

    def drain(self) -> dict[str, float]:
        """The counts since the last drain, which start again from zero."""
        drained = {key: float(count) for key, count in self._total.items()}
        self._total = _NONE.copy()
        self._undrained = _NONE.copy()
        self._before = _NONE.copy()
        return drained
