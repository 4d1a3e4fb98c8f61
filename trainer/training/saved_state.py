"""Writes the checkpoints of a run, and restores it from one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.rules import reads_lanes
from trainer.data.fingerprint import FINGERPRINT_KEY, Fingerprint
from trainer.distributed.env import RankInfo, gather_from_ranks
from trainer.distributed.strategy import saving_ranks
from trainer.files import discard
from trainer.metrics.logger import get_logger
from trainer.training import Uploads
from trainer.training import checkpoint as files
from trainer.training.build import LANE_SETS
from trainer.training.checkpoint import loading
from trainer.training.extension import Extensions, RunView
from trainer.training.plan import Plan
from trainer.training.run_dir import environment
from trainer.training.tensor_files import (
    Rows,
    TensorPart,
    model_file,
    pack,
    rank_file,
    read_shard,
    rows_file,
    write_part,
    write_rows,
)
from trainer.training.train_state import Position, TrainState, load_optimizer, load_weights_of, model_part, open_model
from trainer.wording import counted

logger = get_logger(__name__)


class SaveError(Exception):
    """A checkpoint could not be written; the ones before it are untouched."""


class Saver:
    """Writes the checkpoints of a run.

    Args:
        fingerprint: of the data.
        uploads: to a store (rank 0), which then decides what stays here.
    """

    def __init__(
        self, view: RunView, extensions: Extensions, fingerprint: Fingerprint, uploads: Uploads | None
    ) -> None:
        self._view, self._extensions, self._fingerprint, self._uploads = view, extensions, fingerprint, uploads
        is_own = view.found is not None and view.found[0].resolve().parent == view.run_dir.checkpoints.resolve()
        self.last_saved = view.first_step if is_own else -1
        """Step of the last checkpoint here, at first of the one continued; -1: none, or old."""
        self._set_clock()

    def _set_clock(self) -> None:
        self.due_time = math.inf
        """`checkpoint.every_minutes` after the last save began; only rank 0's clock counts."""
        minutes = self._view.config.checkpoint.every_minutes
        if self._view.info.is_main and minutes:
            self.due_time = time.monotonic() + 60 * minutes

    def save(self) -> None:
        """Save the state after the last finished step. Collective, as is a failure: a SaveError."""
        view, position, state = self._view, self._view.position, self._view.state
        started = time.monotonic()
        position.must_save = False
        self._set_clock()
        # What a forward without a backward has left whole would be saved as if no rank had shards.
        view.strategy.reshard(state.model)
        staging = files.staging_dir(view.run_dir.checkpoints, position.step)
        self._together(lambda: self._make_staging(staging), on_main=True)
        shared = {  # equal on all ranks, and fits JSON
            "step": position.step,
            "reached": position.reached,
            "tokens": [position.tokens_before, position.tokens],
            "data_shards": view.info.world_size * len(state.shards),
            "model_files": saving_ranks(state.model),
            "evaluation_is_due": position.evaluation_is_due,
            "boundary_is_due": position.boundary_is_due,
            "is_over": position.step == position.last_step and not position.evaluation_is_due,
            "tracker": state.tracker.state_dict(),
            "gns": None if state.gns is None else state.gns.state_dict(),
            "state_layout": state.state_layout,
            "extensions": self._extensions.state_dict(),
            "wandb_run_id": view.run_dir.wandb_run_id,
            "config": view.config.model_dump(mode="json"),
            "environment": environment(view.info),
            FINGERPRINT_KEY: asdict(self._fingerprint),
            LANE_SETS: sorted(state.shards[0].dataset.lane_sets.items()),
            "evaluated": {} if view.evaluator is None else {each.name: each.read for each in view.evaluator.sets},
        }
        # All ranks must have written before rank 0 publishes.
        self._together(lambda: self._write(staging))
        self._together(lambda: self._publish(shared), on_main=True)
        self.last_saved = position.step
        view.record("checkpoint/save_sec", time.monotonic() - started)

    def _write(self, staging: Path) -> None:
        """Write the files of this rank's data shards, and of its part of the model."""
        state, position, rank = self._view.state, self._view.position, self._view.info.rank
        for index, shard in enumerate(state.shards):
            own: dict[str, Any] = {"data": position.data_states[index]}
            own["unlogged"] = {"pool": position.unlogged[index].state_dict(), "in_a_row": position.skipped_in_a_row}
            ledger = shard.ledger
            if ledger is not None:
                own["ledger"] = ledger.state_dict(with_rows=False)
                own["unlogged"]["ledger"] = ledger.undrained()
                write_rows(staging / rows_file(shard.number), ledger.held_rows())
            values, tensors = pack(own)
            rows = {name: Rows.all_of(tensor) for name, tensor in tensors.items()}
            write_part(staging / rank_file(shard.number), TensorPart(rows, values))
        model = model_part(state, rank=rank)
        if model is not None:
            write_part(staging / model_file(rank), model)

    def _make_staging(self, staging: Path) -> None:
        self._view.run_dir.check_owner()
        discard(staging)
        staging.mkdir(parents=True)

    def _publish(self, shared: dict[str, Any]) -> None:
        self._view.run_dir.check_owner()
        path = files.finish(self._view.run_dir.checkpoints, shared["step"], shared)
        logger.info("saved %s", path)
        if self._uploads is not None:
            self._uploads.publish(path)
            return
        table = self._view.config.checkpoint
        files.prune(path.parent, keep_last=table.keep_last, keep_every=table.keep_every)

    def _together(self, action: Callable[[], object], *, on_main: bool = False) -> None:
        """Do `action`, part of a save, on all ranks or on rank 0; if the disk or the device fails
        in it on any, all raise."""
        info, run_dir, problem = self._view.info, self._view.run_dir, ""
        try:
            if info.is_main or not on_main:
                action()
        except (OSError, RuntimeError) as error:
            problem = f"rank {info.rank}: {str(error).partition(chr(10))[0]}"
        problems = list(filter(None, gather_from_ranks(problem, world_size=info.world_size)))
        if problems:
            if info.is_main:
                with suppress(OSError):
                    run_dir.check_owner()
                    files.discard_staging(run_dir.checkpoints)  # or the disk stays full
            raise SaveError(f"the checkpoint could not be written: {problems[0]}")


