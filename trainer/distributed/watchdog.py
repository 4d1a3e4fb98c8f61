"""Watchdog: detects a rank that never reaches a collective, names it, and ends the run with the stacks of all ranks.

On each rank a thread publishes every few seconds how many collectives the rank has entered and its current activity; the
step itself only assigns one attribute. Waiting ranks have entered one collective more than the rank they wait for. Rank 0
compares the counts. When a wait exceeds the limit it publishes the finding, and every rank that reads it writes its stacks
to its log. If the main thread does not return by itself after that, the watchdog thread ends the process.
"""

from __future__ import annotations

import faulthandler
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any, BinaryIO, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from trainer.distributed.env import RankInfo
from trainer.metrics.logger import get_logger
from trainer.untrusted import open_descriptor

T = TypeVar("T")
logger = get_logger(__name__)
EXIT_HUNG = 1
LONGEST_INTERVAL_SEC = 2.0
HANG_KEY = "hang"
GONE_KEY = "gone"
PREFIX = "watchdog"


@dataclass(frozen=True)
class Heartbeat:
    """The last message of a rank."""

    collectives: int
    """Collectives entered since the process group began."""
    activity: str
    """What the main thread is doing."""
    count: int
    """Number of this heartbeat."""


class HangDetector:
    """Finds the rank that the others wait for.

    Args:
        limit_sec: duration from which a wait counts as a hang.
        clock: monotonic seconds.
    """

    def __init__(self, world_size: int, limit_sec: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit_sec
        self._clock = clock
        self._last: list[Heartbeat | None] = [None] * world_size
        self._moved_at = [clock()] * world_size
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
            self._last[rank] = beat
        counts = [-1 if beat is None else beat.collectives for beat in self._last]
        most = max(counts)
        waited = now - max(self._moved_at[rank] for rank, count in enumerate(counts) if count == most)
        missing = [rank for rank, count in enumerate(counts) if count < most]
        if not missing or waited <= self._limit:
            return None
        return "; ".join(self._describe(rank, now, most) for rank in missing)

    def _describe(self, rank: int, now: float, most: int) -> str:
        beat = self._last[rank]
        if beat is None:
            return f"rank {rank} is missing: no heartbeat since the run began"
        silent = now - self._heard_at[rank]
        where = f"{beat.activity}, for {now - self._moved_at[rank]:.1f} s"
        if silent > self._limit / 2:
            where = f"no heartbeat for {silent:.1f} s, last in {beat.activity}"
        return f"rank {rank} is missing: {where} (it entered {beat.collectives} collectives, the others {most})"


class Watchdog:
    """The watchdog thread of one rank.

    Args:
        store: a connection of its own, since the main thread may block in another one.
        timeout_sec: timeout of the collectives.
        log: file for the stacks.
        on_end: called with the reason before the process is ended because its main thread hangs.
    """

    def __init__(
        self,
        store: dist.Store,
        info: RankInfo,
        *,
        timeout_sec: float,
        log: Path,
        collectives: Callable[[], int],
        on_end: Callable[[str], None],
    ) -> None:
        self._store = dist.PrefixStore(PREFIX, store)
        self._info = info
        self._interval = min(LONGEST_INTERVAL_SEC, timeout_sec / 20)
        # Shorter than the backend's timeout, so that the waiting ranks still wait when their stacks are written.
        self._limit = timeout_sec - 4 * self._interval
        self._log: BinaryIO = os.fdopen(open_descriptor(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab", 0)
        self._collectives = collectives
        self._on_end = on_end
        self._detector = HangDetector(info.world_size, self._limit)
        self._seen: set[int] = set()
        self._activity: tuple[str, int] = ("starting", 0)
        self._count = 0
        self._is_closed = threading.Event()
        self.hang: str | None = None
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def at(self, what: str, step: int) -> None:
        """Record the main thread's current activity."""
        self._activity = (what, step)

    def tell(self, reason: str) -> None:
        """Tell the other ranks why this one ends, so that they do not report it as missing."""
        self._if_store_lives(lambda: self._store.set(f"failed_{self._info.rank}", reason))

    def explain(self, error: Exception) -> str:
        """Why the run failed: `error`, or what another rank did that made a collective fail here. Takes a few intervals."""
        own = f"{type(error).__name__}: {error}"
        if not is_of_a_collective(error):
            self.tell(own)
            return own
        before = self._if_store_lives(self._heartbeats)
        # Long enough for two heartbeats of every live rank.
        end = time.monotonic() + 2.5 * self._interval
        while time.monotonic() < end and self.hang is None:
            failed = self._if_store_lives(self._failed_ranks)
            if failed:
                return "; ".join(f"rank {rank} failed: {reason}" for rank, reason in failed.items())
            # Who found it first has ended meanwhile, and is silent too.
            gone = self._if_store_lives(self._found_gone)
            if gone:
                return _gone(f"rank {gone}", own)
            time.sleep(self._interval / 5)
        if self.hang is not None:
            return self.hang
        after = self._if_store_lives(self._heartbeats)
        if before is None or after is None:
            return _gone("rank 0, which hosts the store,", own)
        silent = ", ".join(str(rank) for rank in range(self._info.world_size) if before[rank] == after[rank])
        if not silent:
            return own
        self._if_store_lives(lambda: self._store.set(GONE_KEY, silent))
        return _gone(f"rank {silent}", own)

    def write(self, text: str) -> None:
        """Write details to this rank's log that do not belong on stderr."""
        self._log.write(f"{text}\n".encode())

    def close(self) -> None:
        """End the thread and drop the process group, which must be gone before the interpreter exits."""
        self._is_closed.set()
        self._thread.join(2 * self._interval + 1.0)
        if self._thread.is_alive():
            return  # it waits for a store whose host hangs, and ends with the process
        self._log.close()
        del self._collectives, self._store

    def _watch(self) -> None:
        # The first heartbeat is immediate, so that a rank that hangs early has been heard of.
        is_over = False
        while not is_over:
            # If something holds the interpreter so that this thread cannot run, the stacks are written without it.
            faulthandler.dump_traceback_later(self._limit, file=self._log)
            if self._if_store_lives(self._beat) is None:
                break
            if self.hang is not None:
                self._end(self.hang)
                break
            is_over = self._is_closed.wait(self._interval)
        faulthandler.cancel_dump_traceback_later()

    def _beat(self) -> int:
        self._count += 1
        what, step = self._activity
        heartbeat = [self._collectives(), f"step {step}: {what}", self._count]
        self._store.set(f"rank_{self._info.rank}", json.dumps(heartbeat))
        if self._info.is_main:
            hang = self._detector.update(self._heartbeats())
            if hang is not None:
                self._store.set(HANG_KEY, hang)
        if self._store.check([HANG_KEY]):
            self.hang = self._store.get(HANG_KEY).decode()
        return self._count

    def _heartbeats(self) -> list[Heartbeat | None]:
        """The last heartbeat of each rank, None before its first."""
        world = range(self._info.world_size)
        # Reading a key that does not exist would block.
        self._seen.update(rank for rank in world if rank not in self._seen and self._store.check([f"rank_{rank}"]))
        ranks = sorted(self._seen)
        values = self._store.multi_get([f"rank_{rank}" for rank in ranks])
        found = {rank: Heartbeat(*json.loads(value)) for rank, value in zip(ranks, values, strict=True)}
        return [found.get(rank) for rank in world]

    def _failed_ranks(self) -> dict[int, str]:
        """Reason of each rank that called `tell`."""
        failed = [rank for rank in range(self._info.world_size) if self._store.check([f"failed_{rank}"])]
        return {rank: self._store.get(f"failed_{rank}").decode() for rank in failed}

    def _found_gone(self) -> str:
        """The ranks that another one has found gone; empty if none has."""
        return self._store.get(GONE_KEY).decode() if self._store.check([GONE_KEY]) else ""

    def _end(self, hang: str) -> None:
        """Write the stacks, and end the process unless its main thread does so."""
        logger.error("a collective took more than %.1f s: %s", self._limit, hang)
        self._log.write(f"stacks of rank {self._info.rank}:\n".encode())
        faulthandler.dump_traceback(self._log, all_threads=True)
        # Within this time the backend raises in the ranks that wait, which then end normally.
        if not self._is_closed.wait(6 * self._interval):
            self._on_end(hang)
            os._exit(EXIT_HUNG)

    @staticmethod
    def _if_store_lives(action: Callable[[], T]) -> T | None:
        """The action's result, or None if the store is gone together with the rank that hosts it."""
        try:
            return action()
        except RuntimeError:  # torch's DistError is one
            return None


def _gone(who: str, error: str) -> str:
    """What to say of a rank that sends no heartbeat any more, given the error that this one has met, which may be long."""
    return f"{who} is gone (killed, for want of memory perhaps, or its machine is lost; here: {shorten(error, 150)})"


def is_of_a_collective(error: Exception) -> bool:
    """Whether the process group raised the error, whose cause is then usually on another rank."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def start_watchdog(
    info: RankInfo,
    *,
    timeout_sec: float,
    log: Path,
    on_end: Callable[[str], None],
    groups: Sequence[dist.ProcessGroup] = (),
) -> Watchdog | None:
    """Start this rank's watchdog; None for a single rank, which never waits.

    Args:
        groups: further process groups of parts of the ranks, of which each rank is in as many.
    """
    if info.world_size == 1:
        return None
    # torch 2.13 has both for its own monitoring, but neither public nor typed.
    world: Any = dist.group.WORLD
    counted: list[Any] = [world, *(group for group in groups if group is not world)]
    store: Any = _get_default_store()
    return Watchdog(
        store.clone(),
        info,
        timeout_sec=timeout_sec,
        log=log,
        collectives=lambda: sum(group._get_sequence_number_for_group() for group in counted),
        on_end=on_end,
    )
