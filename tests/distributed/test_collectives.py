"""What the ranks say to each other in a step, counted by torch's profiler in real runs of the program."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.support.runs import run, write_tiny_config

MICRO_BATCHES, STEPS, LOG_INTERVAL = 2, 8, 4

# The config names this module's builder. Every forward leaves a mark, so that the collectives can be told apart by step.
MODULE = """
import atexit, json, os
from pathlib import Path
from torch.profiler import ProfilerActivity, profile, record_function
from trainer.model.build import build as build_reference

profiler = profile(activities=[ProfilerActivity.CPU])

def mark(module, inputs):
    with record_function("a forward"):
        pass

def report():
    profiler.stop()
    marks = [(e.time_range.start, e.name) for e in profiler.events() if e.name == "a forward" or "gloo:" in e.name]
    names = [name for _, name in sorted(marks)]
    Path(__file__).with_name("names" + os.environ["RANK"]).write_text(json.dumps(names))

def build(vocab_size, dim, num_layers):
    model = build_reference(vocab_size, dim, num_layers)
    model.register_forward_pre_hook(mark)
    profiler.start()
    atexit.register(report)
    return model
"""


def collectives_by_step(names: list[str]) -> list[Counter[str]]:
    """Of each step: what follows its first forward, up to the next step's."""
    steps: list[Counter[str]] = []
    num_forwards = 0
    for name in names:
        if name == "a forward":
            if num_forwards % MICRO_BATCHES == 0:
                steps.append(Counter())
            num_forwards += 1
        elif steps:
            steps[-1][name] += 1
    return steps


@pytest.mark.distributed
@pytest.mark.parametrize("has_gns", [True, False])
def test_a_step_has_one_gradient_sync_and_one_small_reduction_and_a_logged_one_more(
    tmp_path: Path, has_gns: bool
) -> None:
    (tmp_path / "profiled.py").write_text(MODULE, encoding="utf-8")
    config = write_tiny_config(tmp_path, f"\n[gns]\nenabled = {str(has_gns).lower()}\n\n[checkpoint]\nevery = 0\n")
    text = config.read_text(encoding="utf-8").replace("[model]", '[model]\ntarget = "profiled:build"\ncontract = false')
    config.write_text(text.replace("log_interval = 1", f"log_interval = {LOG_INTERVAL}"), encoding="utf-8")
    done = run("--config", config, "--steps", STEPS, nproc=2, extra={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        steps = collectives_by_step(json.loads((tmp_path / f"names{rank}").read_text()))
        assert len(steps) == STEPS
        for number, found in enumerate(steps[1:-1], start=2):  # DDP's set-up and the run's end are in the outer ones
            # DDP's one bucket, and the step's own sums; a logged step adds one gathering of all that is logged.
            expected = {"gloo:all_reduce": 2, **({"gloo:all_gather": 1} if number % LOG_INTERVAL == 0 else {})}
            assert found == expected, (number, found)
