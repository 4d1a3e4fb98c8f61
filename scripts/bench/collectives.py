"""Counts what the ranks of a real run send each other in a step, with torch's profiler."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from trainer_run import overrides, write_config

PROGRAM = str(Path(__file__).resolve().parents[2] / "train")
MICRO_BATCHES, LOG_INTERVAL, STEPS = 2, 4, 8  # the first is that of the config
# What torch is asked for: gloo carries a reduce-scatter out as an all-reduce.
KINDS = {
    "c10d::allreduce_": "all-reduce",
    "c10d::allgather_": "all-gather",
    "c10d::_allgather_base_": "all-gather",
    "c10d::allgather_into_tensor_coalesced_": "all-gather",
    "c10d::_reduce_scatter_base_": "reduce-scatter",
}

# A model for `[model] target` that records the collectives of its process and their sizes, step by step.
COUNTED_MODEL = """
import atexit, json, os
from pathlib import Path
from torch.profiler import ProfilerActivity, profile, record_function
from trainer.model import build as build_reference

profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
is_recording = False

def mark(module, inputs):
    global is_recording
    if not module.training:
        return
    if not is_recording:  # not before: it holds on to the parameters of a model that is being sharded
        is_recording = True
        profiler.start()
        atexit.register(report)
    with record_function("a forward"):
        pass

def report():
    profiler.stop()
    found = sorted((e.time_range.start, e.name, e.input_shapes) for e in profiler.events()
                   if e.name == "a forward" or e.name.startswith(("c10d::", "gloo:")))
    Path(__file__).with_name("events" + os.environ.get("RANK", "0")).write_text(json.dumps([e[1:] for e in found]))

def build(vocab_size, dim, num_layers):
    model = build_reference(vocab_size, dim, num_layers)
    model.register_forward_pre_hook(mark)
    return model
"""

SETS = (
    *(*overrides(STEPS, "cpu"), f"metrics.log_interval={LOG_INTERVAL}"),
    *('model.target="counted_model:build"', "model.dim=16", "model.num_layers=1"),
    "model.contract=false",  # whose calls would be counted too
    *("data.seq_len=32", "data.mixing.num_streams_mixed=2", "data.mixing.batch_size=2"),
)


@dataclass
class Sent:
    """What one rank asks for in a step, by kind of collective."""

    calls: Counter[str] = field(default_factory=Counter)
    elements: Counter[str] = field(default_factory=Counter)
    """Of an all-gather all that the rank has after it, of the others all that it had before."""


def count_collectives(world_size: int, *sets: str) -> tuple[Sent, Sent]:
    """Of rank 0: in a step that does not log, and in one that does. `sets`: settings."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "counted_model.py").write_text(COUNTED_MODEL, encoding="utf-8")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
        options = [f"--set={each}" for each in (*SETS, f"run.dir={folder}/runs", *sets)]
        command = [*launcher, PROGRAM, "--config", str(write_config(folder)), *options]
        environ = {**os.environ, "PYTHONPATH": name, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=environ, check=True, capture_output=True)
        events = json.loads((folder / "events0").read_text(encoding="utf-8"))
    replicas = next((int(each.partition("replicas=")[2]) for each in sets if "replicas=" in each), 1)
    steps: list[list[tuple[str, list[list[int]]]]] = []
    num_forwards = 0
    for what, shapes in events:
        if what == "a forward":
            if num_forwards % MICRO_BATCHES == 0:
                steps.append([])
            num_forwards += 1
        elif steps:
            steps[-1].append((what, shapes))
    return _sent(steps[LOG_INTERVAL], world_size // replicas), _sent(steps[LOG_INTERVAL - 1], world_size // replicas)


def _sent(events: list[tuple[str, list[list[int]]]], shards: int) -> Sent:
    sent = Sent()
    carried: Counter[str] = Counter()  # by gloo, whose events have the sizes that those of lists of tensors lack
    for what, shapes in events:
        if what in KINDS:
            sent.calls[KINDS[what]] += 1
        if what == "c10d::_reduce_scatter_base_":
            sent.elements["reduce-scatter"] += max(math.prod(shape) for shape in shapes if shape)
        carried[what] += sum(math.prod(shape) for shape in shapes)
    sent.elements["all-gather"] = carried["gloo:all_gather"] * shards
    sent.elements["all-reduce"] = carried["gloo:all_reduce"] - sent.elements["reduce-scatter"]
    return sent
