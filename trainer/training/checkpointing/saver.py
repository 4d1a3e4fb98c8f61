"""Saves a run's state and restores it: which part goes into which file of a checkpoint."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.config.schema import CheckpointTable
from trainer.distributed.env import RankInfo, gather_from_ranks
from trainer.distributed.shards import saving_ranks
from trainer.metrics.logger import get_logger
from trainer.training.checkpointing import checkpoint as files
from trainer.training.checkpointing.tensor_files import (
    Part,
    Rows,
    TensorPart,
    model_file,
    pack,
    rank_file,
    rows_file,
    write_part,
)
from trainer.training.checkpointing.train_state import Position, TrainState, model_part
from trainer.training.extension import Extensions

logger = get_logger(__name__)


class SaveError(Exception):
    """A checkpoint could not be written; the ones before it are untouched."""


@dataclass(kw_only=True, eq=False, repr=False)
class Saver:
    """Writes the checkpoints of a run."""

    directory: Path
    table: CheckpointTable
    info: RankInfo
    state: TrainState
    extensions: Extensions
    device: torch.device
    shared: Mapping[str, Any]
    """Further values, equal on all ranks, that fit JSON: config, versions, the wandb run."""
    on_saving: Callable[[float], None]
    """Called with the seconds that training has waited for a save."""
    last_saved: int = -1
    """Step of the last checkpoint, at first the one that the run continues from; -1 without one."""
    retain: Callable[[Path], None] | None = None
    """Called with a new checkpoint, to prune the others (rank 0); None: by `table`."""

    def __post_init__(self) -> None:
        # One thread: files are written one by one while training continues.
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writes: list[Future[None]] = []
        self.pending: tuple[int, dict[str, Any]] | None = None
        """Step and shared state of a save whose files are not a checkpoint yet."""
        self.began_at = self.last_saved
        self.must_save = False
        """A timed save is due, on all ranks alike: the next step is saved before another starts."""
        self._set_clock()

    def _set_clock(self) -> None:
        self.due_time = math.inf
        """`every_minutes` after the last save began; only rank 0's clock counts."""
        if self.info.is_main and self.table.every_minutes:
            self.due_time = time.monotonic() + 60 * self.table.every_minutes

    def is_written(self) -> bool:
        """Whether this rank's part of a background save is on disk, or failed."""
        return all(write.done() for write in self._writes)

    def save(self, position: Position, *, in_background: bool) -> None:
        """Save the state after the last finished step. Collective; a SaveError is raised on all ranks."""
        started = time.monotonic()
        self._conclude()
        step = position.step
        self.began_at, self.must_save = step, False
        self._set_clock()
        staging = files.staging_dir(self.directory, step)
        parts = self._parts(position)  # refer to the tensors, without copies
        self._together(lambda: self._make_staging(staging))  # before any rank writes
        shared = {
            "step": step,
            "reached": position.reached,
            "tokens": [position.tokens_before, position.tokens],
            "micro_batches": [position.micro_batches, position.micro_batches_since],
            "world_size": self.info.world_size,
            "data_shards": self.info.world_size * len(self.state.shards),
            "model_files": saving_ranks(self.state.model),
            "evaluation_is_due": position.evaluation_is_due,
            **self.state.shared(),
            "extensions": self.extensions.state_dict(),
            **self.shared,
        }
        self.pending = step, shared
        if in_background:
            # The tensors change while the thread writes: it gets copies.
            for name, part in _copies(parts, is_pinned=self.device.type == "cuda").items():
                self._writes.append(self._writer.submit(write_part, staging / name, part))
        else:

            def write_all() -> None:
                for name, part in parts.items():
                    write_part(staging / name, part)

            self._together(write_all)
            self._conclude()
        self.on_saving(time.monotonic() - started)

    def publish_pending(self) -> None:
        """Publish the checkpoint of a pending save, if any. Collective, as `save`."""
        started = time.monotonic()
        self._conclude()
        self.on_saving(time.monotonic() - started)

    def _conclude(self) -> None:
        if self.pending is None:
            return
        (step, shared), self.pending = self.pending, None
        writes, self._writes = self._writes, []
        # All ranks must have written before rank 0 publishes.
        self._together(lambda: [write.result() for write in writes])
        self._together(lambda: self._publish(step, shared))
        self.last_saved = step

    def close(self) -> None:
        """Conclude what is pending, and end the thread."""
        self._conclude()
        self._writer.shutdown()

    def _parts(self, position: Position) -> dict[str, Part]:
        """The files that this rank writes."""
        state, rank = self.state, self.info.rank
        parts: dict[str, Part] = {}
        for index, shard in enumerate(state.shards):
            own: dict[str, Any] = {"data": position.data_states[index]}
            own["unlogged"] = position.counts(index)
            ledger = state.ledgers.get(shard.number)
            if ledger is not None:
                own["ledger"] = ledger.state_dict(with_rows=False)
                own["unlogged"]["ledger"] = ledger.undrained()
                parts[rows_file(shard.number)] = ledger.held_rows()
            values, tensors = pack(own)
            rows = {name: Rows.all_of(tensor) for name, tensor in tensors.items()}
            parts[rank_file(shard.number)] = TensorPart(rows, values)
        model = model_part(state.model, state.optimizer, state.scaler, rank=rank)
        if model is not None:
            parts[model_file(rank)] = model
        return parts

    def _make_staging(self, staging: Path) -> None:
        if self.info.is_main:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)

    def _publish(self, step: int, shared: dict[str, Any]) -> None:
        if not self.info.is_main:
            return
        path, table = files.finish(self.directory, step, shared), self.table
        logger.info("saved %s", path)
        if self.retain is not None:
            self.retain(path)
        else:
            files.prune(self.directory, keep_last=table.keep_last, keep_every=table.keep_every)

    def _together(self, action: Callable[[], object]) -> None:
        """Do `action`, part of a save; if it fails on any rank, all raise."""
        problem = ""
        try:
            action()
        except OSError as error:
            problem = f"rank {self.info.rank}: {error.strerror} ({error.filename}){self._free()}"
        except RuntimeError as error:
            # torch raises it if the disk is full while it writes the last of a file.
            problem = f"rank {self.info.rank}: {str(error).splitlines()[0]}{self._free()}"
        problems = list(filter(None, gather_from_ranks(problem, world_size=self.info.world_size)))
        if problems:
            if self.info.is_main:
                files.discard_staging(self.directory)  # or the disk stays full
            raise SaveError(f"the checkpoint could not be written: {problems[0]}")

    def _free(self) -> str:
        try:
            return f"; {shutil.disk_usage(self.directory).free / 1e6:.1f} MB are free"
        except OSError:
            return ""


def _copies(parts: Mapping[str, Part], *, is_pinned: bool) -> dict[str, Part]:
    """The parts with copies of their tensors on the host, pinned to copy faster from CUDA."""

    def copy(tensor: Tensor) -> Tensor:
        # torch keeps pinned memory for the next save.
        place = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_pinned)
        return place.copy_(tensor.detach(), non_blocking=True)

    copied: dict[str, Part] = {}
    for name, part in parts.items():
        if not isinstance(part, TensorPart):
            copied[name] = list(part)  # which are copies
        else:
            rows = {key: each._replace(tensor=copy(each.tensor)) for key, each in part.rows.items()}
            copied[name] = part._replace(rows=rows)
    if is_pinned:
        # Asynchronous copies must be done before the thread writes and the next step trains.
        torch.cuda.current_stream().synchronize()
    return copied
