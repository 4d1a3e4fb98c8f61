"""Gradient through several cells (`[train] tbptt_cells`) against one long cell: time and peak memory of a training step.

Forward and backward of the built-in model on rows of `cell` times `cells` tokens: as one cell (chunk), in cells, and in cells
with activation checkpointing, all with the same gradient. Memory and times are measured as for large vocabularies.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import torch
from bench_table import Figure, bench_parser, growth_mb, in_child, in_turns, over, ratio_figure, run_bench, seconds_of
from torch import Tensor, nn

from trainer.lab.pieces import Cellwise
from trainer.model import build

VOCAB = 256
WAYS = ("one long cell", "in cells", "in cells, checkpointed")


def make(args: argparse.Namespace) -> dict[str, nn.Module]:
    """The model, called in the three ways, and `truncated`: the gradient of one cell alone."""
    torch.manual_seed(0)
    model = build(VOCAB, args.dim, args.layers).to(args.device)
    cells = {"cell": args.cell, "cells": args.cells}
    ways = (model, Cellwise(model, **cells), Cellwise(model, **cells, recompute=True))
    return {**dict(zip(WAYS, ways, strict=True)), "truncated": model}


def draw(args: argparse.Namespace, way: str) -> Tensor:
    """Tokens [B, T], one row or one cell long."""
    length = args.cell * (1 if way == "truncated" else args.cells)
    return torch.randint(0, VOCAB, (args.rows, length), device=args.device)


def step(model: nn.Module, tokens: Tensor) -> float:
    """Seconds of one forward and backward."""

    def run() -> None:
        logits = model(tokens=tokens, state=None).logits
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()  # type: ignore[no-untyped-call]

    model.zero_grad(set_to_none=True)
    return seconds_of(run, tokens.device.type)


def memory_of_step(args: argparse.Namespace, way: str) -> float:
    """MB by which a step raises the peak, in this process."""
    ways, tokens = make(args), draw(args, way)
    small = partial(step, ways["truncated"], tokens[:1, :1])
    return growth_mb(small, partial(step, ways[way], tokens), args.device)


def measure(args: argparse.Namespace) -> list[Figure]:
    """Time per token and memory of each way, and their ratios to one long cell."""
    ways = make(args)

    def us_per_token(way: str) -> float:
        tokens = draw(args, way)
        return step(ways[way], tokens) / tokens.numel() * 1e6

    times = in_turns({way: partial(us_per_token, way) for way in ways}, args.rounds)
    memory = {way: in_child(memory_of_step, args, way) for way in ways}
    found = []
    for way in ("truncated", *WAYS):
        found.append(Figure(f"{way}: time per token", statistics.median(times[way]), "us"))
        found.append(Figure(f"{way}: peak memory of a step", memory[way], "MB"))
    long = times[WAYS[0]]
    for way, most_time, most_memory in ((WAYS[1], 1.5, 1.5), (WAYS[2], 2.0, 0.5)):
        found.append(ratio_figure(f"{way}: time over one long cell", over(times[way], long), at_most=most_time))
        ratio = memory[way] / memory[WAYS[0]]
        found.append(Figure(f"{way}: memory over one long cell", ratio, "x", at_most=most_memory))
    return found


if __name__ == "__main__":
    parser = bench_parser(__doc__, device="cpu")
    # Rows per micro-batch, tokens per cell, cells per row, and rounds.
    parser.set_defaults(dim=128, layers=4, rows=4, cell=128, cells=8, rounds=5)
    run_bench("tbptt", parser, measure)
