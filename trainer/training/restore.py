"""Restores a run's state from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer.config.load import flatten, recorded_settings
from trainer.config.schema import RunConfig
from trainer.data.fingerprint import (
    EVAL,
    FINGERPRINT_KEY,
    Fingerprint,
    blocks_per_file,
    compare,
    mark_files,
)
from trainer.data.formats import files_of
from trainer.data.layout import refuse_empty_files
from trainer.distributed.env import RankInfo, gather_from_ranks, raise_on_all_ranks
from trainer.errors import UserError
from trainer.import_path import users_code
from trainer.metrics.catalog_rows import EPOCHS
from trainer.metrics.logger import get_logger
from trainer.training.checkpoint import loading
from trainer.training.plan import Plan
from trainer.training.sources import Source
from trainer.training.tensor_files import read_rank
from trainer.training.train_state import Position, TrainState, load_optimizer, load_weights_of, open_model
from trainer.wording import counted

logger = get_logger(__name__)


def restore(path: Path, saved: Mapping[str, Any], plan: Plan, state: TrainState, info: RankInfo) -> Position:
    """Load a checkpoint, with its state.json, into a run. Returns where the run continues.

    A UserError if a file is damaged, or does not fit the model or the data.
    """
    # In an order in which a wrong checkpoint is refused before anything large is read.
    num_saved, num_shards = saved["data_shards"], plan.facts.data_shards
    is_same = num_saved == num_shards
    with loading(path, "files"):
        tensors = open_model(path, saved, rank=info.rank)
        # The usual resume: each rank reads its own files alone.
        numbers = [shard.number for shard in state.shards] if is_same else range(num_saved)
        parts = {number: read_rank(path, number) for number in numbers}
    with loading(path, "weights"):
        load_weights_of(state.model, tensors)
    with loading(path, "optimizer"):
        load_optimizer(state.optimizer, state.model, tensors)
    if state.scaler.is_enabled():
        with loading(path, "loss scaling"):
            state.scaler.load_state_dict(tensors.values["scaler"])
    with loading(path, "averages"):
        state.load_shared(saved)
    if not is_same:
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
        may_grow, in_flight = not plan.config.ledger.capacity, plan.facts.groups_in_flight
        _restore_ledgers(state, saved, parts, is_same=is_same, in_flight=in_flight, may_grow=may_grow)
    position.reached, position.evaluation_is_due = saved["reached"], saved["evaluation_is_due"]
    position.tokens_before, position.tokens = saved["tokens"]
    with loading(path, "counts"):
        if is_same:
            for index, shard in enumerate(state.shards):
                position.load_counts(index, parts[shard.number]["unlogged"])
        elif state.shards[0].number == 0:
            # Only epochs are totals since the start: the first shard takes over those of all.
            for part in parts.values():
                pool = part["unlogged"]["pool"]
                position.unlogged[0].add({key: pool[key][0] for key in pool if key.startswith(EPOCHS)})
    logger.info("resuming after step %d from %s", position.step, path)
    return position


def _restore_ledgers(
    state: TrainState,
    saved: Mapping[str, Any],
    parts: Mapping[int, Mapping[str, Any]],
    *,
    is_same: bool,
    in_flight: int,
    may_grow: bool,
) -> None:
    layout = saved.get("state_layout")
    if state.ledgers and layout != state.state_layout:
        raise ValueError(f"it holds states of {layout}, the model's are {state.state_layout}")
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
        shards = [part["ledger"] for part in parts.values() if "ledger" in part]
        groups = shard.dataset.groups_in_flight
        if groups is None:  # those in flight here need room besides the others'
            shard.ledger.load_shards(shards, room=in_flight)
        else:  # no other group will be looked up
            shard.ledger.load_shards(shards, owned=partial(np.isin, test_elements=groups))


# Changing these changes the shapes of weights, the data, or which tokens the stored states follow;
# the data set itself refuses what changes its cells.
BREAKING: tuple[str, ...] = ("model.", "data.tokenizer", "data.vocab_size", "data.seq_len")
BREAKING += ("run.seed", "optimizer.name", "optimizer.target", "optimizer.group")
# The checkpoint has its own weights; the contract only refuses models.
HARMLESS = ("model.weights", "model.contract")
# These say where and how a run is executed, not what it computes.
SILENT: tuple[str, ...] = ("run.", "metrics.", "sample.", "checkpoint.", "distributed.", "train.device")
SILENT += ("data.cache_", *HARMLESS)
# But this is reported: a model that needs shards may be resumed without them by mistake.
SAID = ("distributed.strategy",)


def check_config(saved: Mapping[str, Any], config: RunConfig) -> None:
    """Refuse a config that does not fit the checkpoint's state, and warn about other changes."""
    changed = changed_settings(saved, {}, config, {})
    breaking = [key for key in changed if key.startswith(BREAKING) and key not in HARMLESS]
    if breaking:
        listed = [f"{key}: {changed[key].before!r} -> {changed[key].after!r}" for key in breaking]
        problem = f"the checkpoint was made with another config: {', '.join(listed)}"
        raise UserError("--resume", problem, "restore its settings, or start a new run")
    for key, (before, after) in changed.items():
        if key in SAID or not key.startswith(SILENT):
            logger.warning("resuming with another config: %s: %r -> %r", key, before, after)
        if key == "train.ema" and not after:
            logger.warning("the averaged weights of the checkpoint are dropped")


