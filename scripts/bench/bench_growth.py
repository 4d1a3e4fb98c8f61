"""Scaling of cost with the number of ranks, streams, groups, active readers and metric keys.

For ranks, collectives and their elements are counted with torch's profiler in real runs, since there are fewer cores than
processes to time. Everything else is timed per batch or per step; growth is the slope between the ends of the range on a
log-log scale: 0 is flat, 1 is linear.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from bench_loop import write_corpus
from bench_metrics import make_tracker
from bench_table import Figure, print_figures

from trainer.data.mixing.dataset import StreamMixingDataset
from trainer.data.streams.layout import discover_direct
from trainer.data.tokenizer import IdsTokenizer
from trainer.metrics.rank_reduction import rank_operations, reduce_over_ranks

PROGRAM = str(Path(__file__).resolve().parents[2] / "train")
SEQ_LEN, ROWS, VOCAB = 64, 8, 50_000
MAX_SLOPE, MAX_FLAT = 1.1, 0.25
MICRO_BATCHES, LOG_INTERVAL, STEPS = 2, 4, 8
Points = list[tuple[int, float]]

# A model for `[model] target` that records the collectives of its process and their sizes, step by step.
COUNTED_MODEL = """
import atexit, json, os
from pathlib import Path
from torch.profiler import ProfilerActivity, profile, record_function
from trainer.model.build import build as build_reference

profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)

def mark(module, inputs):
    with record_function("a forward"):
        pass

def report():
    profiler.stop()
    found = sorted((e.time_range.start, e.name, e.input_shapes) for e in profiler.events()
                   if e.name == "a forward" or "gloo:" in e.name)
    Path(__file__).with_name("events" + os.environ.get("RANK", "0")).write_text(json.dumps([e[1:] for e in found]))

def build(vocab_size, dim, num_layers):
    model = build_reference(vocab_size, dim, num_layers)
    model.register_forward_pre_hook(mark)
    profiler.start()
    atexit.register(report)
    return model
"""

CONFIG = """\
[run]
name = "growth"
dir = "{folder}/runs"
[train]
steps = {steps}
micro_batches = {micro_batches}
device = "cpu"
[data]
seq_len = 32
[data.mixing]
num_streams_mixed = 2
batch_size = 2
[[data.source]]
name = "words"
layout = "nested"
root = "{folder}/corpus"
modalities = ["a", "b"]
[model]
target = "counted_model:build"
contract = false  # whose calls would be counted too
dim = 16
num_layers = 1
[metrics]
log_interval = {log_interval}
wandb = {{ mode = "disabled" }}
[checkpoint]
every = 0
"""


def count_collectives(world_size: int) -> tuple[int, int, int, int]:
    """(collectives, elements) of one rank in a step that does not log, and in one that does."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder / "corpus")
        (folder / "counted_model.py").write_text(COUNTED_MODEL, encoding="utf-8")
        config = folder / "growth.toml"
        sizes = {"steps": STEPS, "micro_batches": MICRO_BATCHES, "log_interval": LOG_INTERVAL}
        config.write_text(CONFIG.format(folder=folder, **sizes), encoding="utf-8")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
        subprocess.run(
            [*launcher, PROGRAM, "--config", str(config)],
            env={**os.environ, "PYTHONPATH": name, "OMP_NUM_THREADS": "1"},
            check=True,
            capture_output=True,
        )
        events = json.loads((folder / "events0").read_text(encoding="utf-8"))
    steps: list[list[int]] = []
    num_forwards = 0
    for what, shapes in events:
        if what == "a forward":
            if num_forwards % MICRO_BATCHES == 0:
                steps.append([])
            num_forwards += 1
        elif steps:
            steps[-1].append(sum(math.prod(shape) for shape in shapes))
    silent, logged = steps[LOG_INTERVAL], steps[LOG_INTERVAL - 1]
    return len(silent), sum(silent), len(logged), sum(logged)


def dataset(paths: Sequence[Path], num_mixed: int) -> StreamMixingDataset:
    """One source of headerless token files in one pool."""
    return StreamMixingDataset(
        discover_direct(paths),
        name="growth",
        tokenizer=IdsTokenizer(VOCAB),
        seq_len=SEQ_LEN,
        num_streams_mixed=num_mixed,
        batch_size=ROWS,
        dtype="uint16",
        eod=0,
    )


def us_per_batch(mixing: StreamMixingDataset, batches: int) -> float:
    """Median of five turns, metrics drained at every batch."""
    turns = []
    for turn in range(6):
        began = time.perf_counter()
        for _ in range(batches):
            next(mixing)
            mixing.drain_step_metrics()
        if turn:
            turns.append((time.perf_counter() - began) / batches * 1e6)
    return statistics.median(turns)


