"""Full rows against a bare numpy loop that fills as many, in CPU time, and what metrics cost.

16 rows from four memory-mapped files of documents of one length. The bare loop fills tokens, targets and resets of shuffled
documents. We miss its goal: batches have a dozen arrays, and documents are picked in Python.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any

import numpy as np
from bench_table import Figure, Table, bench_parser, in_turns, over, run_bench

from trainer.arrays import IGNORED
from trainer.data.blend import BlendDataset, BlendSource
from trainer.data.documents import ReadOptions
from trainer.data.groups import CutOptions
from trainer.data.lanes import LaneBlend
from trainer.data.layout import discover_direct
from trainer.data.mixing import MixOptions, StreamMixingDataset
from trainer.data.shard_source import ShardSource
from trainer.data.tokenizer import IdsTokenizer
from trainer.data.weights import ConstantWeight
from trainer.lab.tokenized import write_index

ROWS, LANES, VOCAB, MIXED = 8, 16, 50_000, 4
BATCH_GOAL, GOALS_US = 1.5, {8: 10.0, 64: 20.0}
SETTINGS = ("T=1024, stream", "T=1024, document", "T=256, stream", "T=256, document")
Loop = Callable[[int], None]


def write_corpus(folder: Path, files: int, documents: int, length: int) -> list[Path]:
    """Indexed token files of documents of one length."""
    paths = []
    for number in range(files):
        paths.append(folder / f"{length}_{number:02d}.bin")
        np.random.default_rng(number).integers(0, VOCAB, documents * length, dtype=np.uint16).tofile(paths[-1])
        write_index(paths[-1].with_suffix(".idx"), np.full(documents, length), np.dtype(np.uint16))
    return paths


def dataset(paths: Sequence[Path], name: str, num_mixed: int, seq_len: int, **options: Any) -> StreamMixingDataset:
    """A mixing dataset over some token files, in one pool; how they are read."""
    cut, read = CutOptions(name, seq_len), ReadOptions(IdsTokenizer(VOCAB), **options)
    return StreamMixingDataset(discover_direct(paths), cut, read, MixOptions(num_mixed, "weighted", "per_stream", ROWS))


def loop_over(dataset: BlendDataset | StreamMixingDataset, *, drain: bool) -> Loop:
    """So many batches; with `drain`, their metrics, and of a blend its state."""

    def run(batches: int) -> None:
        for _ in range(batches):
            next(dataset)
            if drain:
                if isinstance(dataset, BlendDataset):
                    dataset.state_dict()
                dataset.drain_step_metrics()

    return run


def bare_loop(paths: Sequence[Path], length: int, row_tokens: int, *, runs_on: bool) -> Loop:
    """What one writes without us: rows of shuffled documents, and the beginning of each."""
    maps = [np.asarray(np.memmap(path, dtype=np.uint16, mode="r")) for path in paths]
    order = [(own, begin) for own in maps for begin in range(0, len(own), length)]
    shuffled = (order[at] for seed in count() for at in np.random.default_rng(seed).permutation(len(order)).tolist())
    open_at: list[Any] = [None] * LANES

    def run(batches: int) -> None:
        for _ in range(batches):
            tokens, targets = np.zeros((2, LANES, row_tokens), np.int64)
            targets[:] = IGNORED
            resets = np.zeros((LANES, row_tokens), np.bool_)
            for row in range(LANES):
                at = 0
                while at < row_tokens and not (at and not runs_on):
                    own, begin, left = open_at[row] or (*next(shuffled), length)
                    stop = min(at + left, row_tokens)
                    size = stop - at
                    targets[row, at:stop] = own[begin : begin + size]
                    if left == length:
                        tokens[row, at], resets[row, at] = VOCAB, True
                        tokens[row, at + 1 : stop] = own[begin : begin + size - 1]
                    else:
                        tokens[row, at:stop] = own[begin - 1 : begin + size - 1]
                    open_at[row] = (own, begin + size, left - size) if left > size else None
                    at = stop

    return run


def time_in_turns(loops: dict[str, Loop], batches: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds of CPU time a batch, of each round."""

    def us_per_batch(loop: Loop) -> float:
        began = time.process_time()
        loop(batches)
        return (time.process_time() - began) / batches * 1e6

    return in_turns({name: partial(us_per_batch, loop) for name, loop in loops.items()}, rounds)


