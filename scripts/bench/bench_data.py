"""Overhead of mixing and of the pool's metrics, over a bare numpy loop in the same run.

Eight sources of 4,000 samples of 1,024 uint16 tokens, weights 8, 4, 2, 1, 1, 1, 1, 2, batches of 8 as int64, one process, no
workers; measured in turn.

The goal is a batch in 100 us, metrics included: 1 % of a micro-batch of 10 ms, in a parallel thread. The bare loop makes no
targets, keeps no position, and reports nothing.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from bench_table import Figure, bench_parser, in_turns, over, ratio_figure, run_bench, seconds_of

from trainer.data.blend import BlendDataset, BlendSource
from trainer.data.documents import ReadOptions
from trainer.data.groups import CutOptions
from trainer.data.layout import discover_direct
from trainer.data.mixing import MixOptions, StreamMixingDataset
from trainer.data.tokenizer import IdsTokenizer
from trainer.data.weights import ScheduledWeight

WEIGHTS = (8, 4, 2, 1, 1, 1, 1, 2)
SAMPLES, SEQ_LEN, ROWS, VOCAB = 4000, 1024, 8, 50_000
BATCH_GOAL_US, GOALS_US = 100.0, {8: 10.0, 64: 20.0}
Loop = Callable[[int], None]


def write_corpus(folder: Path, num_streams: int, samples: int) -> list[Path]:
    """Headerless token files, one a stream."""
    paths = []
    for number in range(num_streams):
        paths.append(folder / f"s{number:02d}.bin")
        ids = np.random.default_rng(number).integers(0, VOCAB, samples * SEQ_LEN, dtype=np.uint16)
        ids.tofile(paths[-1])
    return paths


def dataset(
    paths: Sequence[Path], name: str, num_mixed: int, *, seq_len: int = SEQ_LEN, eod: int | None = None
) -> StreamMixingDataset:
    """A mixing dataset over some headerless token files, in one pool."""
    return StreamMixingDataset(
        discover_direct(paths),
        CutOptions(name, seq_len),
        ReadOptions(IdsTokenizer(VOCAB), dtype="uint16", eod=eod),
        MixOptions(num_mixed, batch_size=ROWS),
    )


def loop_over(dataset: BlendDataset | StreamMixingDataset, *, drain: bool) -> Loop:
    """So many batches."""

    def run(batches: int) -> None:
        for _ in range(batches):
            next(dataset)
            if drain:
                dataset.drain_step_metrics()

    return run


def blend_loop(paths: list[Path], *, drain: bool) -> Loop:
    """Ours: a blend of one source a file, every weight on a schedule, metrics drained at every batch."""
    sources = []
    for path, weight in zip(paths, WEIGHTS, strict=True):
        schedule = ScheduledWeight("linear", {0: float(weight), 10_000_000: float(weight) + 1.0})
        sources.append(BlendSource(path.stem, dataset([path], path.stem, 1), schedule))
    return loop_over(BlendDataset(sources, seed=0), drain=drain)


def pool_loop(paths: list[Path]) -> Loop:
    """Ours: one source, all files in one pool, weighted by what remains, metrics drained at every batch."""
    return loop_over(dataset(paths, "pool", len(paths)), drain=True)


def bare_loop(paths: list[Path], *, with_targets: bool) -> Loop:
    """What one writes without us: a weighted `choice`, and the next block of a memmap as int64; no resume, no metrics.

    With targets it makes what a trainer needs, inputs and the same shifted by one, instead of the inputs alone.
    """
    maps = [np.memmap(path, dtype=np.uint16, mode="r") for path in paths]
    generator = np.random.default_rng(0)
    probabilities = np.array(WEIGHTS) / sum(WEIGHTS)
    cursors = [0] * len(paths)
    block = ROWS * SEQ_LEN

    def run(batches: int) -> None:
        for _ in range(batches):
            source = generator.choice(len(maps), p=probabilities)
            begin = cursors[source]
            maps[source][begin : begin + block].reshape(ROWS, SEQ_LEN).astype(np.int64)
            if with_targets:
                maps[source][begin + 1 : begin + block + 1].reshape(ROWS, SEQ_LEN).astype(np.int64)
            cursors[source] = (begin + block) % ((SAMPLES - ROWS) * SEQ_LEN)

    return run


def time_in_turns(loops: dict[str, Loop], batches: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds a batch, of each round."""

    def us_per_batch(loop: Loop) -> float:
        return seconds_of(partial(loop, batches), "cpu") / batches * 1e6

    return in_turns({name: partial(us_per_batch, loop) for name, loop in loops.items()}, rounds)


def metrics_cost(paths: list[Path], num_readers: int, picks: int, rounds: int) -> list[float]:
    """Microseconds that observing and reporting the pool adds to a pick: with a drain, less a pick that only chooses."""
    mixing = dataset(paths[:num_readers], "cost", num_readers)
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


def measure(args: argparse.Namespace) -> list[Figure]:
    """Everything."""
    with tempfile.TemporaryDirectory() as folder:
        paths = write_corpus(Path(folder), len(WEIGHTS), SAMPLES)
        loops = {
            "blend, metrics on": blend_loop(paths, drain=True),
            "blend, metrics off": blend_loop(paths, drain=False),
            "pool of 8, metrics on": pool_loop(paths),
            "bare loop": bare_loop(paths, with_targets=False),
            "bare loop with targets": bare_loop(paths, with_targets=True),
        }
        times = time_in_turns(loops, args.batches, args.rounds)
    found = []
    for name, each in times.items():
        goal = BATCH_GOAL_US if "metrics on" in name else None
        found.append(Figure(f"{name}: us a batch", statistics.median(each), "us", at_most=goal))
    for other in ("bare loop", "bare loop with targets"):
        ratios = over(times[other], times["blend, metrics on"])
        found.append(ratio_figure(f"speed of the blend over the {other}", ratios))
    with tempfile.TemporaryDirectory() as folder:
        many = write_corpus(Path(folder), max(GOALS_US), 512)
        for size, goal in GOALS_US.items():
            costs = metrics_cost(many, size, args.batches, args.rounds)
            found.append(Figure(f"one pick's metrics at K={size}", statistics.median(costs), "us", at_most=goal))
    return found


def main() -> None:
    """Measure and print."""
    parser = bench_parser(__doc__)
    parser.add_argument("--batches", type=int, default=400, help="batches a turn")
    parser.add_argument("--rounds", type=int, default=75, help="turns of each, after one that warms up")
    run_bench("data", parser, measure)


if __name__ == "__main__":
    main()
