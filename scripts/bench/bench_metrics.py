"""Overhead of the metrics per step on one rank: medians in microseconds.

- a step that is not logged: `end_step`, without the clock reads of its three timed sections;
- a logged step: `end_step` that flushes 60 keys to metrics.jsonl and stdout (/dev/null), each line in one write;
- reducing 60 keys on one rank, without collectives.

wandb is not included.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bench_table import Figure, bench_parser, run_bench, seconds_of

from trainer.metrics.aggregate import SumCount, Value, rank_operations, reduce_over_ranks
from trainer.metrics.catalog import plain_names
from trainer.metrics.payload_contract import parse_payload
from trainer.metrics.sinks import JsonlSink, StdoutSink
from trainer.metrics.tracker import MetricsTracker
from trainer.options import TrackerOptions

NUM_KEYS = 60
SECTIONS = ("data", "forward_backward", "optimizer")


def counter_and_gauge_keys(count: int) -> list[str]:
    """Keys of a run with pool, ledger and noise scale, except those that the tracker adds itself."""
    own = ("smoothed/", "time/", "gpu/")
    single = {"loss", "grad_norm", "lr", "tokens_per_sec", "mfu", "step_time_sec", "tokens_in_step", "tokens_seen"}
    keys = [name for name in plain_names() if not name.startswith(own) and name not in single]
    keys += [f"token_type/{name}/{what}" for name in "abcdefgh" for what in ("loss", "accuracy")]
    keys += [f"objective/{name}" for name in "abcdefgh"]
    assert len(keys) >= count
    return keys[:count]


def median_us(action: Callable[[int], float], repeats: int) -> float:
    """Median in microseconds of `action(step)`, which returns seconds, after a tenth as warm-up."""
    spent = [action(step) for step in range(1, repeats + repeats // 10 + 1)]
    return statistics.median(spent[repeats // 10 :]) * 1e6


def make_step(tracker: MetricsTracker, extra: dict[str, Value], *, sections: bool) -> Callable[[int], float]:
    """One step of the tracker; the seconds of `end_step`, or with `sections` those of the timed sections."""

    def step(number: int) -> float:
        tracker.start_step()
        began = time.perf_counter()
        for name in SECTIONS:
            with tracker.section(name):
                pass
        between = time.perf_counter()
        tracker.end_step(number + 1, loss=2.5, grad_norm=1.25, lr=3e-4, tokens_in_step=65_536, extra=extra)
        return between - began if sections else time.perf_counter() - between

    return step


def make_tracker(log_interval: int) -> MetricsTracker:
    """A tracker configured as in a run, with MFU."""
    options = TrackerOptions(log_interval, peak_tflops=1.0)
    return MetricsTracker(options, num_devices=1, device="cpu", flops_per_token=1e6)


def logged_us(repeats: int) -> float:
    with tempfile.TemporaryDirectory() as folder, open("/dev/null", "w", encoding="utf-8") as stdout:
        path = Path(folder, "metrics.jsonl")
        tracker = make_tracker(1)
        tracker.init_backends([JsonlSink(path), StdoutSink("json", stream=stdout)])
        own = len(SECTIONS) * 2 + 12  # what the tracker adds: times and shares, raw and smoothed values, tokens
        extra: dict[str, Value] = dict.fromkeys(counter_and_gauge_keys(NUM_KEYS - own), 0.123456789)
        cost = median_us(make_step(tracker, extra, sections=False), repeats)
        tracker.close()
        keys = len(parse_payload(path.read_bytes().splitlines()[-1]).metrics)
        assert keys == NUM_KEYS, f"{keys} keys"
    return cost


def reduced_us(repeats: int) -> float:
    keys = counter_and_gauge_keys(NUM_KEYS)
    plan = rank_operations(keys)
    sums = SumCount(torch.tensor(3.0, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64))
    weighted = dict.fromkeys((key for key, how in plan.items() if how == "weighted_mean"), sums)
    local: dict[str, Value] = {**dict.fromkeys(keys, 1.0), **weighted}

    def reduce() -> None:
        reduce_over_ranks(local, plan, device="cpu", world_size=1)

    return median_us(lambda _: seconds_of(reduce, "cpu"), repeats)


def measure(args: argparse.Namespace) -> list[Figure]:
    both = [make_step(make_tracker(10**9), {}, sections=sections) for sections in (False, True)]
    unlogged, sections = (median_us(step, args.repeats) for step in both)
    return [
        Figure("end_step, not logged", unlogged, "us", at_most=20),
        Figure("end_step, 60 keys to jsonl and stdout", logged_us(args.repeats), "us", at_most=250),
        Figure("three timed sections of a step", sections, "us"),
        Figure("reducing 60 keys on one rank", reduced_us(args.repeats), "us"),
    ]


if __name__ == "__main__":
    parser = bench_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=5000, help="steps of each measurement")
    run_bench("metrics", parser, measure)
