"""`train.compile = true` over false, by family: tokens per second, memory, and the time from launch to the first step.

Two full trainers take turns, step by step; losses must agree. Nothing compiled comes from a cache. On CUDA the run is
train_configs/gpu_1x.toml, on the CPU a model of 4 layers of width 192.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from functools import partial
from pathlib import Path

import torch
from bench_table import Figure, Table, bench_parser, over, ratio_figure, run_bench
from trainer_run import GPU_CONFIG, TINY, plan_of, run_trainer
from turns import Turn, run_in_turns

from trainer.metrics.device import compute_mfu, resolve_peak_tflops
from trainer.training.setup.plan import Plan, build_model

FAMILIES = {
    "cpu": ("rglru", "gated_delta", "transformer", "gru", "lstm"),
    "cuda": ("rglru", "gated_delta", "transformer"),
}
SIZES = {"cpu": ("model.dim=192", "model.num_layers=4"), "cuda": ("train.micro_batches=2",)}


def plan_here(folder: Path, family: str, args: argparse.Namespace, *, is_compiled: bool) -> Plan:
    """The run."""
    sets = [
        *(TINY if args.tiny else SIZES[args.device]),
        f"model.family={family}",
        f"train.compile={is_compiled}".lower(),
    ]
    config = GPU_CONFIG if args.device == "cuda" else None
    return plan_of(folder, config, steps=args.steps, device=args.device, sets=[*sets, *args.sets])


def measure(args: argparse.Namespace) -> list[Figure | Table]:
    """Figures, and what they are made of."""
    if args.device == "cpu" and shutil.which("g++") is None:
        raise SystemExit("torch compiles for the CPU with a C++ compiler, and g++ is not on PATH")
    figures, rows = [], []
    for family in args.families or FAMILIES[args.device]:
        runs = {name: partial(only, family, name == "compiled", args) for name in ("eager", "compiled")}
        blocks = list(run_in_turns(runs, args.device, args.steps).values())
        speeds = [[block.tokens / block.seconds for block in each[1:]] for each in blocks]
        figures.append(ratio_figure(f"{family}: tokens per second, compiled over eager", over(*reversed(speeds))))
        middles = [statistics.median(each) for each in speeds]
        firsts, peaks = ([getattr(each[-1], name) for each in blocks] for name in ("first_step_sec", "peak_mb"))
        mfu = mfu_of(family, args, middles[-1])
        found = (family, *map(round, middles), *firsts, peaks[1] / peaks[0])
        rows.append(found if mfu is None else (*found, float(mfu)))
    columns = (
        "family",
        "tokens/s, eager",
        "compiled",
        "first step after s, eager",
        "compiled",
        "memory, over eager",
        "MFU",
    )
    return [*figures, Table("Medians", columns[: len(rows[0])], rows)]


def mfu_of(family: str, args: argparse.Namespace, tokens_per_sec: float) -> float | torch.Tensor | None:
    """Model FLOPs utilization; None where the device's peak is not known."""
    with tempfile.TemporaryDirectory() as name, torch.device("meta"):
        plan = plan_here(Path(name), family, args, is_compiled=False)
        flops = build_model(plan.config.model, plan.vocab_size).flops_per_token(plan.config.data.seq_len)  # type: ignore[operator]
    peak = resolve_peak_tflops(args.device)
    return compute_mfu(tokens_per_sec=tokens_per_sec, flops_per_token=flops, num_devices=1, peak_tflops=peak)


def only(family: str, is_compiled: bool, args: argparse.Namespace, turn: Turn) -> None:
    """Run one of the two, in its turns."""
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    with tempfile.TemporaryDirectory() as name:
        plan = plan_here(Path(name), family, args, is_compiled=is_compiled)
        run_trainer(plan, Path(name), torch.device(args.device), turn)


def main() -> None:
    """Measure and print."""
    parser = bench_parser(__doc__, device="cpu", sets=True)
    parser.add_argument("--families", nargs="+", help="only these")
    parser.add_argument("--tiny", action="store_true", help="shrink models and batches: a rehearsal")
    parser.add_argument("--steps", type=int, default=60, help="steps of each run, a multiple of 10")
    run_bench("compile", parser, measure)


if __name__ == "__main__":
    main()