def row_costs(folder: Path, length: int, args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Full rows of documents of one length over the bare loop, without and with state and metrics, by setting."""
    paths = write_corpus(folder, MIXED, max(1_000_000 // length, 20), length)
    read, one, alone, whole = ReadOptions(IdsTokenizer(VOCAB)), ConstantWeight(1.0), [], []
    for row_tokens, runs_on in product((1024, 256), (True, False)):  # as in SETTINGS
        part = ShardSource(discover_direct(paths), CutOptions("one", row_tokens), read, MixOptions(MIXED))
        make = partial(LaneBlend, seed=0, rows=LANES, tokenizer=read.tokenizer)
        reader = make([BlendSource("one", part, one)], row_tokens=row_tokens, runs_on=runs_on)
        loops = {
            "bare": bare_loop(paths, length, row_tokens, runs_on=runs_on),
            "alone": loop_over(reader, drain=False),
            "whole": loop_over(reader, drain=True),
        }
        times = time_in_turns(loops, max(args.batches // (1 + row_tokens // length), 10), args.rounds)
        alone.append(statistics.median(over(times["alone"], times["bare"])))
        whole.append(statistics.median(over(times["whole"], times["bare"])))
    return alone, whole


def metrics_cost(paths: list[Path], num_readers: int, picks: int, rounds: int) -> list[float]:
    """Microseconds that observing and reporting the pool adds to a pick: with a drain, less a pick that only chooses."""
    mixing = dataset(paths[:num_readers], "cost", num_readers, 1024)
    next(mixing)
    pool = mixing._pool
    assert len(pool.readers) == num_readers
    remaining = [float(reader.remaining_picks) for reader in pool.readers]
    uniforms = np.random.default_rng(0).random(picks).tolist()

    def bare(_: int) -> None:
        weights = np.array(remaining)
        for uniform in uniforms:
            ends = weights.cumsum()
            min(int(ends.searchsorted(uniform * float(ends[-1]), side="right")), num_readers - 1)

    def observed(_: int) -> None:
        for uniform in uniforms:
            pool.pick(uniform)
            mixing.drain_step_metrics()

    times = time_in_turns({"bare": bare, "observed": observed}, picks, rounds)
    return [high - low for high, low in zip(times["observed"], times["bare"], strict=True)]


def measure(args: argparse.Namespace) -> list[Figure | Table]:
    """Everything."""
    found, rows, highest = [], [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        for length in args.lengths:
            alone, whole = row_costs(Path(folder), length, args)
            rows.append([length, *alone])
            highest = max(highest, *whole)
        found.append(Figure("full rows over the bare loop, at most", max(max(r[1:]) for r in rows), at_most=BATCH_GOAL))
        found.append(Figure("with state and metrics, at most", highest))
        many = write_corpus(Path(folder), max(GOALS_US), 1, 512 * 1024)
        for size, goal in GOALS_US.items():
            costs = metrics_cost(many, size, args.batches, args.rounds)
            found.append(Figure(f"one pick's metrics at K={size}", statistics.median(costs), "us", at_most=goal))
    return [*found, Table("Over the bare loop", ("tokens a document", *SETTINGS), rows)]


def main() -> None:
    """Measure and print."""
    parser = bench_parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="*", default=[20, 200, 2000, 20_000], help="of documents")
    parser.add_argument("--batches", type=int, default=100, help="batches a turn, fewer of short documents")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each, after one that warms up")
    run_bench("data", parser, measure)


if __name__ == "__main__":
    main()
