"""A profile of steady steps of train_configs/gpu_1x.toml, none of which logs: kernels, idle time and synchronizations.

torch's profiler runs over a few steps of the full trainer, after steps that compile and warm up; the profiler itself makes the
host slower, so idle time is an upper bound. The trace opens in chrome://tracing and in Perfetto.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from bench_table import Figure, Table, bench_parser, run_bench
from trainer_run import GPU_CONFIG, TINY, StepWatcher, plan_of, run_trainer

from trainer.config.schema import FIRST_PROFILED
from trainer.lab.profile import FOLDER, TRACE, TraceSummary, read_trace, summarize

ACTIVE = 4  # steps that are profiled
MOST_IDLE = 0.05  # of 277 million parameters
LOG_INTERVAL = 1000  # the first step logs, and no other
MOST_KERNELS = 25
MOST_NAME = 90  # it may be a page of template arguments


def profile_run(device: str, sets: Sequence[str], trace: Path) -> TraceSummary:
    own = [f"metrics.log_interval={LOG_INTERVAL}", f"metrics.profile={ACTIVE}", *sets]
    if device == "cpu":
        own = [*TINY, *own]
    trace.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        plan = plan_of(Path(name), GPU_CONFIG, steps=FIRST_PROFILED + ACTIVE, device=device, sets=own)
        run_trainer(plan, Path(name), torch.device(device), StepWatcher())
        shutil.copy(Path(name, "run", FOLDER, TRACE), trace)
    return summarize(read_trace(trace))


def measure(found: TraceSummary) -> list[Figure | Table]:
    figures = [
        Figure("profiled steps", found.num_steps),
        Figure("step", found.step_ms, "ms"),
        Figure("no kernel runs, per step", found.idle_ms, "ms"),
        Figure("no kernel runs, share of the step", found.idle_share, "x", at_most=MOST_IDLE),
        Figure("longest gap", found.longest_gap_ms, "ms"),
        Figure("kernels started, per step", sum(k.calls for k in found.kernels) / found.num_steps),
        Figure("synchronizations on steps that do not log", found.num_synchronizations, at_most=0),
        Figure("waits for an event, per step", found.event_waits / found.num_steps),
    ]
    kernels = found.kernels[:MOST_KERNELS]
    rows = [(each.name[:MOST_NAME], each.calls, round(each.total_ms, 3), f"{each.share:.1%}") for each in kernels]
    tables = [Table(f"Time by kernel, over {found.num_steps} steps", ("kernel", "calls", "total ms", "share"), rows)]
    if found.num_synchronizations:
        calls = [(step, name, count) for step, each in found.synchronizations.items() for name, count in each.items()]
        tables.append(Table("Synchronizations", ("profiled step", "call", "times"), calls))
    return [*figures, *tables]


if __name__ == "__main__":
    parser = bench_parser(__doc__, device="cuda", sets=True)
    parser.add_argument("--trace", type=Path, default=Path("build/trace.json.gz"), help="where the trace is written")
    run_bench("profile", parser, lambda args: measure(profile_run(args.device, args.sets, args.trace)))
