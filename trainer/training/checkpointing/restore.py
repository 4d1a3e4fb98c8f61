"""Restores a run's state from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer.config.load import flatten, recorded_settings
from trainer.config.schema import RunConfig
from trainer.data.blend import ALL_RANKS, BlendDataset, parts_of, without_sources
from trainer.data.fingerprint import (
    EVAL,
    FINGERPRINT_KEY,
    DataChange,
    Fingerprint,
    SourceChange,
    blocks_per_file,
    compare,
    has_contents,
    keep_contents,
    mark_files,
    moved,
    stream_files,
)
from trainer.data.lanes import keep_places
from trainer.data.layout import refuse_empty_files, renamed
from trainer.data.shard_source import ShardSource, StreamSource
from trainer.distributed.env import RankInfo, gather_from_ranks, raise_on_all_ranks
from trainer.errors import UserError
from trainer.import_path import users_code
from trainer.ledger.ledger import Ledger
from trainer.metrics.catalog.rows_data import EPOCHS
from trainer.metrics.logger import get_logger
from trainer.training.checkpointing.checkpoint import data_shards, loading
from trainer.training.checkpointing.tensor_files import read_rank
from trainer.training.checkpointing.train_state import Position, TrainState, load_optimizer, load_weights_of, open_model
from trainer.training.setup.plan import Plan
from trainer.training.setup.sources import Source
from trainer.wording import counted

logger = get_logger(__name__)


def restore(
    path: Path, saved: Mapping[str, Any], plan: Plan, state: TrainState, info: RankInfo, data: DataCheck
) -> Position:
    """Load the checkpoint in `path`, whose state.json is `saved`, into the parts of a run. Returns where the run continues.

    Raises:
        UserError: a file is damaged, or the checkpoint does not fit the model, the data or the config.
    """
    with loading(path, "config"):
        check_config(saved["config"], plan.config)
    num_saved, num_shards = data_shards(saved), plan.facts.data_shards
    is_same = num_saved == num_shards
    with loading(path, "files"):
        tensors = open_model(path, saved, rank=info.rank)
        parts = _read_parts(path, num_saved, state, needs_all=not is_same or bool(data.change))
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
        text = "saved with %s, resumed with %d: a step has another number of tokens "
        text += "(distributed.shards = %d keeps the batch, on any number of ranks that divides it)"
        logger.warning(text, counted(num_saved, "data shard"), num_shards, num_saved)
    with loading(path, "data cursors"):
        blends = {number: part["data"] for number, part in parts.items()}
        if data.change:
            holds_out = plan.config.eval.holdout_fraction > 0
            blends = dict(enumerate(restart_changed([*blends.values()], state.dataset, data, holds_out=holds_out)))
        for shard in state.shards:
            shard.dataset.load_state_dict(blends[shard.number] if is_same else [*blends.values()])
        position = Position.of(state, saved["step"])
    with loading(path, "ledger"):
        # Groups in flight here need room beside those of a checkpoint of other shards.
        _restore_ledgers(state, saved, parts, room=0 if is_same else plan.facts.groups_in_flight)
    position.reached, position.evaluation_is_due = saved["reached"], saved["evaluation_is_due"]
    position.tokens_before, position.tokens = saved["tokens"]
    before = saved["config"]["train"]["micro_batches"]
    was_auto = isinstance(before, Mapping) and before["schedule"] == "auto"
    if plan.config.micro_batches.auto is None or was_auto:
        position.micro_batches, position.micro_batches_since = saved["micro_batches"]
    else:  # `auto` begins here
        position.micro_batches_since = position.step + 1
    if is_same:
        with loading(path, "counts"):
            for index, shard in enumerate(state.shards):
                position.load_counts(index, parts[shard.number]["unlogged"])
    elif state.shards[0].number == 0:  # takes over what all shards have read, which is a total since the start
        for part in parts.values():
            read = part["unlogged"]["pool"]
            position.unlogged[0].add({key: read[key][0] for key in read if key.startswith(EPOCHS)})
    logger.info("resuming after step %d from %s", position.step, path)
    return position


def _restore_ledgers(
    state: TrainState, saved: Mapping[str, Any], parts: Mapping[int, Mapping[str, Any]], *, room: int
) -> None:
    if state.ledgers and saved.get("state_layout") != state.state_layout:
        raise ValueError(f"it holds states of {saved.get('state_layout')}, the model's are {state.state_layout}")
    for shard in state.shards:
        if shard.ledger is not None:
            shard.ledger.keep(shard.dataset.waiting_groups)
    for number, ledger in state.ledgers.items():
        if _is_own_ledger(parts, number, ledger):
            ledger.load_state_dict([parts[number]["ledger"]] * ledger.owners.world_size)
            ledger.load_undrained(parts[number]["unlogged"]["ledger"])
        else:
            shards, owned = [part["ledger"] for part in parts.values() if "ledger" in part], None
            for each in state.shards:
                if each.ledger is ledger and (groups := each.dataset.groups_in_flight) is not None:
                    owned, room = partial(np.isin, test_elements=groups), 0  # no other will be asked for
            ledger.load_state_dict(shards, owned=owned, room=room)


def _read_parts(path: Path, num_saved: int, state: TrainState, *, needs_all: bool) -> dict[int, dict[str, Any]]:
    """The parts of all data shards, by number; those of this rank alone where it needs no others."""
    if not needs_all:
        own = {shard.number: read_rank(path, shard.number) for shard in state.shards}
        if all(_is_own_ledger(own, number, ledger) for number, ledger in state.ledgers.items()):
            return own
    return {number: read_rank(path, number) for number in range(num_saved)}


def _is_own_ledger(parts: Mapping[int, Mapping[str, Any]], number: int, ledger: Ledger) -> bool:
    """Whether the states that shard `number` saved are those that this ledger holds, all of them and no others."""
    saved, owners = parts.get(number, {}).get("ledger"), ledger.owners
    return saved is not None and all(saved[name] == value for name, value in owners._asdict().items())


# Changing these changes the shapes of weights, the data, or which tokens the stored states follow; the data set itself
# refuses what changes its cells.
BREAKING = (
    "model.",
    "data.tokenizer",
    "data.vocab_size",
    "data.seq_len",
    "train.tbptt_cells",
    "run.seed",
    "optimizer.name",
    "optimizer.target",
    "optimizer.group",
)
# The checkpoint has weights of its own; trust and contract decide which models are refused, not what they compute.
HARMLESS = ("model.weights", "model.trust", "model.contract")
# These say where and how a run is executed, not what it computes.
SILENT = (
    "run.",
    "metrics.",
    "sample.",
    "checkpoint.",
    "distributed.",
    "train.device",
    "ledger.probe_",
    "data.cache_",
    *HARMLESS,
)
# But this is said: a model that needs shards may be resumed without them by mistake.
SAID = ("distributed.strategy",)


def check_config(saved: Mapping[str, Any], config: RunConfig) -> None:
    """Compare the config of a checkpoint with that of the run that resumes from it.

    Raises:
        UserError: keys differ that the saved state does not fit.
    """
    changed = changed_settings(saved, {}, config, {})
    breaking = [key for key in changed if key.startswith(BREAKING) and key not in HARMLESS]
    if breaking:
        listed = ", ".join(f"{key}: {changed[key].before!r} -> {changed[key].after!r}" for key in breaking)
        problem = f"the checkpoint was made with another config: {listed}"
        raise UserError("--resume", problem, "restore them, or start a new run")
    for key, (before, after) in changed.items():
        if key in SAID or not key.startswith(SILENT):
            logger.warning("resuming with another config: %s: %r -> %r", key, before, after)


class Change(NamedTuple):
    """What a resume changed a setting from and to; None: there the key is not set."""

    before: Any
    after: Any


def changed_settings(
    saved: Mapping[str, Any], saved_environment: Mapping[str, Any], config: RunConfig, environment: Mapping[str, Any]
) -> dict[str, Change]:
    """What differs from the settings and versions that a checkpoint was made with; see `recorded_settings` for the keys."""
    before = recorded_settings(saved, saved_environment)
    now = recorded_settings(config.model_dump(mode="json"), environment)
    chosen = flatten(config.model_dump(mode="json", exclude_defaults=True))
    # A key that the saved config lacks is newer than the checkpoint: it was made with what is the default now.
    unchanged = now.keys() - before.keys() - chosen.keys()
    pairs = {key: Change(before.get(key), now.get(key)) for key in sorted((before.keys() | now.keys()) - unchanged)}
    return {key: change for key, change in pairs.items() if change.before != change.after}


@dataclass(frozen=True)
class DataPolicy:
    """What the command line says about data that changed."""

    verify_whole: bool = False
    """`--verify-data`: hash the whole content of every file."""
    accept_change: bool = False
    """`--accept-data-change`: begin the next epoch of sources whose files changed."""
    compares: bool = True
    """False: only find files that moved."""


@dataclass(frozen=True)
class DataCheck:
    """The data of a run that begins or resumes: its plan, in which files that moved have the names of the checkpoint, their
    fingerprint `now`, that of the checkpoint (None without one), and what differs between the two, accepted."""

    plan: Plan
    now: Fingerprint
    saved: Fingerprint | None = None
    change: DataChange = field(default_factory=DataChange)


def check_data(plan: Plan, saved: Mapping[str, Any] | None, info: RankInfo, policy: DataPolicy) -> DataCheck:
    """Mark the data files and compare them with a checkpoint's; every rank must call it, and reads its share of them.

    Args:
        saved: the checkpoint's state.json; None for a run that begins.

    Raises:
        UserError: a file cannot be read, or is empty; or the data changed, and that is not accepted.
    """
    sources = {source.name: source for source in plan.sources}
    sources |= {EVAL + each.name: each for each in plan.eval_sources}
    # Each node has copies of its own of what URLs name.
    keys = [copy.key for source in sources.values() for copy in source.copies]
    copies = gather_from_ranks(keys, world_size=info.world_size)
    with raise_on_all_ranks(world_size=info.world_size):
        if any(each != keys for each in copies):
            problem = "the objects of a source that is a URL changed while the ranks started"
            raise UserError("data.source", problem, "start again, once nobody writes there")
        before = None
        if saved is not None:
            with users_code("--resume", "the checkpoint is damaged", "use another checkpoint"):
                before = Fingerprint.from_state(saved.get(FINGERPRINT_KEY))
        names, files = _data_files(sources, plan.config.data.tokenizer)
        blocks = blocks_per_file(len(files)) if before is None else before.blocks
        own = mark_files(files[info.rank :: info.world_size], blocks=blocks, whole=policy.verify_whole)
    marks = [""] * len(files)
    for rank, found in enumerate(gather_from_ranks(own, world_size=info.world_size)):
        marks[rank :: info.world_size] = found
    tokenizer = marks.pop() if len(files) > len(names) else ""
    marked: dict[str, dict[str, str]] = {name: {} for name in sources}
    for (name, path), mark in zip(names, marks, strict=True):
        marked[name][path] = mark
    for name in [name for name, source in sources.items() if source.is_off]:
        logger.info("source %s has weight 0: nothing of it is read", name)
        if before is not None:  # it may be read again
            marked[name] = dict(before.sources.get(name, {}))
    with raise_on_all_ranks(world_size=info.world_size):
        # A run would find them only when it comes to read them, hours later perhaps.
        empty = [path for (_, path), mark in zip(names, marks, strict=True) if mark.startswith("0:")]
        refuse_empty_files(empty, len(names))
    if before is None:
        return DataCheck(plan, Fingerprint(blocks, tokenizer, marked))
    plan = _with_former_names(plan, before, marked)
    now = Fingerprint(blocks, tokenizer, marked)
    if not policy.compares:
        return DataCheck(plan, now, before)
    change = compare(before, now)
    with raise_on_all_ranks(world_size=info.world_size):
        if change and not policy.accept_change:
            raise _refusal(change)
    if policy.verify_whole and not has_contents(before):
        logger.warning("--verify-data: the checkpoint has sizes and samples only: contents are verified from now on")
    if policy.accept_change:
        _say_accepted(change)
    return DataCheck(plan, keep_contents(before, now), before, change)


def _with_former_names(plan: Plan, before: Fingerprint, marked: dict[str, dict[str, str]]) -> Plan:
    """The plan, and `marked`, with the checkpoint's names of the files of `paths` that moved or are spelled otherwise."""

    def kept(source: Source, prefix: str = "") -> Source:
        key = prefix + source.name
        names = moved(before.sources.get(key, {}), marked[key]) if source.table.paths is not None else {}
        if not names:
            return source
        logger.info("source %s: %s moved, by their fingerprints the checkpoint's", key, counted(len(names), "file"))
        marked[key] = dict(sorted((names.get(name, name), mark) for name, mark in marked[key].items()))
        return replace(source, streams=renamed(source.streams, names))

    sources, sets = list(map(kept, plan.sources)), [kept(source, EVAL) for source in plan.eval_sources]
    return replace(plan, sources=sources, eval_sources=sets)