def write_tokens(path: Path, documents: int, cells: int) -> None:
    """Documents of `cells` full windows each, ended by id 0."""
    ids = np.random.default_rng(documents).integers(1, VOCAB, (documents, cells * SEQ_LEN), dtype=np.uint16)
    ids[:, -1] = 0
    ids.tofile(path)


def over_streams(sizes: Sequence[int], batches: int) -> tuple[Points, Points]:
    """Microseconds per batch, and seconds to open, by number of streams, of which eight are read at once."""
    per_batch: Points = []
    opening: Points = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as name:
            first = Path(name, "s000000.bin")
            write_tokens(first, documents=32, cells=4)
            paths = [first, *(Path(name, f"s{number:06d}.bin") for number in range(1, size))]
            for path in paths[1:]:
                path.symlink_to(first)  # file systems limit the number of hard links to one file
            began = time.perf_counter()
            mixing = dataset(paths, 8)
            opening.append((size, time.perf_counter() - began))
            per_batch.append((size, us_per_batch(mixing, batches)))
    return per_batch, opening


def over_groups(sizes: Sequence[int], batches: int) -> Points:
    """Microseconds per batch by number of groups of one cell, in eight streams."""
    points: Points = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as name:
            paths = [Path(name, f"s{number}.bin") for number in range(8)]
            for path in paths:
                write_tokens(path, documents=size // 8, cells=1)
            points.append((size, us_per_batch(dataset(paths, 8), min(batches, max(size // ROWS // 8, 10)))))
    return points


def over_pool(sizes: Sequence[int], batches: int) -> Points:
    """Microseconds per batch by number of active readers."""
    points: Points = []
    with tempfile.TemporaryDirectory() as name:
        paths = [Path(name, f"s{number:04d}.bin") for number in range(max(sizes))]
        for path in paths:
            write_tokens(path, documents=32, cells=8)
        for size in sizes:
            points.append((size, us_per_batch(dataset(paths, size), batches)))
    return points


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
    """Each point, and the slope with its goal."""
    rows = [Figure(f"{unit} at {size:,} {what}", value, unit) for size, value in points]
    return [*rows, Figure(f"growth with {what} (0 flat, 1 linear)", slope(points), "", at_most=at_most)]


def measure(args: argparse.Namespace) -> list[Figure]:
    """All figures; `args.plot` also writes a plot."""
    found: list[Figure] = []
    for world_size in args.ranks:
        silent, silent_elements, logged, logged_elements = count_collectives(world_size)
        found += [
            Figure(f"collectives per step, {world_size} ranks", silent),
            Figure(f"collectives per logged step, {world_size} ranks", logged, at_most=silent + 1),
            Figure(f"elements sent per rank, {world_size} ranks: gradients and sums", silent_elements),
            Figure(
                f"elements sent per rank, {world_size} ranks: additional on a logged step",
                logged_elements - silent_elements,
            ),
        ]
    measured: list[tuple[str, str, Callable[[], Points], float]] = [
        ("groups", "us per batch", lambda: over_groups(args.groups, args.batches), MAX_FLAT),
        ("active readers", "us per batch", lambda: over_pool(args.pool, args.batches), MAX_SLOPE),
        ("metric keys", "us per logged step", lambda: over_keys(args.keys, args.batches), MAX_SLOPE),
    ]
    per_batch, opening = over_streams(args.streams, args.batches)
    series = {("streams", "us per batch"): per_batch, ("streams", "s to open"): opening}
    found += figures_of("streams", "us per batch", per_batch, MAX_FLAT)
    found += figures_of("streams", "s to open", opening, MAX_SLOPE)
    for what, unit, points, at_most in measured:
        series[what, unit] = points()
        found += figures_of(what, unit, series[what, unit], at_most)
    if args.plot is not None:
        from growth_plot import draw  # matplotlib is an extra

        draw(series, args.plot)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print; exits with 1 when --check is given and a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--streams", type=int, nargs="+", default=[10, 100, 1000, 10_000, 100_000])
    parser.add_argument("--groups", type=int, nargs="+", default=[1000, 10_000, 100_000, 1_000_000, 10_000_000])
    parser.add_argument("--pool", type=int, nargs="+", default=[4, 16, 64, 256])
    parser.add_argument("--keys", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--batches", type=int, default=300, help="batches (steps) per round")
    parser.add_argument("--plot", type=Path, help="write a plot of the growth to this file (PNG)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--check", action="store_true", help="exit with 1 unless every goal is met")
    args = parser.parse_args(argv)
    print_figures("growth", measure(args), as_json=args.json, check=args.check)


if __name__ == "__main__":
    main()
