"""A profile of steady steps of train_configs/gpu_1x.toml, none of which logs: kernels, idle time and synchronizations.

torch's profiler runs over a few steps of the full trainer, after steps that compile and warm up; the profiler itself makes the
host slower, so idle time is an upper bound. The trace opens in chrome://tracing and in Perfetto.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from bench_table import Figure, Table, bench_parser, run_bench
from trainer_run import GPU_CONFIG, TINY, StepWatcher, plan_of, run_trainer

from trainer.config.schema import FIRST_PROFILED
from trainer.lab.profile import FOLDER, TRACE

ACTIVE = 4  # steps that are profiled
MOST_IDLE = 0.05  # of 277 million parameters
LOG_INTERVAL = 1000  # the first step logs, and no other
MOST_KERNELS = 25
MOST_NAME = 90  # it may be a page of template arguments
STEP = "ProfilerStep#"
_CALLS = ("DeviceSynchronize", "StreamSynchronize", "Memcpy", "Memcpy2D", "MemcpyToSymbol", "MemcpyFromSymbol")
SYNCHRONIZING = {f"{prefix}{name}" for prefix in ("cuda", "hip") for name in _CALLS}
SYNCHRONIZING |= {"cuCtxSynchronize", "cuStreamSynchronize"}
EVENT_WAITS = {"cudaEventSynchronize", "hipEventSynchronize", "cuEventSynchronize"}
Span = tuple[float, float, str]  # from, to (microseconds), name


def profile_run(device: str, sets: Sequence[str], trace: Path) -> list[dict[str, Any]]:
    """The events of the trace of a run."""
    own = [f"metrics.log_interval={LOG_INTERVAL}", f"metrics.profile={ACTIVE}", *sets]
    if device == "cpu":
        own = [*TINY, *own]
    trace.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        plan = plan_of(Path(name), GPU_CONFIG, steps=FIRST_PROFILED + ACTIVE, device=device, sets=own)
        run_trainer(plan, Path(name), torch.device(device), StepWatcher())
        trace.write_bytes(Path(name, "run", FOLDER, TRACE).read_bytes())
    events: list[dict[str, Any]] = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return events


def gaps(spans: Iterable[Span], start: float, end: float) -> list[float]:
    """Lengths of the times between `start` and `end` in which no span runs, in order."""
    found, covered_to = [], start
    for low, high, _ in sorted(spans):
        found.append(min(low, end) - covered_to)
        covered_to = max(covered_to, high)
    return [length for length in [*found, end - covered_to] if length > 0]


def measure(events: Iterable[dict[str, Any]]) -> list[Figure | Table]:
    """Sums over the profiled steps, from the first start to the last end on the host."""

    def spans(*kinds: str) -> list[Span]:
        own = (event for event in events if event.get("ph") == "X" and event.get("cat") in kinds)
        return [(each["ts"], each["ts"] + each.get("dur", 0.0), str(each["name"])) for each in own]

    steps = [span for span in spans("user_annotation") if span[2].startswith(STEP)]
    num_steps, start, end = len(steps), min(steps)[0], max(span[1] for span in steps)
    on_device, calls, lengths = (
        spans("kernel", "gpu_memcpy", "gpu_memset"),
        Counter[str](),
        defaultdict[str, float](float),
    )
    for low, high, name in on_device:
        if low < end and high > start:
            calls[name] += 1
            lengths[name] += min(high, end) - max(low, start)
    idle, whole = gaps(on_device, start, end), sum(lengths.values())
    on_host = spans("cuda_runtime", "cuda_driver")
    names = [(step, name) for low, high, step in steps for at, _, name in on_host if low <= at < high]
    waits = Counter((step, name) for step, name in names if name in SYNCHRONIZING)
    figures = [
        Figure("profiled steps", num_steps),
        Figure("step", (end - start) / num_steps / 1e3, "ms"),
        Figure("no kernel runs, per step", sum(idle) / num_steps / 1e3, "ms"),
        Figure("no kernel runs, share of the step", sum(idle) / (end - start), "x", at_most=MOST_IDLE),
        Figure("longest gap", max(idle, default=0.0) / 1e3, "ms"),
        Figure("kernels started, per step", calls.total() / num_steps),
        Figure("synchronizations on steps that do not log", waits.total(), at_most=0),
        Figure("waits for an event, per step", sum(name in EVENT_WAITS for _, name in names) / num_steps),
    ]
    rows = [
        (name[:MOST_NAME], calls[name], round(length / 1e3, 3), f"{length / whole:.1%}")
        for name, length in sorted(lengths.items(), key=lambda each: -each[1])[:MOST_KERNELS]
    ]
    tables = [Table(f"Time by kernel, over {num_steps} steps", ("kernel", "calls", "total ms", "share"), rows)]
    if waits:
        listed = [(step.removeprefix(STEP), name, count) for (step, name), count in waits.items()]
        tables.append(Table("Synchronizations", ("profiled step", "call", "times"), listed))
    return [*figures, *tables]


if __name__ == "__main__":
    parser = bench_parser(__doc__, device="cuda", sets=True)
    parser.add_argument("--trace", type=Path, default=Path("build/trace.json.gz"), help="where the trace is written")
    run_bench("profile", parser, lambda args: measure(profile_run(args.device, args.sets, args.trace)))