def _refusal(change: DataChange) -> UserError:
    fix = "put the data back, or add --accept-data-change to begin the next epoch of these sources, of the files as they are"
    if change.removed:
        fix = "put the source back, with weight = 0 to read nothing of it (a renamed one under its old name)"
        fix += ", or add --accept-data-change to continue without it"
    return UserError("--resume", f"the data changed since the checkpoint was saved: {change}", fix)


def _say_accepted(change: DataChange) -> None:
    if not change:
        logger.info("--accept-data-change: no data changed: every stream continues")
    for name in change.removed:
        logger.warning("--accept-data-change: source %s: continuing without it, since the config lacks it", name)
    text = "--accept-data-change: validation set %s: %s; its figures from here on do not compare with earlier ones"
    for name, each in change.sources.items():
        if name.startswith(EVAL):
            logger.warning(text, name.removeprefix(EVAL), each)


def _data_files(sources: Mapping[str, Source], tokenizer: str) -> tuple[list[tuple[str, str]], list[list[Path]]]:
    """(source, stream) of each stream, and its files; the tokenizer's file, if there is one, comes last."""
    names: list[tuple[str, str]] = []
    files: list[list[Path]] = []
    for name, source in sources.items():
        if source.is_off:
            continue
        names += [(name, stream.relative_path) for stream in source.streams]
        files += stream_files(source.streams, source.table.format)
    return names, [*files, [Path(tokenizer)]] if tokenizer.endswith(".json") else files


