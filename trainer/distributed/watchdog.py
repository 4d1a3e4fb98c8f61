"""Watchdog: a rank that never comes to a collective is found, named, and ends the run with the stacks of all.

A thread a rank tells the store, every few seconds, how many collectives its rank has entered and what it is doing; nothing of
it is in the step but one assignment. Ranks that wait have entered one collective more than the rank they wait for. Rank 0
compares the numbers; when those who wait have waited for the timeout it gives the verdict, and every rank that sees it writes
its stacks into its log. A rank whose main thread does not come back by itself after that is ended by its thread.
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
from typing import Any, BinaryIO

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from trainer.distributed.env import RankInfo
from trainer.metrics.logger import get_logger

logger = get_logger(__name__)
EXIT_HUNG = 1
LONGEST_INTERVAL_SEC = 2.0
VERDICT = "verdict"
PREFIX = "watchdog"


@dataclass(frozen=True)
class Sight:
    """What a rank last said of itself."""

    collectives: int
    """Entered since the process group began."""
    where: str
    """What its main thread is doing, in words."""
    beats: int
    """Times that its watchdog has spoken."""


class Judge:
    """Finds the rank that the others wait for.

    Args:
        limit_sec: how long a wait must be to count as a hang.
        clock: monotonic seconds.
    """

    def __init__(self, world_size: int, limit_sec: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit_sec
        self._clock = clock
        self._last: list[Sight | None] = [None] * world_size
        self._moved = [clock()] * world_size
        self._spoke = [clock()] * world_size

    def consider(self, sights: Sequence[Sight | None]) -> str | None:
        """Take in what each rank last said (None: nothing yet); the verdict, if ranks have waited for too long."""
        now = self._clock()
        for rank, sight in enumerate(sights):
            last = self._last[rank]
            if sight is None or sight == last:
                continue
            self._spoke[rank] = now
            if last is None or (sight.collectives, sight.where) != (last.collectives, last.where):
                self._moved[rank] = now
            self._last[rank] = sight
        counts = [-1 if sight is None else sight.collectives for sight in self._last]
        most = max(counts)
        waited = now - max(self._moved[rank] for rank, count in enumerate(counts) if count == most)
        missing = [rank for rank, count in enumerate(counts) if count < most]
        if not missing or waited <= self._limit:
            return None
        return "; ".join(self._describe(rank, now, most) for rank in missing)

    def _describe(self, rank: int, now: float, most: int) -> str:
        sight = self._last[rank]
        if sight is None:
            return f"rank {rank} is missing: it has said nothing since the run began"
        silent = now - self._spoke[rank]
        where = f"{sight.where}, where it has been for {now - self._moved[rank]:.1f} s"
        if silent > self._limit / 2:
            where = f"no sign of life for {silent:.1f} s, last in {sight.where}"
        return f"rank {rank} is missing: {where} (it entered {sight.collectives} collectives, the others {most})"


class Watchdog:
    """The thread of one rank.

    Args:
        store: a connection of its own; the main thread may be blocked in another one.
        timeout_sec: of the collectives.
        log: where the stacks go.
        on_end: called with the reason before this rank's process is ended, whose main thread hangs.
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
        # A bit earlier than the backend, so that those who wait still wait when their stacks are written.
        self._limit = timeout_sec - 4 * self._interval
        self._log: BinaryIO = log.open("ab", buffering=0)
        self._collectives = collectives
        self._on_end = on_end
        self._judge = Judge(info.world_size, self._limit)
        self._seen: set[int] = set()
        self._where: tuple[str, int] = ("starting", 0)
        self._beats = 0
        self._is_closed = threading.Event()
        self.verdict: str | None = None
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def at(self, what: str, step: int) -> None:
        """Note what the main thread does now."""
        self._where = (what, step)

    def tell(self, reason: str) -> None:
        """Tell the other ranks why this one ends, so that they need not call it missing."""
        self._try(lambda: self._store.set(f"failed_{self._info.rank}", reason))

    def explain(self, error: Exception) -> str:
        """Why the run failed: `error`, or what another rank did that made a collective fail here. Waits a few beats for it."""
        own = f"{type(error).__name__}: {error}"
        if not is_of_a_collective(error):
            self.tell(own)
            return own
        before = self._beats_of_all()
        # A rank that lives has spoken twice by then.
        end = time.monotonic() + 2.5 * self._interval
        while time.monotonic() < end and self.verdict is None:
            failed = self._failed_ranks()
            if failed:
                return "; ".join(f"rank {rank} failed: {reason}" for rank, reason in failed.items())
            time.sleep(self._interval / 5)
        if self.verdict is not None:
            return self.verdict
        after = self._beats_of_all()
        if before is None or after is None:
            return f"rank 0, which keeps the store, is gone ({own})"
        silent = [str(rank) for rank in range(self._info.world_size) if before.get(rank) == after.get(rank)]
        return f"rank {', '.join(silent)} is gone ({own})" if silent else own

    def write(self, text: str) -> None:
        """Put something into this rank's log that is not worth a place on stderr."""
        self._log.write(f"{text}\n".encode())

    def close(self) -> None:
        """End the thread, and let go of the process group, which must die before the interpreter does."""
        self._is_closed.set()
        self._thread.join(2 * self._interval + 1.0)
        if self._thread.is_alive():
            return  # it waits for an answer of a store whose keeper hangs, and ends with the process
        self._log.close()
        del self._collectives, self._store

    def _watch(self) -> None:
        # The first beat comes at once: a rank that hangs soon has then been heard of.
        is_over = False
        while not is_over:
            # Should this thread not get to run, because something holds the interpreter, the stacks are written without it.
            faulthandler.dump_traceback_later(self._limit, file=self._log)
            if not self._try(self._beat):
                break
            if self.verdict is not None:
                self._end(self.verdict)
                break
            is_over = self._is_closed.wait(self._interval)
        faulthandler.cancel_dump_traceback_later()

    def _beat(self) -> None:
        self._beats += 1
        what, step = self._where
        value = [self._collectives(), f"step {step}: {what}", self._beats]
        self._store.set(f"rank_{self._info.rank}", json.dumps(value))
        if self._info.is_main:
            verdict = self._judge.consider(self._sights())
            if verdict is not None:
                self._store.set(VERDICT, verdict)
        if self._store.check([VERDICT]):
            self.verdict = self._store.get(VERDICT).decode()

    def _sights(self) -> list[Sight | None]:
        world = range(self._info.world_size)
        self._seen.update(rank for rank in world if rank not in self._seen and self._store.check([f"rank_{rank}"]))
        ranks = sorted(self._seen)
        values = self._store.multi_get([f"rank_{rank}" for rank in ranks])
        found = {rank: Sight(*json.loads(value)) for rank, value in zip(ranks, values, strict=True)}
        return [found.get(rank) for rank in world]

    def _end(self, verdict: str) -> None:
        """Write the stacks, and end the process if its main thread does not do so."""
        logger.error("a collective took more than %.1f s: %s", self._limit, verdict)
        self._log.write(f"stacks of rank {self._info.rank}:\n".encode())
        faulthandler.dump_traceback(self._log, all_threads=True)
        # Those who wait get an error of the backend's within this time, and end in the usual way.
        if not self._is_closed.wait(6 * self._interval):
            self._on_end(verdict)
            os._exit(EXIT_HUNG)

    def _failed_ranks(self) -> dict[int, str]:
        found: dict[int, str] = {}

        def read() -> None:
            for rank in range(self._info.world_size):
                if self._store.check([f"failed_{rank}"]):
                    found[rank] = self._store.get(f"failed_{rank}").decode()

        self._try(read)
        return found

    def _beats_of_all(self) -> dict[int, int] | None:
        """Beats by rank; None if the store is gone."""
        found: list[Sight | None] = []
        if not self._try(lambda: found.extend(self._sights())):
            return None
        return {rank: sight.beats for rank, sight in enumerate(found) if sight is not None}

    @staticmethod
    def _try(action: Callable[[], object]) -> bool:
        """Do something with the store; False if the store is gone, with the rank that kept it."""
        try:
            action()
        except (dist.DistError, RuntimeError):
            return False
        return True


def is_of_a_collective(error: Exception) -> bool:
    """Whether the process group raised it: what is wrong then is mostly at another rank."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def start_watchdog(info: RankInfo, *, timeout_sec: float, log: Path, on_end: Callable[[str], None]) -> Watchdog | None:
    """The watchdog of this rank in the default process group; None for a single rank, which waits for nobody."""
    if info.world_size == 1:
        return None
    # torch 2.13 has both for its own monitoring, but neither public nor in its types.
    group: Any = dist.group.WORLD
    store: Any = _get_default_store()
    return Watchdog(
        store.clone(),
        info,
        timeout_sec=timeout_sec,
        log=log,
        collectives=group._get_sequence_number_for_group,
        on_end=on_end,
    )
