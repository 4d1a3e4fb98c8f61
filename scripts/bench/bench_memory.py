"""Memory of train_configs/gpu_1x.toml: what `train check` predicts against what a run takes, and growth over its steps.

Each run is a process of its own. On CUDA the measured peak is that of torch's allocator from the second step on, for which the
prediction is made; on the CPU it is the growth of the resident set since before the model, in a model so tiny that the ratio
means nothing.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from bench_table import Figure, bench_parser, in_child, peak_mb, run_bench
from trainer_run import GPU_CONFIG, LOG_INTERVAL, TINY, StepWatcher, plan_of, run_trainer

from trainer.lab.memory import predict_memory, resident_bytes

# Two micro-batches have the same worst moment as eight.
SETS = ("train.micro_batches=2", "train.compile=false")
MOST_OVER, LEAST_OVER = 1.1, 0.9
MOST_GROWTH_MB = 4.0  # batches that are prefetched, or in flight, come and go


class Watch(StepWatcher):
    """The memory in use and its peak after each step, in MB."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.in_use: list[float] = []
        self.peaks: list[float] = []

    def update(self, step: int, loss: float, tokens: int) -> None:
        is_cuda = self._device == "cuda"
        self.in_use.append((torch.cuda.memory_allocated() if is_cuda else resident_bytes()) / 1e6)
        self.peaks.append(peak_mb(self._device))
        if is_cuda and len(self.peaks) == 2:  # the first steps make what stays, such as the optimizer's state
            torch.cuda.reset_peak_memory_stats()


def measure_one(args: argparse.Namespace, sets: Sequence[str]) -> dict[str, float]:
    """In this process: predicted and measured MB, and the growth of the memory in use from step to step."""
    device = torch.device(args.device)
    with tempfile.TemporaryDirectory() as name:
        plan = plan_of(Path(name), GPU_CONFIG, steps=args.steps, device=args.device, sets=sets)
        predicted = predict_memory(plan)
        before = 0.0 if args.device == "cuda" else resident_bytes() / 1e6
        watch = Watch(args.device)
        run_trainer(plan, Path(name), device, watch)
    return {
        "predicted": predicted.peak / 1e6,
        "measured": watch.peaks[-1] - before,
        "growth": watch.in_use[-1] - watch.in_use[LOG_INTERVAL - 1],
    }


def measure(args: argparse.Namespace) -> list[Figure]:
    own = [*SETS, *(TINY if args.device == "cpu" else ()), *args.sets]
    found = []
    runs = {"plain": own}
    if args.device == "cuda":
        runs["compiled"] = [*own, "train.compile=true"]
    for name, sets in runs.items():
        took = in_child(measure_one, args, sets)
        ratio = took["measured"] / took["predicted"]
        found += [
            Figure(f"{name}: predicted peak", took["predicted"], "MB"),
            Figure(f"{name}: measured peak", took["measured"], "MB"),
            Figure(f"{name}: measured over predicted", ratio, "x", at_least=LEAST_OVER, at_most=MOST_OVER),
            Figure(f"{name}: growth from step 10 to the last", took["growth"], "MB", at_most=MOST_GROWTH_MB),
        ]
    return found


if __name__ == "__main__":
    parser = bench_parser(__doc__, device="cuda", sets=True)
    parser.add_argument("--steps", type=int, default=30, help="a multiple of the log interval, 10")
    run_bench("memory", parser, measure)
