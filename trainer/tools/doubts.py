"""Checks before a run: settings that cannot be meant, and needs that this machine does not meet."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer.config.data_tables import MixingTable, SourceTable
from trainer.config.rules import data_shards, mixing_of, tokens_per_micro
from trainer.config.schema import RunConfig, TrainTable
from trainer.data.layout import unread_parts
from trainer.errors import UserError
from trainer.metrics.logger import get_logger
from trainer.tools import limits
from trainer.training.setup.plan import Plan, ledger_bytes
from trainer.training.setup.sources import Source
from trainer.training.step.optimizer import Length, make_schedule
from trainer.wording import counted, few, printable

if TYPE_CHECKING:
    from trainer.training.checkpointing.train_state import Position

logger = get_logger(__name__)
Doubt = tuple[str, str, str]
"""Key, problem and fix."""


def doubts(config: RunConfig, sources: Sequence[Source], eval_sources: Sequence[Source]) -> list[UserError]:
    """Settings of a run that work, but hardly as meant: warned about, not refused."""
    found = [*trained_on(sources, eval_sources), *_doubted_settings(config, eval_sources)]
    found += _doubted_readers(config, sources)
    found += _unread(sources, eval_sources)
    if config.eval.holdout_fraction > 0:
        found += _leaks(sources)
    return [UserError(*each) for each in found]


def _doubted_settings(config: RunConfig, eval_sources: Sequence[Source]) -> Iterator[Doubt]:
    evaluation, optimizer = config.eval, config.optimizer
    if (eval_sources or evaluation.target is not None) and not evaluation.every:
        problem = "is 0: the run evaluates neither [[eval.source]] nor eval.target"
        yield "eval.every", problem, "set it to the number of steps between evaluations"
    if optimizer.lr > limits.LARGEST_LR and optimizer.name == "adamw" and optimizer.target is None:
        problem = f"{optimizer.lr:g}: AdamW moves every weight by about this much in every step"
        yield "optimizer.lr", problem, "set it between 1e-5 and 1e-2"
    for unit in ("steps", "tokens"):
        warmup, length = getattr(config.scheduler, f"warmup_{unit}"), getattr(config.train, unit)
        if length and warmup > limits.LONG_WARMUP * length:
            problem = f"{warmup:,} of {length:,} {unit}: most of the run is below the learning rate"
            yield f"scheduler.warmup_{unit}", problem, f"set it to at most {max(length // 10, 1):,}"


def _doubted_readers(config: RunConfig, sources: Sequence[Source]) -> Iterator[Doubt]:
    """More readers than a source has streams, where the number is set and not the default."""
    # A resolved config has the default written out.
    default = MixingTable.model_fields["num_streams_mixed"].default
    is_set = config.data.mixing.num_streams_mixed != default
    for source in sources:
        wanted, streams = mixing_of(config, source.table).num_streams_mixed, len(source.streams)
        if (is_set or source.table.mixing.num_streams_mixed is not None) and wanted > streams > 0:
            problem = f"{wanted} readers, but the source has {counted(streams, 'stream')}: all are open at once"
            yield f"source {source.name}: mixing.num_streams_mixed", problem, f"set it to at most {streams}"


def _unread(sources: Sequence[Source], eval_sources: Sequence[Source]) -> Iterator[Doubt]:
    """Modalities of a root that no source reads, and files in no modality's directory."""
    readers: dict[str, list[SourceTable]] = {}
    for source in (*sources, *eval_sources):
        if source.streams and source.table.root is not None:
            readers.setdefault(os.path.realpath(source.table.root), []).append(source.table)
    for tables in readers.values():
        root = str(tables[0].root)
        read: set[str] | None = {name for table in tables for name in table.modalities or ()}
        if any(table.modalities is None for table in tables):  # which reads all of them
            read = None
        modalities, files = unread_parts(Path(root), read, tables[0].format)
        if modalities:
            problem = f"has modalities that no source reads: {few(modalities)}"
            yield f"root {root}", problem, "add them to modalities of a source, or a source of their own"
        if files:
            has = counted(len(files), "file")
            problem = f"has {has} in no modality's directory, which no source reads: {few(files)}"
            yield f"root {root}", problem, f"move those that are data into {root}/<modality>/"


def _leaks(sources: Sequence[Source]) -> Iterator[Doubt]:
    """Files that are read under several names: which documents are held out depends on the name."""
    names: dict[tuple[int, int], dict[str, str]] = {}
    for source in sources:
        for stream in source.streams:
            names.setdefault(_identity(stream.path), {}).setdefault(stream.relative_path, source.name)
    twice = [found for found in names.values() if len(found) > 1]
    if twice:
        named = list(twice[0].items())[:2]
        first = " and ".join(f"{printable(name)} (source {source})" for name, source in named)
        files = f"{counted(len(twice), 'file')} under several names, such as {first}"
        fix = "read a file once, or in each source below the same root"
        yield "eval.holdout_fraction", f"{files}: each trains on what the other holds out", fix