class Change(NamedTuple):
    """A setting before and after a resume; None: the key is not set there."""

    before: Any
    after: Any


def changed_settings(
    saved: Mapping[str, Any], saved_environment: Mapping[str, Any], config: RunConfig, environment: Mapping[str, Any]
) -> dict[str, Change]:
    """The settings and versions that differ from a checkpoint's, by key."""
    before = recorded_settings(saved, saved_environment)
    now = recorded_settings(config.model_dump(mode="json"), environment)
    chosen = flatten(config.model_dump(mode="json", exclude_defaults=True))
    # A key that the saved config lacks is newer than the checkpoint: the default was used.
    unchanged = now.keys() - before.keys() - chosen.keys()
    changes = {key: Change(before.get(key), now.get(key)) for key in sorted((before.keys() | now.keys()) - unchanged)}
    return {key: each for key, each in changes.items() if each.before != each.after}


def check_data(plan: Plan, saved: Mapping[str, Any] | None, info: RankInfo) -> Fingerprint:
    """Fingerprint the data files and compare them with a checkpoint's. Each rank reads its share.

    `saved`: the checkpoint's state.json; None for a run that begins. A UserError if a file cannot
    be read, or is empty, or if the data changed.
    """
    world_size = info.world_size
    sources = {source.name: source for source in plan.sources}
    sources |= {EVAL + each.name: each for each in plan.eval_sources}
    before = None
    with raise_on_all_ranks(world_size=world_size):
        if saved is not None:
            with users_code("--resume", "the checkpoint is damaged", "use another checkpoint"):
                before = Fingerprint(**saved[FINGERPRINT_KEY])
        names, files = _data_files(sources, plan.config.data.tokenizer)
        # Sampled as the checkpoint was, or nothing could be compared.
        blocks = before.blocks if before is not None else blocks_per_file(len(files))
        own = mark_files(files[info.rank :: world_size], blocks=blocks)
    marks = [""] * len(files)
    for rank, found in enumerate(gather_from_ranks(own, world_size=world_size)):
        marks[rank::world_size] = found
    tokenizer = marks.pop() if len(files) > len(names) else ""
    by_file = dict(zip(names, marks, strict=True))
    with raise_on_all_ranks(world_size=world_size):
        # Refused now: a run would find them when it comes to read them, perhaps hours later.
        empty = [path for (_, path), mark in by_file.items() if mark.startswith("0:")]
        refuse_empty_files(empty, len(names))
    now = Fingerprint(blocks, tokenizer, _by_source(by_file, sources, before))
    if before is not None:
        changed = compare(before, now)
        with raise_on_all_ranks(world_size=world_size):
            if changed:
                problem = f"the data changed since the checkpoint was saved: {'; '.join(changed)}"
                fix = "put the data back, or start a new run from the weights (train export, then model.weights)"
                raise UserError("--resume", problem, fix)
        for name in before.sources.keys() - now.sources.keys():
            if not name.startswith(EVAL):
                logger.warning("source %s: it is in the checkpoint, and the config lacks it", name)
    return now


def _by_source(
    by_file: Mapping[tuple[str, str], str], sources: Mapping[str, Source], before: Fingerprint | None
) -> dict[str, dict[str, str]]:
    """The marks of all files by source; if one is off, the checkpoint's: it may be read again."""
    marked: dict[str, dict[str, str]] = {name: {} for name in sources}
    for (name, path), mark in by_file.items():
        marked[name][path] = mark
    for name, source in sources.items():
        if source.is_off:
            logger.info("source %s has weight 0: nothing of it is read", name)
            if before is not None:
                marked[name] = dict(before.sources.get(name, {}))
    return marked


def _data_files(sources: Mapping[str, Source], tokenizer: str) -> tuple[list[tuple[str, str]], list[Sequence[Path]]]:
    """(source, stream) of each stream, and its files; the tokenizer's file, if any, comes last."""
    names: list[tuple[str, str]] = []
    files: list[Sequence[Path]] = []
    for name, source in sources.items():
        if not source.is_off:
            names += [(name, stream.relative_path) for stream in source.streams]
            files += [files_of(Path(stream.path), source.table.format) for stream in source.streams]
    if tokenizer.endswith(".json"):
        files.append([Path(tokenizer)])
    return names, files
