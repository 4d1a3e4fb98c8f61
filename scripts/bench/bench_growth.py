"""Scaling of cost with the number of ranks, streams and metric keys.

Collectives and the elements that a rank sends (all-gathers: has afterwards) are counted with torch's profiler in real runs
(strategies: a model of 3 blocks, 2 micro-batches). Everything else is timed; growth is the slope between the ends of the range
on a log-log scale.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from bench_metrics import make_tracker
from bench_rows import VOCAB, dataset, loop_over, time_in_turns
from bench_table import Figure, Table, bench_parser, run_bench
from collectives import count_collectives

from trainer.metrics.aggregate import rank_operations, reduce_over_ranks

SEQ_LEN = 64
MAX_SLOPE, MAX_FLAT = 1.1, 0.25
Points = list[tuple[int, float]]
STRATEGIES = {
    "ddp": (2, ["strategy=ddp"]),
    "fsdp": (2, ["strategy=fsdp"]),
    "fsdp, no resharding": (2, ["strategy=fsdp", "reshard_after_forward=false"]),
    "hsdp, 2 x 2": (4, ["strategy=hsdp", "replicas=2"]),
}
BLOCKS = 3
KINDS = ("all-gather", "all-reduce", "reduce-scatter")


def over_streams(sizes: Sequence[int], batches: int) -> tuple[Points, Points]:
    """Microseconds per batch with its metrics, median of five turns, and seconds to open; eight streams are read at once."""
    per_batch, opening = Points(), Points()
    for size in sizes:
        with tempfile.TemporaryDirectory() as name:
            first, *others = (Path(name, f"s{number:06d}.bin") for number in range(size))
            # 32 documents of four full windows, ended by id 0.
            ids = np.random.default_rng(0).integers(1, VOCAB, (32, 4 * SEQ_LEN), dtype=np.uint16)
            ids[:, -1] = 0
            ids.tofile(first)
            for path in others:
                path.symlink_to(first)  # file systems limit the number of hard links to one file
            began = time.perf_counter()
            mixing = dataset([first, *others], "growth", 8, SEQ_LEN, dtype="uint16", eod=0)
            opening.append((size, time.perf_counter() - began))
            times = time_in_turns({"mixing": loop_over(mixing, drain=True)}, batches, rounds=5)["mixing"]
            per_batch.append((size, statistics.median(times)))
    return per_batch, opening


def over_keys(sizes: Sequence[int], repeats: int) -> Points:
    """Microseconds per logged step to reduce and record that many keys, without a sink."""
    points: Points = []
    for size in sizes:
        keys = [f"token_type/t{number}/loss" for number in range(size)]
        plan = rank_operations(keys)
        tracker = make_tracker(1)
        spent = []
        for step in range(1, repeats + 1):
            tracker.start_step()
            began = time.perf_counter()
            reduced = reduce_over_ranks(dict.fromkeys(keys, 1.0), plan, device="cpu", world_size=1)
            tracker.end_step(step, loss=1.0, grad_norm=1.0, lr=1e-3, tokens_in_step=1, extra=reduced)
            spent.append((time.perf_counter() - began) * 1e6)
        points.append((size, statistics.median(spent[repeats // 5 :])))
    return points


def slope(points: Points) -> float:
    """Slope between the ends on a log-log scale."""
    (first, low), (last, high) = points[0], points[-1]
    return math.log(high / low) / math.log(last / first)


def figures_of(what: str, unit: str, points: Points, at_most: float) -> list[Figure]:
    rows = [Figure(f"{size:,} {what}", value, unit) for size, value in (points[0], points[-1])]
    return [*rows, Figure(f"growth with {what} (0 flat, 1 linear)", slope(points), "", at_most=at_most)]


def measure(args: argparse.Namespace) -> list[Figure | Table]:
    found: list[Figure] = []
    for world_size in args.ranks:
        silent, logged = count_collectives(world_size)
        number = sum(silent.calls.values())
        sent, added = silent.elements["all-reduce"], logged.elements["all-gather"] // world_size
        calls = sum(logged.calls.values())
        found += [
            Figure(f"{world_size} ranks: collectives per step", number, f"with {sent:,} elements"),
            Figure(f"{world_size} ranks: on a logged step", calls, f"with {added:,} more", at_most=number + 1),
        ]
    rows = []
    for name, (world_size, sets) in STRATEGIES.items() if args.ranks else ():
        of_strategy = [f"distributed.{each}" for each in sets]
        silent, _ = count_collectives(world_size, f"model.num_layers={BLOCKS}", *of_strategy)
        rows.append((name, *(f"{silent.calls.get(kind, 0)}: {silent.elements.get(kind, 0):,}" for kind in KINDS)))
    per_batch, opening = over_streams(args.streams, args.batches)
    found += figures_of("streams", "us per batch", per_batch, MAX_FLAT)
    found += figures_of("streams", "s to open", opening, MAX_SLOPE)
    found += figures_of("metric keys", "us per logged step", over_keys(args.keys, args.batches), MAX_SLOPE)
    return [*found, Table("Collectives per step: their elements", ("strategy", *KINDS), rows)]


if __name__ == "__main__":
    parser = bench_parser(__doc__)
    parser.set_defaults(ranks=[2, 4, 8], streams=[10, 100, 1000, 10_000, 100_000], keys=[10, 100, 1000], batches=300)
    run_bench("growth", parser, measure)
