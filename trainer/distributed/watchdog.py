"""Watchdog: names ranks that make no progress, and ends the run with the stacks of all ranks.

On each rank a thread publishes every few seconds how many collectives the rank has entered, its
activity, and how long ago it made progress: it has noted a phase, entered a collective, read or run
a micro-batch, or used a processor. The step itself only assigns attributes. Rank 0 compares, and
the others watch rank 0; every rank that reads of a hang writes its stacks to its log, and ends its
process unless the main thread returns. The backend's timeout is out of the way: it would end ranks
that wait for a slow one, too.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from trainer.distributed.env import RankInfo
from trainer.ending import LAST_WORDS_SEC, ProcessorUse, end_process, within
from trainer.files import open_descriptor
from trainer.wording import error_text, message_of, printable_lines

T = TypeVar("T")
logger = logging.getLogger(__name__)
EXIT_HUNG = 1
LONGEST_INTERVAL_SEC = 2.0
NEVER = timedelta(days=30)
HANG_KEY = "hang"
DATA = "data"  # the phase in which a message says what is read


class Heartbeat(NamedTuple):
    """The last message of a rank."""

    collectives: int  # entered since the process group began
    activity: str  # of the main thread
    stayed_sec: float  # since the last sign of progress, or since the rank was last heard of
    idle_sec: float  # the same, but the use of a processor is one, too


def find_hang(beats: Sequence[Heartbeat | None], *, limit_sec: float) -> str | None:
    """Describes the ranks that others wait for, or that make no progress; None if there are none.

    Args:
        beats: the last heartbeat of each rank; None before its first and after its end.
        limit_sec: duration from which a wait counts as a hang.
    """
    heard = {rank: beat for rank, beat in enumerate(beats) if beat is not None}
    most = max((beat.collectives for beat in heard.values()), default=0)
    # Waiting ranks have entered one collective more than the rank that they wait for.
    waiting = [rank for rank, beat in heard.items() if beat.collectives == most]
    missing = [rank for rank in range(len(beats)) if rank not in waiting]

    # A rank that waits for a missing one cannot make progress: only the missing ones can.
    stuck = [rank for rank in missing or waiting if rank in heard and heard[rank].idle_sec > limit_sec]
    if any(heard[rank].stayed_sec > limit_sec for rank in waiting):
        # A processor's use is not enough of one that others wait for: it may loop for ever.
        stuck += [rank for rank in missing if rank not in heard or heard[rank].stayed_sec > limit_sec]
    return "; ".join(_describe(rank, beats[rank], most) for rank in sorted({*stuck})) or None


def _describe(rank: int, beat: Heartbeat | None, most: int) -> str:
    if beat is None:
        return f"rank {rank} is missing: it has not begun, or has ended; see its own log"
    where = f"{beat.activity}, for {beat.stayed_sec:.1f} s"
    if beat.collectives == most:
        return f"rank {rank} makes no progress: {where}"
    return f"rank {rank} is missing: {where} (it entered {beat.collectives} collectives, the others {most})"


class Watchdog:
    """The watchdog thread of one rank.

    Args:
        store: a connection of its own, since the main thread may block in another one.
        timeout_sec: a run without progress has ended on all ranks after so long.
        log: file for the stacks.
        collectives: number of collectives entered so far; called in the thread.
        on_end: called with the reason before the process is ended because its main thread hangs.
        reading: what is being read, another text for every micro-batch; called in the thread.
        signs: further signs of progress: another value after each.
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
        signs: Callable[[], object] = lambda: None,
    ) -> None:
        self._store, self._info = dist.PrefixStore("watchdog", store), info
        self._interval = min(LONGEST_INTERVAL_SEC, timeout_sec / 40)
        # Shorter by two intervals to notice a hang, and the six of `_end`.
        self._limit = timeout_sec - 8 * self._interval
        self._log: BinaryIO = os.fdopen(open_descriptor(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab", 0)
        self._collectives, self._on_end = collectives, on_end
        self._reading, self._more_signs = reading, signs
        self._notes = itertools.count()
        self.at("starting", 0, may_wait=True)
        self._use = ProcessorUse()
        self._signs: object = None
        self._heard: dict[int, tuple[str, float]] = {}  # rank -> its last message, and when it came
        self._time, self._looked_at = 0.0, time.monotonic()
        self._moved_at = self._progress_at = self._heard_at = 0.0
        self._is_closed = threading.Event()
        self.hang: str | None = None
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def at(self, what: str, step: int, *, may_wait: bool = False) -> None:
        """Record the main thread's activity, which is progress; `may_wait`: as long as it takes."""
        self._note = (what, step, may_wait, next(self._notes))

    def tell(self, reason: str) -> None:
        """Tell the other ranks why this one ends, so that they do not report it as missing."""
        self._if_store_lives(lambda: self._store.set(f"failed_{self._info.rank}", printable_lines(reason)))

    def explain(self, error: Exception) -> str:
        """Why the run failed: `error`, which the other ranks learn, or, if it comes, the failure of theirs."""
        own = error_text(error)
        if not is_of_a_collective(error):
            self.tell(own)
            return own
        # Long enough for a rank that fails to say why.
        failed: dict[int, str] | None = None
        end = time.monotonic() + 2.5 * self._interval
        while time.monotonic() < end and not failed and self.hang is None:
            time.sleep(self._interval / 5)
            failed = self._if_store_lives(self._failed_ranks)
        if failed:
            return "; ".join(f"rank {rank} failed: {reason}" for rank, reason in failed.items())
        return self.hang or f"another rank has ended without a word, killed perhaps (here: {own})"

    def write(self, text: str) -> None:
        """Write details to this rank's log that are not for stderr; a full disk costs only these."""
        with suppress(OSError):
            self._log.write(f"{text}\n".encode())

    def close(self) -> None:
        """End the thread and drop the process group, before the interpreter exits."""
        self._is_closed.set()
        self._thread.join(2 * self._interval + 1.0)
        if self._thread.is_alive():
            return  # it waits for a store whose host hangs, and ends with the process
        self._log.close()
        del self._collectives, self._store, self._more_signs

    def _watch(self) -> None:
        # The first heartbeat is immediate, so that a rank that hangs early has been heard of.
        is_over = False
        while not is_over:
            # If something holds the interpreter, stacks are written without this thread.
            faulthandler.dump_traceback_later(self._limit, file=self._log)
            beat = self._own_heartbeat()
            if self._if_store_lives(partial(self._exchange, beat)):
                self._heard_at = self._time
            elif self._time - self._heard_at > self._limit:
                own = _describe(self._info.rank, beat, beat.collectives)
                self.hang = f"rank 0, which hosts the store, does not answer; {own}"
            if self.hang is not None:
                self._end(self.hang)
                break
            is_over = self._is_closed.wait(self._interval)
        # Silent, but not missing.
        self._if_store_lives(lambda: self._store.set(f"rank_{self._info.rank}", ""))
        faulthandler.cancel_dump_traceback_later()

    def _own_heartbeat(self) -> Heartbeat:
        # Its own time: while the process is suspended (Ctrl-Z, a scheduler) none passes.
        now = time.monotonic()
        self._time += min(now - self._looked_at, 3 * self._interval)
        self._looked_at = now
        what, step, may_wait, _ = note = self._note
        reading, collectives = self._reading(), self._collectives()
        activity = f"step {step}: {what}"
        if what == DATA and reading:
            activity += f", reading {reading}"
        signs, is_working = (note, reading, collectives, self._more_signs()), self._use.is_working()
        if may_wait or signs != self._signs:
            self._moved_at = self._progress_at = self._time
        elif is_working:
            self._progress_at = self._time
        self._signs = signs
        stayed, idle = self._time - self._moved_at, self._time - self._progress_at
        return Heartbeat(collectives, activity, stayed, idle)

    def _exchange(self, beat: Heartbeat) -> bool:
        self._store.set(f"rank_{self._info.rank}", json.dumps([self._time, *beat]))
        hang = None
        if self._info.is_main:
            hang = find_hang(self._heartbeats(range(self._info.world_size)), limit_sec=self._limit)
        else:  # nobody else would see that rank 0, which compares, is silent
            (main,) = self._heartbeats(range(1))
            if main is not None and self._time - self._heard[0][1] > self._limit:
                hang = _describe(0, main, beat.collectives)
        if hang is not None:
            self._store.set(HANG_KEY, hang)
        self.hang = self._text_of(HANG_KEY) or None
        return True

    def _heartbeats(self, ranks: Sequence[int]) -> list[Heartbeat | None]:
        """The last heartbeat of each rank, with its silence; None before its first and after its end."""
        keys = [f"rank_{rank}" for rank in ranks]
        if self._store.check(keys):
            texts = [value.decode() for value in self._store.multi_get(keys)]
        else:
            texts = [*map(self._text_of, keys)]
        found: list[Heartbeat | None] = []
        for rank, text in zip(ranks, texts, strict=True):
            if rank not in self._heard or text != self._heard[rank][0]:
                self._heard[rank] = text, self._time
            beat, silent = None, self._time - self._heard[rank][1]
            if text:
                beat = Heartbeat(*json.loads(text)[1:])
                beat = beat._replace(stayed_sec=beat.stayed_sec + silent, idle_sec=beat.idle_sec + silent)
            found.append(beat)
        return found

    def _failed_ranks(self) -> dict[int, str]:
        """Reason of each rank that called `tell`."""
        ranks = range(self._info.world_size)
        return {rank: reason for rank in ranks if (reason := self._text_of(f"failed_{rank}"))}

    def _text_of(self, key: str) -> str:
        """The text that a rank has set; empty if none has."""
        is_set = self._store.check([key])  # reading a key that does not exist would block
        return self._store.get(key).decode() if is_set else ""

    def _end(self, hang: str) -> None:
        """Name the hang, write the stacks, and end the process unless its main thread does so."""

        def write_stacks() -> None:
            with suppress(OSError):
                self._log.write(f"stacks of rank {self._info.rank}:\n".encode())
                faulthandler.dump_traceback(self._log, all_threads=True)

        # First on stderr: the log may be on a disk that is gone.
        within(LAST_WORDS_SEC, partial(logger.error, "%s", hang))
        within(LAST_WORDS_SEC, write_stacks)
        # Meanwhile the main thread may return, and the others read of the hang in the store. Rank 0
        # hosts it and waits longer: a collective in which it waits for one of them then fails.
        intervals = 0
        if self._info.world_size > 1:
            intervals = 3 + 3 * self._info.is_main
        if not self._is_closed.wait(intervals * self._interval):
            end_process(EXIT_HUNG, partial(self._on_end, hang))

    @staticmethod
    def _if_store_lives(action: Callable[[], T]) -> T | None:
        """The action's result; None if the store is gone, with the rank that hosts it."""
        try:
            return action()
        except RuntimeError:  # torch's DistError is one
            return None


def is_of_a_collective(error: Exception) -> bool:
    """Whether the process group raised the error, whose cause is then usually on another rank."""
    is_of_gloo = re.search(r"\bgloo\b|Gloo", message_of(error)) is not None
    return isinstance(error, dist.DistError) or (is_of_gloo and isinstance(error, RuntimeError))


def start_watchdog(info: RankInfo, groups: Sequence[dist.ProcessGroup] = (), **options: Any) -> Watchdog:
    """Start this rank's watchdog, which ends hanging collectives from now on, not their timeout.

    Args:
        groups: process groups of a part of the ranks; all ranks are in equally many.
        options: of `Watchdog`.
    """
    store: Any = dist.HashStore()
    counted: set[Any] = set()
    if info.world_size > 1:
        # torch 2.13 has both for its own monitoring, but neither public nor typed.
        counted = {dist.group.WORLD, *groups}
        for group in counted:
            group.set_timeout(NEVER)
        default_store: Any = _get_default_store()
        store = default_store.clone()

    def collectives() -> int:
        return sum(group._get_sequence_number_for_group() for group in counted)

    return Watchdog(store, info, collectives=collectives, **options)
