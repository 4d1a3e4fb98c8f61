"""Full rows against a bare numpy loop and against batches of one stream (`per_stream`), in CPU time, and what metrics cost.

The bare loop fills tokens, targets and resets of 16 rows. Its goal of 1.5 cannot be met: a loop that draws documents from what
is left of the open files, and says which groups and segments a row holds, takes that much by itself. Beside that, ours weighs
sources, cuts, resumes, and checks the files' sizes.

Corpora: 16 rows of 256, 8 files open. Speed: millions of tokens a second, opening files included.
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
from trainer.data.blend import BlendDataset, BlendSource
from trainer.data.documents import ReadOptions
from trainer.data.groups import CutOptions
from trainer.data.lanes import LaneBlend
from trainer.data.layout import Stream, discover_direct
from trainer.data.mixing import MixOptions, StreamMixingDataset
from trainer.data.shard_source import ShardSource
from trainer.data.tokenizer import IdsTokenizer
from trainer.data.weights import ConstantWeight
from trainer.lab.tokenized import write_index

ROWS, LANES, VOCAB, MIXED = 8, 16, 50_000, 4
BATCH_GOAL, GOALS_US, LEAST_FILL = 1.5, {8: 10.0, 64: 20.0}, 0.999
READ, MODES, SHORT = ReadOptions(IdsTokenizer(VOCAB)), ("per_stream", "document", "stream"), 256
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
        loops = {
            "ours": loop_over(
                reader(mode, [discover_direct(paths)], row_tokens=row_tokens, num_mixed=MIXED), drain=False
            )
        }
        for name, keys in (("bare", False), ("keys", True)):
            loops[name] = bare_loop(paths, length, row_tokens, runs_on=mode == "stream", keys=keys)
        times = time_in_turns(loops, max(args.batches // (1 + row_tokens // length), 10), args.rounds)
        pairs = (("keys", "bare"), ("ours", "bare"), ("ours", "keys"))
        found.append([statistics.median(over(times[one], times[other])) for one, other in pairs])
    return found


def reader(mode: str, sources: Sequence[Sequence[Stream]], shard: int = 0, *, row_tokens: int, **sizes: int) -> Any:
    kind, parts = StreamMixingDataset if mode == "per_stream" else ShardSource, []
    mix = MixOptions(sizes["num_mixed"], "weighted", "per_stream" if mode == "per_stream" else "per_row", LANES)
    for number, streams in enumerate(sources):
        cut = CutOptions(f"s{number}", row_tokens)
        part = kind(streams, cut, READ, mix, shard=shard, num_shards=sizes.get("num_shards", 1))
        parts.append(BlendSource(part.name, part, ConstantWeight(1.0)))
    if mode == "per_stream":
        return BlendDataset(parts, seed=0)
    how: dict[str, Any] = {"rows": LANES, "row_tokens": row_tokens, "runs_on": mode == "stream"}
    return LaneBlend(parts, seed=0, tokenizer=READ.tokenizer, **how)


def corpora() -> dict[str, tuple[int, list[list[Ints]]]]:
    """Ranks, and the lengths of the documents of each file of each source."""
    rng = np.random.default_rng(0)

    def source(files: int, documents: int, median: float) -> list[Ints]:
        return [np.ceil(rng.lognormal(np.log(median), 0.7, documents)).astype(np.int64) for _ in range(files)]

    many = source(24, 300, 600)
    return {
        "3,000 files of one": (1, [source(3000, 1, 600)]),
        "24 files of 300": (1, [many]),
        "short": (1, [source(8, 5000, 30)]),
        "short, long (two sources)": (1, [source(8, 1000, 60), source(8, 30, 6000)]),
        "24 files, 8 ranks": (8, [many]),
    }


def filled(folder: Path, batches: int) -> list[list[str]]:
    """Fill, shapes and speed on each corpus, by mode."""
    rows = []
    for title, (num_ranks, sources) in corpora().items():
        streams = [discover_direct(write_corpus(folder / f"{title} {i}", each)) for i, each in enumerate(sources)]
        cells: list[list[str]] = [[], [], []]
        for mode in MODES:
            began, tokens, shapes = time.process_time(), 0, set()
            sizes = {"row_tokens": SHORT, "num_mixed": 8, "num_shards": num_ranks}
            ranks = [reader(mode, streams, rank, **sizes) for rank in range(num_ranks)]
            for targets in (next(rank)["targets"] for _ in range(batches) for rank in ranks):
                tokens += int((targets != IGNORED).sum())
                shapes.add(targets.shape)
            speed = tokens / (time.process_time() - began) / 1e6
            fill = tokens / (batches * num_ranks * LANES * SHORT)
            for cell, value in zip(cells, (f"{fill:.3f}", f"{len(shapes)}", f"{speed:.1f}"), strict=True):
                cell.append(value)
        rows.append([title, *map("/".join, cells)])
    return rows


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
        rows = filled(folder, 3 * args.batches)
    lowest = min(float(row[1].rpartition("/")[2]) for row in rows)
    found.append(Figure("lowest fill with `stream`", lowest, at_least=LEAST_FILL))
    shown = [
        [length, *("/".join(f"{each:.2f}" for each in ratios) for ratios in each)] for length, each in costs.items()
    ]
    bare = Table("By hand/ours over the bare loop/ours over by hand", ("tokens a document", *SETTINGS), shown)
    return [*found, bare, Table("/".join(MODES), ("documents", "fill", "shapes", "speed"), rows)]


if __name__ == "__main__":
    parser = bench_parser(__doc__)
    # Lengths of documents, batches a turn (fewer of short documents), and turns after one that warms up.
    parser.set_defaults(lengths=[20, 200, 2000, 20_000], batches=100, rounds=7)
    run_bench("rows", parser, measure)
