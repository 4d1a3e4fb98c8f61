"""Settings that are valid but cannot be meant, and needs that this machine does not meet. `check` and a run share them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trainer.config.data_tables import MixingTable, SourceTable
from trainer.config.rules import data_shards, mixing_of, tokens_per_micro
from trainer.config.schema import FIRST_PROFILED, LedgerTable, RunConfig
from trainer.data.layout import unread_parts
from trainer.errors import UserError
from trainer.files import is_url
from trainer.training.setup.sources import Source
from trainer.wording import counted, few, printable

if TYPE_CHECKING:
    from trainer.training.setup.plan import Plan

LONG_WARMUP = 0.5  # share of the run
LARGEST_LR = 0.1  # AdamW moves every weight by about lr in every step
MOMENTS = {"adamw": 2, "muon": 1, "sgd": 0}
"""Numbers per parameter that an optimizer keeps at least."""
COMPILER_SEC = 60.0
Doubt = tuple[str, str, str]
"""Key, problem and fix."""


def doubts(config: RunConfig, num_tokens: int, sources: list[Source], eval_sources: list[Source]) -> list[UserError]:
    """Settings of a run of so many tokens that work, but hardly as meant: warned about, not refused."""
    batches = config.micro_batches
    length = config.train.steps if batches.unit == "steps" else num_tokens
    found = [*trained_on(sources, eval_sources), *_doubted_settings(config, sources, eval_sources)]
    found += never_reached("train.micro_batches", [x for x, _ in batches.points], length, batches.unit)
    found += [*_unread(sources, eval_sources), *_leaks(sources if config.eval.holdout_fraction > 0 else [])]
    return [UserError(*each) for each in found]


def never_reached(key: str, points: Iterable[int], length: int, unit: str) -> Iterator[Doubt]:
    """A point of a schedule beyond the end of the run."""
    if beyond := [x for x in points if x > length > 0]:
        problem = f"has a point at {beyond[0]:,}, but the run has {length:,} {unit} and never reaches it"
        yield f"{key}.points", problem, f"move the last point to at most {length}"


def _doubted_settings(config: RunConfig, sources: list[Source], eval_sources: Sequence[Source]) -> Iterator[Doubt]:
    train, evaluation, optimizer = config.train, config.eval, config.optimizer
    if evaluation.has_data and not evaluation.every and (eval_sources or evaluation.target is not None):
        problem = "is 0: the run evaluates neither [[eval.source]] nor eval.target"
        yield "eval.every", problem, "set it to the number of steps between evaluations"
    if optimizer.lr > LARGEST_LR and optimizer.name == "adamw" and optimizer.target is None:
        problem = f"{optimizer.lr:g}: AdamW moves every weight by about this much in every step"
        yield "optimizer.lr", problem, "set it between 1e-5 and 1e-2"
    for unit in ("steps", "tokens"):
        warmup, length = getattr(config.scheduler, f"warmup_{unit}"), getattr(train, unit)
        if length and warmup > LONG_WARMUP * length:
            problem = f"{warmup:,} of {length:,} {unit}: most of the run is below the configured learning rate"
            yield f"scheduler.warmup_{unit}", problem, f"set it to at most {max(length // 10, 1):,}"
    first, last = FIRST_PROFILED, FIRST_PROFILED + config.metrics.profile - 1
    if config.metrics.profile and 0 < train.steps < last:
        problem = f"records steps {first} to {last}, after those that settle, and the run has {train.steps}"
        yield "metrics.profile", problem, f"set train.steps to at least {last}"
    for source in sources:
        own, streams = source.table.mixing.num_streams_mixed, len(source.streams)
        # The default is no wish; a resolved config has it written out.
        default = MixingTable.model_fields["num_streams_mixed"].default
        is_given = own is not None or config.data.mixing.num_streams_mixed != default
        wanted = mixing_of(config, source.table).num_streams_mixed
        if streams and is_given and wanted > streams:
            problem = f"{wanted} readers, but the source has {counted(streams, 'stream')}: all are open at once"
            yield f"source {source.name}: mixing.num_streams_mixed", problem, f"set it to at most {streams}"


def _unread(sources: Sequence[Source], eval_sources: Sequence[Source]) -> Iterator[Doubt]:
    """Modalities of a root that no source reads, which may have been added since, and files in no modality's directory."""
    readers: dict[str, list[SourceTable]] = {}
    for source in (*sources, *eval_sources):
        if source.streams and source.table.root is not None and not is_url(source.table.root):
            readers.setdefault(os.path.realpath(source.table.root), []).append(source.table)
    for tables in readers.values():
        root = str(tables[0].root)
        chosen = [table.modalities for table in tables]
        read = None if None in chosen else {name for each in chosen for name in each or ()}
        modalities, files = unread_parts(Path(root), read, tables[0].format)
        if modalities:
            problem = f"has modalities that no source reads: {few(modalities)}"
            yield f"root {root}", problem, "add them to modalities of a source, or give them sources of their own"
        if files:
            has = counted(len(files), "file")
            problem = f"has {has} in no modality's directory, which no source reads: {few(files)}"
            yield f"root {root}", problem, f"move those that are data into {root}/<modality>/"


