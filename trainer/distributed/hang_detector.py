"""Which rank the others wait for, or which ranks make no progress, from the heartbeats of all."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Heartbeat:
    """The last message of a rank."""

    collectives: int
    """Collectives entered since the process group began."""
    activity: str
    """What the main thread is doing."""
    progress: int
    """Heartbeats with progress since the one before."""
    is_asked: bool
    """Whether the rank was asked to stop."""
    count: int
    """Number of this heartbeat."""


class HangDetector:
    """Finds the rank that the others wait for, or the ranks that all make no progress.

    Args:
        limit_sec: duration from which a wait counts as a hang.
        grace_sec: duration from which it does once any rank was asked to stop, if all that could end it wait.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        world_size: int,
        limit_sec: float,
        grace_sec: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit, self._grace = limit_sec, grace_sec
        self._clock = clock
        self._last: list[Heartbeat | None] = [None] * world_size
        self._moved_at = [clock()] * world_size
        self._progress_at = [clock()] * world_size
        self._heard_at = [clock()] * world_size

    def update(self, heartbeats: Sequence[Heartbeat | None]) -> str | None:
        """Add each rank's last heartbeat (None: none yet); returns a description of the hang if there is one."""
        now = self._clock()
        for rank, beat in enumerate(heartbeats):
            last = self._last[rank]
            if beat is None or beat == last:
                continue
            self._heard_at[rank] = now
            if last is None or (beat.collectives, beat.activity) != (last.collectives, last.activity):
                self._moved_at[rank] = now
            if last is None or beat.progress != last.progress:
                self._progress_at[rank] = now
            self._last[rank] = beat
        counts = [-1 if beat is None else beat.collectives for beat in self._last]
        most = max(counts)
        waited = now - max(self._moved_at[rank] for rank, count in enumerate(counts) if count == most)
        missing = [rank for rank, count in enumerate(counts) if count < most]
        if missing and waited > self._limit:
            return self._describe(missing, now, most)
        # Who waits for a missing rank cannot make progress: only the missing ones can.
        idle = {rank: now - self._progress_at[rank] for rank in missing or range(len(counts))}
        if stuck := [rank for rank, seconds in idle.items() if seconds > self._limit]:
            return self._describe(missing or stuck, now, most)
        if any(beat is not None and beat.is_asked for beat in self._last) and min(idle.values()) > self._grace:
            return f"asked to stop, but {self._describe(list(idle), now, most)}"
        return None

    def _describe(self, ranks: Sequence[int], now: float, most: int) -> str:
        return "; ".join(self._describe_one(rank, now, most) for rank in ranks)

    def _describe_one(self, rank: int, now: float, most: int) -> str:
        beat = self._last[rank]
        if beat is None:
            return f"rank {rank} is missing: no heartbeat since the run began"
        silent = now - self._heard_at[rank]
        where = f"{beat.activity}, for {now - self._moved_at[rank]:.1f} s"
        if silent > self._limit / 2:
            where = f"no heartbeat for {silent:.1f} s, last in {beat.activity}"
        if beat.collectives == most:
            return f"rank {rank} makes no progress: {where}"
        return f"rank {rank} is missing: {where} (it entered {beat.collectives} collectives, the others {most})"
