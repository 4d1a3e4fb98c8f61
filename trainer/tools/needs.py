"""Needs of a run that this machine does not meet. `check` warns about them, a run refuses to start."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from functools import cache

import torch

from trainer.config.rules import data_shards, tokens_per_micro
from trainer.config.schema import TrainTable
from trainer.errors import UserError
from trainer.training.setup import plausible
from trainer.training.setup.plan import Plan

MOMENTS = {"adamw": 2, "muon": 1, "sgd": 0}
"""Numbers per parameter that an optimizer keeps at least."""
COMPILER_SEC = 60.0
FIXES = {
    "data.seq_len": "set objective.chunk_tokens, or lower data.seq_len or data.mixing.batch_size",
    "model": "lower dim or num_layers",
    "ledger.capacity": 'lower it, or set ledger.dtype = "bfloat16"',
}
"""How to need less memory, by what takes most of it."""


def unmet_needs(plan: Plan, num_parameters: int, state_width: int, device: torch.device) -> list[UserError]:
    """The needs that this machine does not meet: CUDA, a compiler, memory.

    Memory is a lower bound for one rank: parameters and optimizer (only the shards of a sharded model), the ledger, and
    the logits of one micro-batch.

    Raises:
        UserError: the ranks cannot share the model as `[distributed]` has it.
    """
    found: list[UserError] = []
    if device.type != "cuda":
        found += _needs_of_cuda(plan.config.train)
    needs = _memory_needs(plan, num_parameters, state_width)
    memory, total = plausible.memory_bytes(device), sum(size for size, _ in needs.values())
    if total > memory:
        key, (size, what) = max(needs.items(), key=lambda need: need[1][0])
        problem = f"{what} take {size / 1e9:,.1f} GB per rank; {device.type} has {memory / 1e9:,.1f} GB of memory here"
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
    compiler = os.environ.get("CXX", "g++")
    if train.compile and not _compiles(compiler):
        problem = f"needs a C++ compiler on a CPU, and {compiler} (CXX) is none that works"
        yield UserError("train.compile", problem, "install g++, or set it to false")


@cache
def _compiles(compiler: str) -> bool:
    """Whether a program makes assembly of C++."""
    line = [compiler, "-x", "c++", "-S", "-o", "-", "-"]
    try:
        done = subprocess.run(line, input=b"#include <cmath>\n", capture_output=True, timeout=COMPILER_SEC, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and bool(done.stdout)


def _memory_needs(plan: Plan, num_parameters: int, state_width: int) -> dict[str, tuple[int, str]]:
    """Bytes per rank and what takes them, by the key that governs them."""
    config, layout = plan.config, plan.layout
    tokens = tokens_per_micro(config, [each.table for each in plan.sources], num_shards=1) or config.row_tokens
    tokens = min(tokens, config.objective.chunk_tokens or tokens)
    numbers = 2  # weight and gradient
    if config.optimizer.target is None:
        numbers += MOMENTS[config.optimizer.name]
    held = num_parameters
    if layout is not None:
        held = -(-num_parameters // layout.shards)
    logit_bytes = 4 if config.train.precision == "fp32" else 2
    shards = data_shards(config, plan.facts.world_size) // plan.facts.world_size
    return {
        "data.seq_len": (tokens * plan.vocab_size * logit_bytes, "the logits that exist together"),
        "model": (held * numbers * 4, "weights, gradients and optimizer"),
        "ledger.capacity": (shards * plausible.ledger_bytes(config.ledger, state_width), "the states of the ledger"),
    }