def restart_changed(
    states: Sequence[Mapping[str, Any]], dataset: BlendDataset, check: DataCheck, *, holds_out: bool
) -> list[dict[str, Any]]:
    """The blend's states of all saving ranks, so that changed sources begin their next epoch; say so."""
    assert check.saved is not None
    rewritten = [without_sources(state, check.change.removed) for state in states]
    for source in dataset.sources:
        given: Any = source.dataset
        before = check.saved.sources.get(source.name)
        if before is None or source.name not in rewritten[0]["names"] or not isinstance(given, StreamSource):
            continue
        now = check.now.sources[source.name]
        change = check.change.sources.get(source.name)
        changed = list(now) if check.change.tokenizer else [] if change is None else change.changed
        if change is None and not changed:
            continue
        index = rewritten[0]["names"].index(source.name)
        parts = given.restarted(parts_of(rewritten, index))
        for state in rewritten:
            state["sources"][index], state["ended"][index] = {ALL_RANKS: parts}, False
            if isinstance(given, ShardSource):
                state["lanes"] = keep_places(state["lanes"], given, [*before], changed)
        text = "--accept-data-change: source %s: %s; it begins its next epoch, of the files as they are"
        logger.warning(text, source.name, change or SourceChange(changed))
        if changed and holds_out:
            text = (
                "--accept-data-change: source %s: documents are held out by their place in a stream: those of changed "
            )
            text += "streams may have been trained on, and held-out losses do not compare with earlier ones"
            logger.warning(text, source.name)
    return rewritten
