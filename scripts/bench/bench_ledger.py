"""Overhead of the ledger (state cache): microseconds per step at 10k and 1M live groups, over a bare gather + scatter.

A step is one look-up and one store of 64 groups (states of 2 KiB, exact LRU eviction), of which 4 are new: a group comes about
16 times and never again. The gather + scatter moves the same 64 rows.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from bench_table import Figure, bench_parser, over, run_bench, seconds_of
from numpy.typing import NDArray
from torch import Tensor

from trainer.ledger import Ledger, LedgerOptions

Ints = NDArray[np.int64]

BATCH, NUM_NEW, BLOCK = 64, 4, 25
WIDTH = 512  # float32: 2 KiB
MAX_OVER_BARE, MAX_OVER_BARE_WIDE, MAX_GROWTH = 4.0, 1.3, 2.0
WIDE = ((65_536, 2_048, 32), (500_000, 480, 16), (5_000_000, 48, 4))  # numbers of a state, groups held, groups a step
WIDE_STEPS = 40
MOST_BATCH_BYTES = 2 * 10**8


def window_batches(live: int, rng: np.random.Generator) -> Iterator[Ints]:
    """Batches of groups from a window of `live` groups that moves on by `NUM_NEW` a step."""
    first_new = live
    while True:
        old = np.unique(rng.integers(first_new - live // 2, first_new, 2 * BATCH))
        new = np.arange(first_new, first_new + NUM_NEW)
        yield rng.permutation(np.concatenate([rng.permutation(old)[: BATCH - NUM_NEW], new]))
        first_new += NUM_NEW


def measure(live: int, num_steps: int) -> tuple[float, float]:
    """Median microseconds a step of the ledger, and of the bare gather + scatter."""
    rng = np.random.default_rng(live)
    ledger, slab = Ledger(LedgerOptions(capacity=live), state_width=WIDTH), torch.zeros(live, WIDTH)
    states, cells, lasts = torch.randn(BATCH, WIDTH), np.ones(BATCH, np.int64), np.zeros(BATCH, np.bool_)

    def look_up_and_store(step: int, groups: Ints) -> None:
        ledger.begin_step(step)
        ledger.lookup(groups, cells)
        ledger.store(groups, cells, lasts, states)

    def gather_and_scatter(slots: Tensor) -> None:  # the floor: of rows whose places are known
        slab.index_select(0, slots)
        slab.index_copy_(0, slots, states)

    step = 0
    for first in range(0, live - live % BATCH, BATCH):
        step += 1
        look_up_and_store(step, np.arange(first, first + BATCH))
    batches = window_batches(live, np.random.default_rng(live))
    # Made beforehand, so that between the steps nothing but the other store runs.
    planned = [next(batches) for _ in range(num_steps)]
    places = [torch.from_numpy(rng.integers(0, live, BATCH)) for _ in range(num_steps)]
    gc.collect()
    ours, bare = list[float](), list[float]()
    for first in range(0, num_steps, BLOCK):
        numbered = enumerate(planned[first : first + BLOCK], start=step + first + 1)
        ours += [seconds_of(partial(look_up_and_store, number, groups), "cpu") for number, groups in numbered]
        bare += [seconds_of(partial(gather_and_scatter, slots), "cpu") for slots in places[first : first + BLOCK]]
    warm = num_steps // 5
    return statistics.median(ours[warm:]) * 1e6, statistics.median(bare[warm:]) * 1e6


@dataclass(frozen=True)
class WideTimes:
    """Medians of a look-up and a store of wide states."""

    over_bare: float  # over the same rows without a ledger, step by step in turns
    seconds: float
    host_seconds: float  # until the calls return; on CUDA the device may still be at work


def measure_wide(width: int, live: int, batch: int, *, device: str = "cpu", steps: int = WIDE_STEPS) -> WideTimes:
    """Look-ups and stores of `batch` states of `live`, and what any store has to do: a gather and a scatter of the rows."""
    rng = np.random.default_rng(width)
    ledger = Ledger(LedgerOptions(capacity=live), state_width=width, device=torch.device(device))
    bare = torch.zeros(live, width, device=device)
    states, cells, lasts = torch.randn(batch, width, device=device), np.ones(batch, np.int64), np.zeros(batch, np.bool_)
    ledger.begin_step(0)
    for first in range(0, live, batch):
        filled = np.arange(first, min(first + batch, live))
        ledger.store(filled, cells[: len(filled)], lasts[: len(filled)], states[: len(filled)])
    ours, bares, on_host = list[float](), list[float](), list[float]()

    def use_ledger() -> None:
        began = time.perf_counter()
        ledger.lookup(groups, cells)
        ledger.store(groups, cells, lasts, states)
        on_host.append(time.perf_counter() - began)

    def use_bare() -> None:
        bare.index_select(0, places)
        bare.index_copy_(0, places, states)

    for step in range(1, steps + 1):
        ledger.begin_step(step)
        groups = rng.choice(live, batch, replace=False)
        places = torch.from_numpy(groups).to(device)
        both = ((ours, use_ledger), (bares, use_bare))
        for times, use in both if step % 2 else both[::-1]:
            times.append(seconds_of(use, device))
    return WideTimes(statistics.median(over(ours, bares)), statistics.median(ours), statistics.median(on_host))


def row_figures(args: argparse.Namespace) -> list[Figure]:
    found: list[Figure] = []
    for num_bytes in args.row_bytes:
        live = min(max(args.megabytes * 10**6 // num_bytes, 8), 65_536)
        batch = min(64, live // 4, max(4, MOST_BATCH_BYTES // num_bytes))
        took = measure_wide(num_bytes // 4, live, batch, device=args.device, steps=args.wide_steps)
        where = f"{batch} of {live:,} states of {num_bytes:,} bytes"
        found += [
            Figure(f"{where}: ledger over bare gather + scatter", took.over_bare, "x"),
            Figure(f"{where}: ledger", took.seconds * 1e6, "us"),
            Figure(f"{where}: the host is busy", took.host_seconds * 1e6, "us"),
            Figure(f"{where}: read and written", 2 * batch * num_bytes / took.seconds / 1e9, "GB/s"),
        ]
    return found


def figures(args: argparse.Namespace) -> list[Figure]:
    torch.manual_seed(0)
    if args.row_bytes:
        return row_figures(args)
    if args.device == "cuda":
        raise SystemExit("--device cuda needs --row-bytes: the groups are kept on the CPU")
    found, costs = list[Figure](), []
    for live in args.live:
        ours, bare = measure(live, args.steps)
        costs.append(ours)
        found.append(Figure(f"{live:,} live groups: ledger", ours, "us"))
        name = f"{live:,} live groups: ledger over bare gather + scatter"
        found.append(Figure(name, ours / bare, "x", at_most=MAX_OVER_BARE))
    found.append(Figure("growth of the ledger's time", costs[-1] / costs[0], "x", at_most=MAX_GROWTH))
    for width, live, batch in WIDE:
        where = f"{batch} of {live:,} states of {4 * width / 1e6:.2g} MB"
        ratio = measure_wide(width, live, batch).over_bare
        found.append(Figure(f"{where}: ledger over bare gather + scatter", ratio, "x", at_most=MAX_OVER_BARE_WIDE))
    return found


if __name__ == "__main__":
    parser = bench_parser(__doc__)
    parser.add_argument("--live", type=int, nargs="+", default=[10_000, 1_000_000], help="live groups")
    parser.add_argument("--steps", type=int, default=2000, help="steps per size and pattern")
    parser.add_argument("--row-bytes", type=int, nargs="+", help="measure states of these sizes alone")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="with --row-bytes: of the states")
    parser.add_argument("--wide-steps", type=int, default=WIDE_STEPS, help="with --row-bytes: steps per size")
    parser.add_argument("--megabytes", type=int, default=2000, help="with --row-bytes: of all states, at most 65,536")
    run_bench("ledger", parser, figures)