def restore(path: Path, saved: Mapping[str, Any], plan: Plan, state: TrainState, info: RankInfo) -> Position:
    """Load a checkpoint, with its state.json, into a run. Returns where the run continues.

    A UserError if a file is damaged, or does not fit the model or the data.
    """
    # In an order in which a wrong checkpoint is refused before anything large is read.
    num_saved, num_shards = saved["data_shards"], plan.facts.data_shards
    with loading(path, "config"):
        is_same = num_saved == num_shards and _has_the_same_groups(saved["config"], plan)
    with loading(path, "files"):
        tensors = open_model(path, saved, rank=info.rank)
        # The usual resume: each rank reads its own files alone.
        numbers = [shard.number for shard in state.shards] if is_same else range(num_saved)
        parts = {number: read_shard(path, number) for number in numbers}
    with loading(path, "weights"):
        load_weights_of(state.model, tensors)
    with loading(path, "optimizer"):
        load_optimizer(state.optimizer, state.model, tensors)
    with loading(path, "averages"):
        state.tracker.load_state_dict(saved["tracker"])
        if state.gns is not None and saved["gns"] is not None:
            state.gns.load_state_dict(saved["gns"])
    if num_saved != num_shards:
        text = "saved with %s, resumed with %d: with as many rows and micro-batches, a step has other tokens "
        text += "(distributed.shards = %d keeps the batch, on any number of ranks that divides it)"
        logger.warning(text, counted(num_saved, "data shard"), num_shards, num_saved)
    with loading(path, "data cursors"):
        blends = {number: part["data"] for number, part in parts.items()}
        for shard in state.shards:
            # The cursors of other shards are redistributed: each needs all of them.
            shard.dataset.load_state_dict(blends[shard.number] if is_same else [*blends.values()])
        position = Position.of(state, saved["step"])
    # After the data cursors, which know the documents that are in flight.
    with loading(path, "ledger"):
        layout = saved.get("state_layout")
        if state.ledgers and layout != state.state_layout:
            raise ValueError(f"it holds states of {layout}, the model's are {state.state_layout}")
        _restore_ledgers(state, parts, is_same=is_same, may_grow=not plan.config.ledger.capacity)
    position.reached = saved["reached"]
    position.evaluation_is_due = saved["evaluation_is_due"] and plan.config.eval.every > 0
    position.boundary_is_due = saved["boundary_is_due"]
    position.tokens_before, position.tokens = saved["tokens"]
    with loading(path, "counts"):
        # The same in all parts.
        position.skipped_in_a_row = int(parts[min(parts)]["unlogged"]["in_a_row"])
        if is_same:
            for index, shard in enumerate(state.shards):
                position.unlogged[index].load_state_dict(parts[shard.number]["unlogged"]["pool"])
    logger.info("resuming after step %d from %s", position.step, path)
    return position


def _has_the_same_groups(saved: Mapping[str, Any], plan: Plan) -> bool:
    """Whether each shard can keep the groups it had open. It cannot if a source that reads batches
    of one stream has changed their size, or how many streams it keeps open."""
    if reads_lanes(plan.config) or any(source.table.target is not None for source in plan.sources):
        return True
    before, now = map(_stream_sizes, (saved["data"], plan.config.data.model_dump(mode="json")))
    return all(before[name] == now[name] for name in before.keys() & now.keys())


def _stream_sizes(data: Mapping[str, Any]) -> dict[str, list[Any]]:
    """By source: how many streams it keeps open, and the sizes of its batches."""
    found = {}
    for source in data["source"]:
        mixing = {**data["mixing"], **{key: own for key, own in source["mixing"].items() if own is not None}}
        keys = ("num_streams_mixed", "batch_size", "batch_size_by_modality")
        found[source["name"]] = [mixing.get(key) for key in keys]
    return found


def _restore_ledgers(
    state: TrainState, parts: Mapping[int, Mapping[str, Any]], *, is_same: bool, may_grow: bool
) -> None:
    for shard in state.shards:
        if shard.ledger is None:
            continue
        if may_grow:  # for documents that wait, in addition to those of the lanes
            shard.ledger.reserve(len(shard.dataset.waiting_groups))
        # Their documents resume, perhaps after a long wait, and must not be swept.
        shard.ledger.keep(shard.dataset.waiting_groups)
        if is_same:
            shard.ledger.load_state_dict(parts[shard.number]["ledger"])
            shard.ledger.load_undrained(parts[shard.number]["unlogged"]["ledger"])
            continue
        saved = [part["ledger"] for part in parts.values() if "ledger" in part]
        groups = shard.dataset.groups_in_flight
        if groups is None:  # the states of other ranks are kept, too, and need room
            shard.ledger.load_shards(saved)
        else:  # no other group will be looked up
            shard.ledger.load_shards(saved, owned=partial(np.isin, test_elements=groups))
