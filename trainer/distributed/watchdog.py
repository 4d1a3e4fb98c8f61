"""Watchdog: names ranks that make no progress, and ends the run with the stacks of all ranks.

On each rank a thread publishes every few seconds how many collectives the rank has entered, its
activity, and whether it makes progress: it has noted a phase, entered a collective, read a
micro-batch, or used a processor. The step itself only assigns one attribute. Rank 0 compares and
publishes what it finds; every rank that reads it writes its stacks to its log, and ends its process
unless the main thread returns. After a request to stop, the run ends as soon as no rank makes
progress any more: a long step is finished and saved.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any, BinaryIO, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from trainer.distributed.env import RankInfo
from trainer.ending import LAST_WORDS_SEC, ProcessorUse, end_process, within
from trainer.files import open_descriptor
from trainer.wording import error_text, message_of

T = TypeVar("T")
logger = logging.getLogger(__name__)
EXIT_HUNG = 1
LONGEST_INTERVAL_SEC = 2.0
# Without progress for so long, a run that was asked to stop ends: torchrun kills after 30 s.
GRACE_SEC = 10.0
HANG_KEY = "hang"
GONE_KEY = "gone"
PREFIX = "watchdog"
DATA = "data"  # the phase in which a message says what is read


class Watchdog:
    """The watchdog thread of one rank.

    Args:
        store: a connection of its own, since the main thread may block in another one.
        timeout_sec: timeout of the collectives.
        log: file for the stacks.
        collectives: number of collectives entered so far; called in the thread.
        on_end: called with the reason before the process is ended because its main thread hangs.
        reading: what is being read, another text for every micro-batch; called in the thread.
        is_asked: whether this process was asked to stop; called in the thread.
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
        reading: Callable[[], str] = lambda: "",
        is_asked: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store = dist.PrefixStore(PREFIX, store)
        self._info = info
        self._interval = min(LONGEST_INTERVAL_SEC, timeout_sec / 20)
        # Shorter than the backend's timeout: waiting ranks still wait when stacks are written.
        self._limit = timeout_sec - 4 * self._interval
        self._log: BinaryIO = os.fdopen(open_descriptor(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab", 0)
        self._collectives, self._on_end = collectives, on_end
        self._reading, self._is_asked = reading, is_asked
        self._time, self._looked_at = 0.0, time.monotonic()
        # All ranks, on rank 0; and this one alone, for when the store is gone.
        self._detector = HangDetector(info.world_size, self._limit, GRACE_SEC, lambda: self._time)
        self._alone = HangDetector(1, self._limit, GRACE_SEC, lambda: self._time)
        self._seen: set[int] = set()
        self._notes = itertools.count()
        self._activity: tuple[str, int, bool, int] = ("starting", 0, True, 0)
        self._use = ProcessorUse()
        self._signs: object = None
        self._progress = self._count = 0
        self._is_closed = threading.Event()
        self.hang: str | None = None
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def at(self, what: str, step: int, *, may_wait: bool = False) -> None:
        """Record the main thread's activity. Each call is progress; `may_wait`: as long as it takes."""
        self._activity = (what, step, may_wait, next(self._notes))

    def tell(self, reason: str) -> None:
        """Tell the other ranks why this one ends, so that they do not report it as missing."""
        self._if_store_lives(lambda: self._store.set(f"failed_{self._info.rank}", reason))

    def explain(self, error: Exception) -> str:
        """Why the run failed: `error`, or another rank's failure. Takes a few intervals."""
        own = error_text(error)
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
            # The rank that found it first has ended meanwhile, and is silent too.
            gone = self._if_store_lives(lambda: self._text_of(GONE_KEY))
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
        """End the thread and drop the process group, before the interpreter exits."""
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
            # If something holds the interpreter, stacks are written without this thread.
            faulthandler.dump_traceback_later(self._limit, file=self._log)
            # Its own time: while the process is suspended (Ctrl-Z, a scheduler) none passes.
            now = time.monotonic()
            self._time += min(now - self._looked_at, 3 * self._interval)
            self._looked_at = now
            beat = self._own_heartbeat()
            if self._if_store_lives(partial(self._exchange, beat)) is None:
                # The rank that hosts it is gone; this one may be in a read that never ends.
                self.hang = self._alone.update([replace(beat, collectives=0)])
            if self.hang is not None:
                self._end(self.hang, was_asked=beat.is_asked)
                break
            is_over = self._is_closed.wait(self._interval)
        faulthandler.cancel_dump_traceback_later()

    def _own_heartbeat(self) -> Heartbeat:
        self._count += 1
        what, step, may_wait, _ = activity = self._activity
        reading, collectives = self._reading(), self._collectives()
        signs = (activity, reading, collectives)
        if self._use.is_working() or may_wait or signs != self._signs:
            self._progress += 1
        self._signs = signs
        text = f"step {step}: {what}"
        if what == DATA and reading:
            text += f", reading {reading}"
        return Heartbeat(collectives, text, self._progress, self._is_asked(), self._count)

    def _exchange(self, beat: Heartbeat) -> bool:
        self._store.set(f"rank_{self._info.rank}", json.dumps(astuple(beat)))
        if self._info.is_main:
            hang = self._detector.update(self._heartbeats())
            if hang is not None:
                self._store.set(HANG_KEY, hang)
        self.hang = self._text_of(HANG_KEY) or None
        return True

    def _heartbeats(self) -> list[Heartbeat | None]:
        """The last heartbeat of each rank, None before its first."""
        world = range(self._info.world_size)
        for rank in world:
            # Reading a key that does not exist would block.
            if rank not in self._seen and self._store.check([f"rank_{rank}"]):
                self._seen.add(rank)
        ranks = sorted(self._seen)
        values = self._store.multi_get([f"rank_{rank}" for rank in ranks])
        found = {rank: Heartbeat(*json.loads(value)) for rank, value in zip(ranks, values, strict=True)}
        return [found.get(rank) for rank in world]

    def _failed_ranks(self) -> dict[int, str]:
        """Reason of each rank that called `tell`."""
        reasons = {rank: self._text_of(f"failed_{rank}") for rank in range(self._info.world_size)}
        return {rank: reason for rank, reason in reasons.items() if reason}

    def _text_of(self, key: str) -> str:
        """The text that a rank has set; empty if none has."""
        is_set = self._store.check([key])  # reading a key that does not exist would block
        return self._store.get(key).decode() if is_set else ""

    def _end(self, hang: str, *, was_asked: bool) -> None:
        """Write the stacks, and end the process unless its main thread does so."""
        within(LAST_WORDS_SEC, partial(self._say, hang))
        # Within this time the backend raises in the ranks that wait, which then end normally;
        # after a request to stop it is the time in which the others hear of it from the store that
        # rank 0 hosts.
        intervals = 2 if was_asked else 6
        if self._info.world_size == 1:
            intervals = 0
        if not self._is_closed.wait(intervals * self._interval):
            end_process(EXIT_HUNG, partial(self._on_end, hang))

    def _say(self, hang: str) -> None:
        self._log.write(f"stacks of rank {self._info.rank}:\n".encode())
        faulthandler.dump_traceback(self._log, all_threads=True)
        logger.error("%s", hang)

    @staticmethod
    def _if_store_lives(action: Callable[[], T]) -> T | None:
        """The action's result; None if the store is gone, with the rank that hosts it."""
        try:
            return action()
        except RuntimeError:  # torch's DistError is one
            return None


def _gone(who: str, error: str) -> str:
    """The message about a rank that is silent; `error` is this rank's own, maybe long."""
    return f"{who} is gone (killed, for want of memory perhaps, or its machine is lost; here: {shorten(error, 150)})"


def is_of_a_collective(error: Exception) -> bool:
    """Whether the process group raised the error, whose cause is then usually on another rank."""
    is_of_gloo = isinstance(error, RuntimeError) and "gloo" in message_of(error).lower()
    return is_of_gloo or isinstance(error, dist.DistError)


def start_watchdog(info: RankInfo, groups: Sequence[dist.ProcessGroup] = (), **options: Any) -> Watchdog:
    """Start this rank's watchdog.

    Args:
        groups: process groups of a part of the ranks; all ranks are in equally many.
        options: of `Watchdog`.
    """
    store: Any = dist.HashStore()
    counted: set[Any] = set()
    if info.world_size > 1:
        # torch 2.13 has both for its own monitoring, but neither public nor typed.
        counted = {dist.group.WORLD, *groups}
        default_store: Any = _get_default_store()
        store = default_store.clone()

    def collectives() -> int:
        return sum(group._get_sequence_number_for_group() for group in counted)

    return Watchdog(store, info, collectives=collectives, **options)


@dataclass(frozen=True)
class Heartbeat:
    """The last message of a rank."""

    collectives: int  # entered since the process group began
    activity: str  # of the main thread
    progress: int  # number of heartbeats that followed progress
    is_asked: bool  # whether the rank was asked to stop
    count: int  # number of this heartbeat

    @property
    def place(self) -> tuple[int, str]:
        """The main thread's place in the run."""
        return self.collectives, self.activity


class HangDetector:
    """Finds the rank that the others wait for, or the ranks that all make no progress.

    Args:
        limit_sec: duration from which a wait counts as a hang.
        grace_sec: the same once any rank was asked to stop, if no rank makes progress.
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
        """Add each rank's last heartbeat (None: none yet); describes a hang if there is one."""
        now = self._clock()
        for rank, beat in enumerate(heartbeats):
            last = self._last[rank]
            if beat is None or beat == last:
                continue
            self._last[rank], self._heard_at[rank] = beat, now
            if last is None or beat.place != last.place:
                self._moved_at[rank] = now
            if last is None or beat.progress != last.progress:
                self._progress_at[rank] = now
        # Waiting ranks have entered one collective more than the rank that they wait for.
        counts = list(map(_collectives, self._last))
        most = max(counts)
        waited = now - max(self._moved_at[rank] for rank, count in enumerate(counts) if count == most)
        missing = [rank for rank, count in enumerate(counts) if count < most]
        if missing and waited > self._limit:
            return self._describe(missing, now, most)
        # A rank that waits for a missing one cannot make progress: only the missing ones can.
        idle = {rank: now - self._progress_at[rank] for rank in missing or range(len(counts))}
        stuck = [rank for rank, seconds in idle.items() if seconds > self._limit]
        if stuck:
            return self._describe(missing or stuck, now, most)
        is_asked = any(beat is not None and beat.is_asked for beat in self._last)
        if is_asked and min(idle.values()) > self._grace:
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
        entered = f"(it entered {beat.collectives} collectives, the others {most})"
        return f"rank {rank} is missing: {where} {entered}"


def _collectives(beat: Heartbeat | None) -> int:
    return -1 if beat is None else beat.collectives  # below every rank that has been heard of
