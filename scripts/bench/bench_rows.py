"""Full rows against a bare numpy loop, in CPU time, and what metrics cost.

The bare loop fills tokens, targets and resets of 16 rows. Its goal of 1.5 cannot be met: a loop that draws documents from what
is left of the open files, and says which groups and segments a row holds, takes that much by itself. Beside that, ours weighs
sources, cuts, resumes, and checks the files' sizes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain, count, product
from pathlib import Path
from typing import Any

import numpy as np
from bench_table import Figure, Table, bench_parser, in_turns, over, run_bench

from trainer.arrays import IGNORED, Ints
from trainer.data.blend import BlendSource
from trainer.data.documents import ReadOptions
from trainer.data.groups import CutOptions
from trainer.data.lanes import LaneBlend
from trainer.data.layout import discover_direct
from trainer.data.shard_source import MixOptions, ShardSource
from trainer.data.tokenizer import IdsTokenizer
from trainer.data.weights import ConstantWeight
from trainer.lab.stream_mixing import StreamMixingDataset
from trainer.lab.tokenized import write_index

ROWS, LANES, VOCAB, MIXED = 8, 16, 50_000, 4
BATCH_GOAL, GOALS_US = 1.5, {8: 10.0, 64: 20.0}
READ = ReadOptions(IdsTokenizer(VOCAB))
SETTINGS = ("T=1024, stream", "T=1024, document", "T=256, stream", "T=256, document")
Loop = Callable[[int], None]


def write_corpus(folder: Path, files: Sequence[Ints]) -> list[Path]:
    """Indexed token files of documents of these lengths."""
    folder.mkdir()
    paths = [folder / f"{number:04d}.bin" for number in range(len(files))]
    for number, (path, lengths) in enumerate(zip(paths, files, strict=True)):
        np.random.default_rng(number).integers(0, VOCAB, lengths.sum(), dtype=np.uint16).tofile(path)
        write_index(path.with_suffix(".idx"), lengths, np.dtype(np.uint16))
    return paths


def loop_over(mode: str, paths: Sequence[Path], row_tokens: int) -> Loop:
    """So many batches of full rows of one source."""
    mix = MixOptions(MIXED, "weighted", "per_row", LANES)
    source = ShardSource(discover_direct(paths), CutOptions("s", row_tokens), READ, mix)
    how: dict[str, Any] = {"rows": LANES, "row_tokens": row_tokens, "runs_on": mode == "stream"}
    parts = [BlendSource(source.name, source, ConstantWeight(1.0))]
    blend = LaneBlend(parts, seed=0, tokenizer=READ.tokenizer, **how)

    def run(batches: int) -> None:
        for _ in range(batches):
            next(blend)

    return run


def drawn(sizes: Sequence[int]) -> Iterator[int]:
    """Places of documents, counted through all files, each drawn from what is left of them; epoch by epoch."""
    for rng in map(np.random.default_rng, count()):
        left, begins = list(sizes), [0, *accumulate(sizes)]
        queues = [(begin + rng.permutation(size)).tolist() for begin, size in zip(begins, sizes, strict=False)]
        for uniform in rng.random(sum(sizes)).tolist():
            ends = list(accumulate(left))
            slot = bisect_right(ends, uniform * ends[-1])
            left[slot] -= 1
            yield queues[slot].pop()


def bare_loop(paths: list[Path], length: int, row_tokens: int, *, runs_on: bool, keys: bool = False) -> Loop:
    """What one writes without us: rows of shuffled documents, and the beginning of each.

    With `keys`, what is asked for beside: documents drawn from what is left of the open files, and of a
    row its segments, the groups before and behind it, and where they are from.
    """
    maps = [np.asarray(np.memmap(path, dtype=np.uint16, mode="r")) for path in paths]
    files = [[(own, begin, f"file {at}") for begin in range(0, len(own), length)] for at, own in enumerate(maps)]
    order = [*chain(*files)]
    orders = (np.random.default_rng(seed).permutation(len(order)).tolist() for seed in count())
    shuffled: Iterator[int] = chain.from_iterable(orders)
    if keys:
        shuffled = drawn([len(each) for each in files])
    open_at: list[Any] = [None] * LANES

    def run(batches: int) -> None:
        for _ in range(batches):
            tokens, targets = np.zeros((2, LANES, row_tokens), np.int64)
            targets[:] = IGNORED
            resets = np.zeros((LANES, row_tokens), np.bool_)
            segment_ids = np.full((LANES if keys else 0, row_tokens), -1, np.int32)
            labels: list[str] = []
            rows, groups = [], []
            for row in range(LANES):
                at, read, before, after = 0, [], (-1, 0, 0), (-1, 0)
                while at < row_tokens and not (at and not runs_on):
                    group, done, cell = open_at[row] or (next(shuffled), 0, 0)
                    own, begin, name = order[group]
                    begin += done
                    stop = min(at + length - done, row_tokens)
                    size = stop - at
                    targets[row, at:stop] = own[begin : begin + size]
                    if done:
                        tokens[row, at:stop] = own[begin - 1 : begin + size - 1]
                    else:
                        tokens[row, at], resets[row, at] = VOCAB, True
                        tokens[row, at + 1 : stop] = own[begin : begin + size - 1]
                    goes_on = done + size < length
                    open_at[row] = (group, done + size, cell + 1) if goes_on else None
                    if keys:
                        if done:
                            before = (group, cell, done)
                        if goes_on:
                            after = (group, cell)
                        segment_ids[row, at:stop] = len(labels)
                        labels.append(name)
                        read.append((group, done, size))
                    at = stop
                if keys:
                    rows.append(read)
                    groups.append((*before, *after, len(read)))
            if keys:
                columns = np.array(groups, np.int64).T.copy()
                np.not_equal(columns[0], columns[3])  # whether the group before a row ends in it

    return run


def time_in_turns(loops: dict[str, Loop], batches: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds of CPU time a batch, of each round."""

    def us_per_batch(loop: Loop) -> float:
        began = time.process_time()
        loop(batches)
        return (time.process_time() - began) / batches * 1e6

    return in_turns({name: partial(us_per_batch, loop) for name, loop in loops.items()}, rounds)


