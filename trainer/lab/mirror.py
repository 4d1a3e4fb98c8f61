"""Mirrors a run's completed checkpoints to a store, in one thread of rank 0 that nobody waits for.

The thread has no queue. Each round it compares the complete local checkpoints with those of the
store, uploads the newest that is missing there, then older ones that retention keeps, and deletes
what retention does not keep. So a checkpoint that waits while the store is down costs no disk:
local retention deletes it as if there were no store, and the newer one is uploaded in its place.
Only the checkpoint that is being uploaded is spared until its attempt ends: one directory more at
most. It goes with `trainer.lab.remote`.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.config.schema import CheckpointTable
from trainer.errors import UserError
from trainer.files import read_bytes
from trainer.lab.remote import ABANDONED, Claimed, kept, save_id
from trainer.lab.storage import StorageError
from trainer.metrics.best_effort import Diagnostics
from trainer.metrics.logger import get_logger
from trainer.metrics.sinks import EventWriter
from trainer.training.checkpointing import checkpoint
from trainer.training.checkpointing.checkpoint import MARKER, checkpoint_name, step_of
from trainer.training.checkpointing.tensor_files import CheckpointError
from trainer.training.run_dir import RunDir
from trainer.training.signals import StopRequest
from trainer.wording import counted, error_text

logger = get_logger(__name__)
MOST_CLOSE_SEC = 3600.0  # that `wait` takes at all


class TakenOverError(Exception):
    """The remote directory belongs to another run, or to another process of this one."""


class Mirror:
    """Keeps the store's checkpoints equal to the local ones."""

    def __init__(
        self,
        claimed: Claimed,  # claimed here if the store did not answer before
        run_dir: RunDir,  # has the local checkpoints; gets the id under which the store is claimed
        table: CheckpointTable,  # retention
        *,
        step: int,  # that the run continues from; later ones are abandoned. -1: none is
        on_event: Callable[[Mapping[str, Any]], object],  # called from the thread
        first_wait_sec: float = 1.0,  # after a failure; it doubles, and is spread by half
        longest_wait_sec: float = 300.0,
        stall_sec: float = 60.0,  # that `wait` waits without a byte having moved
    ) -> None:
        self._remote, self._owner, self._claim = claimed
        self._run_dir, self._checkpoints = run_dir.path, run_dir.checkpoints
        self._retention = {"keep_last": table.keep_last, "keep_every": table.keep_every}
        self._step, self._on_event, self._stall_sec = step, on_event, stall_sec
        self._first_wait_sec, self._longest_wait_sec = first_wait_sec, longest_wait_sec
        self._lock = threading.Lock()  # between choosing a checkpoint and deleting one
        self._busy: int | None = None
        self._is_prepared = False
        self._mirrored: set[int] = set()
        self._others: set[int] = set()  # in the store, with no equal one here
        self._verified: tuple[bytes, set[str]] = (b"", set())
        self._num_failures, self._problem = 0, ""
        self._wake, self._closing, self._is_idle = (threading.Event() for _ in range(3))
        self._thread = threading.Thread(target=self._run, name="remote checkpoints", daemon=True)
        self._thread.start()

    def publish(self, path: Path) -> None:
        """Note a complete checkpoint, and prune local ones; waits for no store."""
        with self._lock:
            self._is_idle.clear()
            self._wake.set()
        self.prune()

    def prune(self) -> None:
        """Delete local checkpoints as retention says, but not the one that is being uploaded."""
        with self._lock:
            checkpoint.prune(self._checkpoints, **self._retention, spared=self._busy)

    def wait(self, *, is_hurried: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the store has the last checkpoint, as long as bytes move and `is_hurried` is
        false. Say how it went; returns whether the store has it."""
        self._closing.set()
        self._wake.set()
        started = moved_at = said_at = time.monotonic()
        moved = self._remote.storage.moved
        while not self._is_idle.wait(0.05) and self._thread.is_alive() and not is_hurried():
            now = time.monotonic()
            if self._remote.storage.moved != moved:
                moved, moved_at = self._remote.storage.moved, now
            if now - moved_at > self._stall_sec or now - started > MOST_CLOSE_SEC:  # the store hangs
                break
            if now - said_at > 10.0:
                said_at = now
                logger.info("waiting for %s: %.1f MB moved so far", self._remote.url, moved / 1e6)
        self.prune()
        last = next(iter(checkpoint.complete_checkpoints(self._checkpoints)), None)
        if last is None:  # nothing to upload
            return True
        if step_of(last) in self._mirrored:
            logger.info("%s has the last checkpoint, %s", self._remote.url, last.name)
            return True
        problem = self._problem or "it was not uploaded in time"
        text = "%s does not have the last checkpoint, %s (%s); to upload it: train checkpoint push %s"
        logger.warning(text, self._remote.url, last.name, problem, self._run_dir)
        return False

    def _run(self) -> None:
        while True:
            try:
                self._synchronize()
            except (TakenOverError, UserError) as error:
                self._problem = str(error)
                logger.warning("checkpoints are not mirrored any more: %s", error)
                self._event("remote_taken_over", error=str(error))
                return
            except Exception as error:  # noqa: BLE001 - the store must not end the run, whatever its backend raises
                self._fail(error)
                wait = min(self._longest_wait_sec, self._first_wait_sec * 2.0 ** min(self._num_failures - 1, 60))
                wait *= random.uniform(0.5, 1.5)
                if self._closing.is_set():
                    time.sleep(min(wait, 5.0))  # `wait` gives up on its own
                else:
                    self._closing.wait(wait)
                continue
            self._num_failures, self._problem = 0, ""
            with self._lock:
                if not self._wake.is_set():
                    self._is_idle.set()
            self._wake.wait()  # until there is another checkpoint, or the run ends
            self._wake.clear()

    def _fail(self, error: Exception) -> None:
        self._num_failures += 1
        self._problem = error_text(error)
        if isinstance(error, StorageError | CheckpointError | OSError):
            self._problem = str(error)
        if self._num_failures == 1:
            text = "checkpoints cannot be mirrored now: %s; the run goes on, and this is tried again"
            logger.warning(text, self._problem)
        self._event("remote_failed", attempt=self._num_failures, error=self._problem)

    def _event(self, name: str, **values: Any) -> None:
        self._on_event({"event": name, "url": self._remote.url, **values})

    def _synchronize(self) -> None:
        """Make the store equal to the local directory. Raises TakenOverError, StorageError."""
        while True:
            self._prepare()
            path = self._choose()
            if path is None:
                break
            try:
                self._upload(path)
            finally:
                with self._lock:
                    self._busy = None
        there = self._mirrored | self._others
        for step in sorted(there - kept(there, **self._retention)):
            self._remote.remove(step)
            self._mirrored.discard(step)
            self._others.discard(step)

    def _prepare(self) -> None:
        """Make sure that the directory is this process's, and the first time see what it has."""
        remote = self._remote
        if self._owner is None:
            self._owner = self._claim()
        if not self._is_prepared:
            save_id(self._run_dir, self._owner, remote.url)
        found = remote.owner()
        if found is None:  # somebody has emptied the store
            remote.set_owner(self._owner)
            self._is_prepared = False
        elif found != self._owner:
            who = f"another run ({found.name})"
            if found.id == self._owner.id:
                who = "another process of this run"
            raise TakenOverError(f"{who} writes to {remote.url}")
        if self._is_prepared:
            return
        left = remote.clean()
        if left:
            steps = counted(len(left), "step")
            logger.info("%s: removed what interrupted uploads left of %s", remote.url, steps)
        later = []
        if self._step >= 0:
            later = remote.set_aside_after(self._step)
        if later:
            names = ", ".join(map(checkpoint_name, later))
            text = "%s: %s: of a branch that this run has left; marked %s there"
            logger.warning(text, remote.url, names, ABANDONED)
        self._step = -1  # set aside once
        there, local = set(remote.complete()), self._local()
        both = [step for step in local if step in there]
        same = {step for step in both if read_bytes(local[step] / MARKER) == remote.marker(step)}
        self._mirrored, self._others = same, there - same
        self._is_prepared = True

    def _local(self) -> dict[int, Path]:
        """The complete local checkpoints by step."""
        return {step_of(path): path for path in checkpoint.complete_checkpoints(self._checkpoints)}

    def _choose(self) -> Path | None:
        """The next checkpoint to upload, which is spared from now on; None: all are there."""
        with self._lock:
            local = self._local()
            every = local.keys() | self._mirrored | self._others
            wanted = kept(every, **self._retention) & local.keys() - self._mirrored
            self._busy = max(wanted, default=None)
        return None if self._busy is None else local[self._busy]

    def _upload(self, path: Path) -> None:
        started, marker = time.monotonic(), read_bytes(path / MARKER)
        if self._verified[0] != marker:
            self._verified = (marker, set())
        num_bytes = self._remote.upload(path, self._verified[1])
        step, seconds = step_of(path), time.monotonic() - started
        self._mirrored.add(step)
        self._others.discard(step)
        text = "uploaded %s/%s (%.1f MB in %.1f s)"
        logger.info(text, self._remote.url, path.name, num_bytes / 1e6, seconds)
        attempts, self._num_failures = self._num_failures + 1, 0
        took = {"bytes": num_bytes, "seconds": round(seconds, 3), "attempts": attempts}
        self._event("remote_uploaded", global_step=step, **took)


def start_mirror(
    claimed: Claimed, run_dir: RunDir, table: CheckpointTable, step: int, diagnostics: Diagnostics
) -> Mirror:
    """The mirror of a run that is about to begin, or to continue from `step` (rank 0)."""
    # Of its own, and never closed: the thread may write an event until the process ends.
    events, guard = EventWriter(run_dir.events), diagnostics.best_effort("events of checkpoint.remote")

    def record(event: Mapping[str, Any]) -> None:
        guard.run(events.write, event)

    return Mirror(claimed, run_dir, table, step=step, on_event=record)


def wait_for_mirror(mirror: Mirror, stop: StopRequest) -> None:
    """Wait for the last upload at the end of a run, until a stop is requested meanwhile."""
    was_requested = stop.requested
    mirror.wait(is_hurried=lambda: stop.requested and not was_requested)