def trained_on(sources: Sequence[Source], eval_sources: Sequence[Source]) -> Iterator[Doubt]:
    """Validation sets with files that are trained on."""
    trained = {_identity(stream.path): source.name for source in sources for stream in source.streams}
    for each in eval_sources:
        shared = [stream for stream in each.streams if _identity(stream.path) in trained]
        if shared:
            files = "a file of it is"
            if len(shared) > 1:
                files = f"{counted(len(shared), 'file')} of it are"
            source = trained[_identity(shared[0].path)]
            problem = f"{files} trained on, by source {source}: {printable(shared[0].relative_path)}"
            yield f"eval source {each.name}", problem, "leave them out of one of the two"


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def warn_of_rate_change(saved: Mapping[str, Any], plan: Plan, position: Position) -> None:
    """Warn where a resume makes the learning rate jump: another schedule, or over another length.

    `saved`: the config of the checkpoint.
    """
    try:
        before = RunConfig.model_validate(saved)
        length = Length.of(before, plan.facts.tokens_per_micro)
        former = make_schedule(before, length)
    except (ValueError, UserError):  # a config of an earlier version; its differences are logged anyway
        return
    if length.is_in_tokens != plan.length.is_in_tokens or not position.step:
        return
    then = former(min(position.reached, length.total))
    now = make_schedule(plan.config, plan.length)(min(position.reached, plan.length.total))
    if abs(now - then) > limits.RATE_MARGIN * max(abs(then), abs(now)):
        text = "the learning rate jumps: at step %d it was %.3g, by this config it is %.3g "
        text += "(the schedule spans the whole run)"
        logger.warning(text, position.step, then, now)


MOMENTS = {"adamw": 2, "muon": 1, "sgd": 0}
"""Numbers per parameter that an optimizer keeps at least."""
FIXES = {
    "data.seq_len": "set objective.chunk_tokens, or lower data.seq_len or data.mixing.batch_size",
    "model": "lower dim or num_layers",
    "ledger.capacity": 'lower it, or set ledger.dtype = "bfloat16"',
}
"""How to need less memory, by what takes most of it."""


def unmet_needs(plan: Plan, num_parameters: int, state_width: int, device: torch.device) -> list[UserError]:
    """The needs that this machine does not meet: CUDA and memory.

    Memory is a lower bound for one rank: parameters and optimizer (only the shards of a sharded
    model), the ledger, and the logits of one micro-batch.

    Raises:
        UserError: the ranks cannot share the model as `[distributed]` has it.
    """
    found: list[UserError] = []
    if device.type != "cuda":
        found += _needs_of_cuda(plan.config.train)
    needs = _memory_needs(plan, num_parameters, state_width)
    memory, total = memory_bytes(device), sum(size for size, _ in needs.values())
    if total > memory:
        key, (size, what) = max(needs.items(), key=lambda need: need[1][0])
        problem = f"{what} take {size / 1e9:,.1f} GB per rank; {device.type} has {memory / 1e9:,.1f} GB"
        found.append(UserError(key, problem, FIXES[key]))
    return found


def _needs_of_cuda(train: TrainTable) -> Iterator[UserError]:
    """Settings that cannot be honoured without a CUDA device."""
    for_cuda = (
        ("train.device", train.device, "cuda", ""),
        ("train.precision", train.precision, "fp16", ', or "bf16" or "fp32"'),
        ("train.cuda_graph", train.cuda_graph, True, ', or "auto"'),
    )
    for key, value, wanted, other in for_cuda:
        if value == wanted:
            problem = f'"{str(value).lower()}" needs a CUDA device, and torch finds none here'
            yield UserError(key, problem, f"use a machine with one{other}")


def _memory_needs(plan: Plan, num_parameters: int, state_width: int) -> dict[str, tuple[int, str]]:
    """Bytes per rank and what takes them, by the key that governs them."""
    config = plan.config
    tokens = tokens_per_micro(config, [each.table for each in plan.sources], num_shards=1) or config.data.seq_len
    tokens = min(tokens, config.objective.chunk_tokens or tokens)
    logit_bytes = 4 if config.train.precision == "fp32" else 2
    shards = data_shards(config, plan.facts.world_size) // plan.facts.world_size
    model = sum(model_bytes(plan, num_parameters).values())
    return {
        "data.seq_len": (tokens * plan.vocab_size * logit_bytes, "the logits that exist together"),
        "model": (model, "weights, gradients and optimizer"),
        "ledger.capacity": (shards * ledger_bytes(config.ledger, state_width), "the states of the ledger"),
    }


def model_bytes(plan: Plan, num_parameters: int) -> dict[str, int]:
    """Bytes of a rank's weights, gradients and optimizer, which of the user's own is left out; in a
    sharded model, of its shards alone."""
    held = num_parameters
    if plan.layout is not None:
        held = -(-num_parameters // plan.layout.shards)
    found = {"weights": 4 * held, "gradients": 4 * held}
    if plan.config.optimizer.target is None:
        found["optimizer"] = 4 * held * MOMENTS[plan.config.optimizer.name]
    return found


def memory_bytes(device: torch.device) -> int:
    """Memory of the device; of the whole machine for the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