def row_costs(folder: Path, length: int, args: argparse.Namespace) -> list[list[float]]:
    """Of full rows of documents of one length, by setting: a loop with the same keys, and ours, over the bare loop; ours over
    the one with the same keys."""
    paths, found = write_corpus(folder / str(length), [np.full(max(1_000_000 // length, 20), length)] * MIXED), []
    for row_tokens, mode in product((1024, 256), ("stream", "document")):  # as in SETTINGS
        loops = {"ours": loop_over(mode, paths, row_tokens)}
        for name, keys in (("bare", False), ("keys", True)):
            loops[name] = bare_loop(paths, length, row_tokens, runs_on=mode == "stream", keys=keys)
        times = time_in_turns(loops, max(args.batches // (1 + row_tokens // length), 10), args.rounds)
        pairs = (("keys", "bare"), ("ours", "bare"), ("ours", "keys"))
        found.append([statistics.median(over(times[one], times[other])) for one, other in pairs])
    return found


def metrics_cost(paths: list[Path], num_readers: int, picks: int, rounds: int) -> list[float]:
    """Microseconds that observing and reporting the pool adds to a pick: with a drain, less a pick that only chooses."""
    mix = MixOptions(num_readers, "weighted", "per_stream", ROWS)
    mixing = StreamMixingDataset(discover_direct(paths[:num_readers]), CutOptions("cost", 1024), READ, mix)
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
            slots = pool.choose([uniform])
            pool.record(slots)
            pool.readers[slots[0]].taken -= 1  # so that none ends
            mixing.drain_step_metrics()

    times = time_in_turns({"bare": bare, "observed": observed}, picks, rounds)
    return [high - low for high, low in zip(times["observed"], times["bare"], strict=True)]


def measure(args: argparse.Namespace) -> list[Figure | Table]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        costs = {length: row_costs(folder, length, args) for length in args.lengths}
        flat = [each for of_length in costs.values() for each in of_length]
        running_on = [each for of_length in costs.values() for each in of_length[::2]]
        found = [
            Figure("full rows over the bare loop, at most", max(ours for _, ours, _ in flat), at_most=BATCH_GOAL),
            Figure("the same draw and keys by hand over the bare loop, at most", max(keys for keys, _, _ in flat)),
            Figure(
                "`stream` over the same draw and keys by hand, at most",
                max(last for *_, last in running_on),
                at_most=BATCH_GOAL,
            ),
        ]
        many = write_corpus(folder / "many", [np.array([512 * 1024])] * max(GOALS_US))
        for size, goal in GOALS_US.items():
            picks = metrics_cost(many, size, args.batches, args.rounds)
            found.append(Figure(f"one pick's metrics at K={size}", statistics.median(picks), "us", at_most=goal))
    shown = [
        [length, *("/".join(f"{each:.2f}" for each in ratios) for ratios in each)] for length, each in costs.items()
    ]
    bare = Table("By hand/ours over the bare loop/ours over by hand", ("tokens a document", *SETTINGS), shown)
    return [*found, bare]


if __name__ == "__main__":
    parser = bench_parser(__doc__)
    # Lengths of documents, batches a turn (fewer of short documents), and turns after one that warms up.
    parser.set_defaults(lengths=[20, 200, 2000, 20_000], batches=100, rounds=7)
    run_bench("rows", parser, measure)
