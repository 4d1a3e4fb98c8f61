"""Saves a run's state and restores it: what of the objects goes into which file of a checkpoint."""

from __future__ import annotations

import copy
import errno
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.config.schema import CheckpointTable
from trainer.distributed.agree import gather_from_ranks
from trainer.distributed.env import RankInfo
from trainer.errors import UserError
from trainer.ledger.ledger import Ledger
from trainer.metrics.logger import get_logger
from trainer.training.checkpointing import checkpoint as files
from trainer.training.checkpointing.checkpoint import BackgroundWriter, CheckpointError
from trainer.training.checkpointing.generators import generator_states, set_generator_states

logger = get_logger(__name__)


class SaveError(Exception):
    """A checkpoint could not be written; the ones before it are untouched."""


class Saver:
    """Writes and reads the checkpoints of a run.

    Args:
        model: without DDP.
        shared_state: what is the same on all ranks and fits JSON (step counters, averages, config, versions).
    """

    def __init__(
        self,
        *,
        directory: Path,
        table: CheckpointTable,
        info: RankInfo,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        ledger: Ledger | None,
        device: torch.device,
        shared_state: Callable[[int], dict[str, Any]],
    ) -> None:
        self._directory = directory
        self._table = table
        self._info = info
        self._model = model
        self._optimizer = optimizer
        self._scaler = scaler
        self._ledger = ledger
        self._device = device
        self._shared_state = shared_state
        self._writer = BackgroundWriter()
        self._pending: tuple[int, dict[str, Any], int] | None = None
        """Step, shared state and size of a save whose files are not a checkpoint yet."""
        self.last_saved = -1
        self.last_save_sec: float | None = None
        self.unlogged: Mapping[str, Any] = {}
        """As given to `save`, of the checkpoint that was restored; empty on another number of ranks."""

    def is_due(self, step: int) -> bool:
        """Whether the config asks for a checkpoint after `step`."""
        return self._table.every > 0 and step % self._table.every == 0

    @property
    def is_written(self) -> bool:
        """Whether this rank's part of a background save is on disk, and the save not yet concluded."""
        return self._pending is not None and self._writer.is_idle

    def save(self, step: int, data_state: Any, unlogged: Mapping[str, Any], *, in_background: bool) -> None:
        """Save the state after `step`; every rank must call it.

        Args:
            data_state: of this rank's data set.
            unlogged: what this rank has counted since the last logged step.

        Raises:
            SaveError: on every rank, if any could not write its part.
        """
        started = time.monotonic()
        if self._pending is not None:
            self.conclude()
        staging = files.staging_dir(self._directory, step)
        parts = self._parts(data_state, unlogged)
        needed = num_bytes(parts)
        needed_by_all = sum(gather_from_ranks(needed, world_size=self._info.world_size))
        self._together(
            lambda: self._make_staging(staging, needed_by_all) if self._info.is_main else None, needed_by_all
        )
        self._pending = (step, self._shared_state(step), needed_by_all)
        if in_background:
            # The tensors change while the thread writes: it gets copies.
            for name, value in copy.deepcopy(parts).items():
                self._writer.submit(staging / name, value)
        else:
            self._together(lambda: _write_all(staging, parts), needed_by_all)
            self.conclude()
        self.last_save_sec = time.monotonic() - started

    def conclude(self) -> None:
        """Turn the pending save's files into a checkpoint; every rank must call it at the same step.

        Raises:
            SaveError: as `save`.
        """
        assert self._pending is not None, "no save is pending"
        (step, shared, needed), self._pending = self._pending, None
        self._together(self._writer.wait, needed)
        self._together(lambda: self._publish(step, shared) if self._info.is_main else None, needed)
        self.last_saved = step

    def close(self) -> None:
        """Conclude what is pending, and end the thread."""
        if self._pending is not None:
            self.conclude()
        self._writer.close()

    def restore(self, path: Path, saved_world_size: int) -> Any:
        """Load the weights and this rank's part, and return what the data set needs: its state or all ranks' states.

        Raises:
            UserError: a file is damaged or does not fit the model.
        """
        try:
            whole = files.read_tensors(path / files.MODEL_FILE)
            parts = self._read_parts(path, saved_world_size)
        except CheckpointError as error:
            raise UserError("--resume", str(error), "use auto, which falls back to a whole one") from None
        try:
            self._model.load_state_dict(whole["model"])
        except RuntimeError as error:
            problem = f"{path} holds another model: {str(error).splitlines()[-1].strip()}"
            raise UserError("--resume", problem, "resume with the [model] it was trained with") from None
        self._optimizer.load_state_dict(whole["optimizer"])
        if self._scaler.is_enabled():
            self._scaler.load_state_dict(whole["scaler"])
        if self._ledger is not None:
            self._ledger.load_state_dict([part["ledger"] for part in parts])
        if saved_world_size != self._info.world_size:
            return [part["data"] for part in parts]
        own = parts[self._info.rank]
        set_generator_states(own["generators"], self._device)
        # Absent in checkpoints of before it was kept.
        self.unlogged = own.get("unlogged", {})
        return own["data"]

    def _read_parts(self, path: Path, saved_world_size: int) -> list[dict[str, Any]]:
        """The parts of all saving ranks; where this rank's own is all that it needs, that one in every place."""
        if saved_world_size == self._info.world_size:
            own = files.read_tensors(path / files.rank_file(self._info.rank))
            if self._ledger is None or own["ledger"]["ownership"] == self._ledger.ownership:
                return [own] * saved_world_size
        return [files.read_tensors(path / files.rank_file(rank)) for rank in range(saved_world_size)]

    def _parts(self, data_state: Any, unlogged: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The files that this rank writes."""
        own: dict[str, Any] = {"data": data_state, "generators": generator_states(self._device), "unlogged": unlogged}
        if self._ledger is not None:
            own["ledger"] = self._ledger.state_dict()
        parts = {files.rank_file(self._info.rank): own}
        if self._info.is_main:
            parts[files.MODEL_FILE] = {
                "model": self._model.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "scaler": self._scaler.state_dict(),
            }
        return parts

    def _make_staging(self, staging: Path, needed: int) -> None:
        """Make the directory, if all that is to come has a place: what else is on the disk may need the rest of it."""
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        if shutil.disk_usage(staging).free < needed:
            staging.rmdir()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(staging))

    def _publish(self, step: int, shared: dict[str, Any]) -> None:
        path = files.finish(self._directory, step, shared)
        files.prune(self._directory, keep_last=self._table.keep_last, keep_every=self._table.keep_every)
        logger.info("saved %s", path)

    def _together(self, action: Callable[[], object], needed: int) -> None:
        """Do `action`, part of a save of `needed` bytes; if it fails on any rank, all ranks raise."""
        problem: str | None = None
        try:
            action()
        except OSError as error:
            problem = f"rank {self._info.rank}: {error.strerror} ({error.filename}){self._free()}"
        except RuntimeError as error:
            # What torch makes of a disk that is full while it writes the last of a file.
            problem = f"rank {self._info.rank}: {str(error).splitlines()[0]}{self._free()}"
        problems = [p for (p,) in gather_from_ranks((problem,), world_size=self._info.world_size) if p is not None]
        if problems:
            if self._info.is_main:
                files.discard_staging(self._directory)  # or the disk stays full
            raise SaveError(f"the checkpoint could not be written: {problems[0]}; it needs {needed / 1e6:.1f} MB")

    def _free(self) -> str:
        try:
            return f"; {shutil.disk_usage(self._directory).free / 1e6:.1f} MB are free"
        except OSError:
            return ""


def num_bytes(value: Any) -> int:
    """Bytes of the tensors in nested values, each storage once, and something for what is around them."""
    storages: dict[int, int] = {}
    others = 0

    def visit(found: Any) -> None:
        nonlocal others
        if isinstance(found, torch.Tensor):
            storages[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes()
        elif isinstance(found, Mapping):
            for part in found.values():
                visit(part)
        elif isinstance(found, list | tuple):
            for part in found:
                visit(part)
        # An entry of the archive with its alignment; an entry of the pickle.
        others += 512 if isinstance(found, torch.Tensor) else 16

    visit(value)
    return sum(storages.values()) + others


def _write_all(staging: Path, parts: Mapping[str, dict[str, Any]]) -> None:
    for name, value in parts.items():
        files.write_tensors(staging / name, value)