def _leaks(sources: list[Source]) -> Iterator[Doubt]:
    """Files that are read under several names: which documents are held out depends on the name."""
    names: dict[tuple[int, int], dict[str, str]] = {}
    for source in sources:
        for stream in source.streams:
            names.setdefault(_identity(stream.path), {}).setdefault(stream.relative_path, source.name)
    twice = [found for found in names.values() if len(found) > 1]
    if twice:
        first = " and ".join(f"{printable(name)} (source {source})" for name, source in list(twice[0].items())[:2])
        problem = f"{counted(len(twice), 'file')} under several names, such as {first}: each trains on what the other holds out"
        yield "eval.holdout_fraction", problem, "read a file once, or in each source below the same root"


def trained_on(sources: list[Source], eval_sources: Sequence[Source]) -> Iterator[Doubt]:
    """Validation sets with files that are trained on."""
    trained = {_identity(stream.path): source.name for source in sources for stream in source.streams}
    for each in eval_sources:
        shared = [(s.relative_path, name) for s in each.streams if (name := trained.get(_identity(s.path))) is not None]
        if shared:
            (path, name), count = shared[0], len(shared)
            files = "a file of it is" if count == 1 else f"{counted(count, 'file')} of it are"
            problem = f"{files} trained on, by source {name}: {printable(path)}"
            yield f"eval source {each.name}", problem, "leave them out of one of the two"


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def unmet_needs(plan: Plan, num_parameters: int, state_width: int, device: torch.device) -> list[UserError]:
    """What the run needs and this machine does not have: CUDA, a compiler, memory. A run refuses it, `check` warns.

    Memory is a lower bound for one rank: parameters and optimizer (of a sharded model, its shards alone), the ledger, and the
    logits of one micro-batch.

    Raises:
        UserError: the ranks cannot share the model as `[distributed]` has it.
    """
    config, world_size = plan.config, plan.facts.world_size
    train, table, is_cuda = config.train, config.ledger, device.type == "cuda"
    for_cuda = (
        ("train.device", train.device, "cuda", ""),
        ("train.precision", train.precision, "fp16", ', or "bf16" or "fp32"'),
        ("train.cuda_graph", train.cuda_graph, True, ', or "auto"'),
    )
    problem = "needs a CUDA device, and torch finds none here"
    found = [
        UserError(key, f'"{str(value).lower()}" {problem}', f"use a machine with one{other}")
        for key, value, wanted, other in for_cuda
        if value == wanted and not is_cuda
    ]
    if train.compile and not is_cuda and not _compiles(compiler := os.environ.get("CXX", "g++")):
        problem = f"needs a C++ compiler on a CPU, and {compiler} (CXX) is none that works"
        found.append(UserError("train.compile", problem, "install g++, or set it to false"))
    tokens = tokens_per_micro(config, [each.table for each in plan.sources], num_shards=1) or config.row_tokens
    tokens = min(tokens, config.objective.chunk_tokens or tokens)
    numbers = 2 + (MOMENTS[config.optimizer.name] if config.optimizer.target is None else 0)  # with weight and gradient
    shards = data_shards(config, world_size)
    layout = plan.layout
    held = num_parameters if layout is None else -(-num_parameters // layout.shards)
    logits = tokens * plan.vocab_size * (4 if train.precision == "fp32" else 2)
    needs = {
        "data.seq_len": (logits, "the logits that exist together"),
        "model": (held * numbers * 4, "weights, gradients and optimizer"),
        "ledger.capacity": (shards // world_size * ledger_bytes(table, state_width), "the states of the ledger"),
    }
    return found + _exceeding(needs, device)


@cache
def _compiles(compiler: str) -> bool:
    """Whether a program makes assembly of C++."""
    line = [compiler, "-x", "c++", "-S", "-o", "-", "-"]
    try:
        done = subprocess.run(line, input=b"#include <cmath>\n", capture_output=True, timeout=COMPILER_SEC, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and bool(done.stdout)


def _exceeding(needs: Mapping[str, tuple[int, str]], device: torch.device) -> list[UserError]:
    """The largest of the needs, key -> (bytes, what), if together they are more than the device's memory."""
    memory, total = memory_bytes(device), sum(size for size, _ in needs.values())
    if total <= memory:
        return []
    key, (size, what) = max(needs.items(), key=lambda need: need[1][0])
    problem = f"{what} take {size / 1e9:,.1f} GB per rank; {device.type} has {memory / 1e9:,.1f} GB of memory here"
    fix = {
        "data.seq_len": "set objective.chunk_tokens, or lower data.seq_len or data.mixing.batch_size",
        "model": "lower dim or num_layers",
        "ledger.capacity": 'lower it, or set ledger.dtype = "bfloat16"',
    }[key]
    return [UserError(key, problem, fix)]


def ledger_bytes(table: LedgerTable, state_width: int) -> int:
    """Memory of the states of one data shard's ledger."""
    return table.capacity * state_width * (2 if table.dtype == "bfloat16" else 4)


def memory_bytes(device: torch.device) -> int:
    """Memory of the device; of the whole machine for the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
