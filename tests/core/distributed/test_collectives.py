"""What the ranks say to each other in a step, counted by torch's profiler in real runs of the program."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.support.runs import run, write_tiny_config

pytestmark = pytest.mark.distributed
MICRO_BATCHES, STEPS, LOG_INTERVAL, BLOCKS = 2, 4, 3, 2
UNITS = BLOCKS + 1  # with what is in no block: embedding, last norm, output layer
MATRICES = 8 * BLOCKS  # of the reference model

# The config names this module's builder. Every forward leaves a mark, so that the collectives can be told apart by step. The
# mark is a hook, which stays when the model is sharded; the first starts the profiler, the last ends it. Names are
# of what torch is asked for: gloo carries a reduce-scatter out as an all-reduce.
MODULE = """
import json, os
from pathlib import Path
from torch.profiler import ProfilerActivity, profile, record_function
from trainer.model import build as build_reference

profiler = profile(activities=[ProfilerActivity.CPU])

num_forwards = 0

def mark(module, inputs):
    global num_forwards
    if not module.training:
        return
    num_forwards += 1
    if num_forwards == 1:
        profiler.start()
    with record_function("a forward"):
        pass
    if num_forwards == int(os.environ["LAST_FORWARD"]):
        report()

def report():
    profiler.stop()
    events = profiler.profiler.kineto_results.events()  # not profiler.events(), which takes seconds to nest all of them
    marks = [(e.start_ns(), e.name()) for e in events if e.name() == "a forward" or e.name()[:6] == "c10d::"]
    names = [name for _, name in sorted(marks)]
    Path(__file__).with_name("names" + os.environ["RANK"]).write_text(json.dumps(names))

def build(vocab_size, dim, num_layers):
    model = build_reference(vocab_size, dim, num_layers)
    model.register_forward_pre_hook(mark)
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


def count(folder: Path, world_size: int, *sets: str) -> list[list[Counter[str]]]:
    """By rank, the collectives of each step."""
    (folder / "profiled.py").write_text(MODULE, encoding="utf-8")
    config = write_tiny_config(folder, "\n[gns]\nenabled = true\n\n[checkpoint]\nevery = 0\n")
    text = config.read_text(encoding="utf-8").replace("[model]", '[model]\ntarget = "profiled:build"\ncontract = false')
    config.write_text(text.replace("log_interval = 1", f"log_interval = {LOG_INTERVAL}"), encoding="utf-8")
    words = [word for each in (f"model.num_layers={BLOCKS}", *sets) for word in ("--set", each)]
    extra = {"PYTHONPATH": str(folder), "LAST_FORWARD": str(STEPS * MICRO_BATCHES)}
    done = run("--config", config, "--steps", STEPS, *words, nproc=world_size, extra=extra)
    assert done.returncode == 0, done.stderr
    found = [collectives_by_step(json.loads((folder / f"names{rank}").read_text())) for rank in range(world_size)]
    assert {len(steps) for steps in found} == {STEPS}
    return found


def check(found: list[list[Counter[str]]], expected: dict[str, int], *, more: int = 0) -> None:
    """The same in every step; a logged one has one gathering more, of all that is logged, and `more` all-reduces."""
    for steps in found:
        for number, step in enumerate(steps[1:-1], start=2):  # the set-up and the run's end are in the outer ones
            logged = (
                Counter({"c10d::allgather_": 1, "c10d::allreduce_": more}) if number % LOG_INTERVAL == 0 else Counter()
            )
            assert step == Counter(expected) + logged, (number, step)


def test_a_step_has_one_gradient_sync_and_one_small_reduction_and_a_logged_one_more(tmp_path: Path) -> None:
    # DDP's one bucket, and the step's own sums; layers take one small reduction of a logged step alone.
    check(count(tmp_path, 2, "metrics.per_layer=true"), {"c10d::allreduce_": 2}, more=1)


@pytest.mark.parametrize(
    ("world_size", "sets", "gathers", "scatters", "reduces"),
    [
        # Every unit is gathered for the forward, and the blocks, which are freed after it, for the backward again. Every
        # micro-batch averages. The one all-reduce is the step's own sums.
        (2, ["strategy=fsdp"], MICRO_BATCHES * (2 * BLOCKS + 1), MICRO_BATCHES * UNITS, 1),
        # The last micro-batch alone averages over the replicas too.
        (4, ["strategy=hsdp", "replicas=2"], MICRO_BATCHES * (2 * BLOCKS + 1), MICRO_BATCHES * UNITS, 1 + UNITS),
    ],
    ids=["fsdp", "hsdp"],
)
def test_the_collectives_of_a_sharded_step_follow_from_its_units(
    tmp_path: Path, world_size: int, sets: list[str], gathers: int, scatters: int, reduces: int
) -> None:
    found = count(tmp_path, world_size, *(f"distributed.{each}" for each in sets))
    expected = {"_allgather_base_": gathers, "_reduce_scatter_base_": scatters, "allreduce_": reduces}
    check(found, {f"c10d::{name}": number for name, number in expected.items()})


def test_muon_gathers_the_update_of_each_matrix_in_shards_once_a_step(tmp_path: Path) -> None:
    # Blocks stay whole from the forward to the backward.
    sets = ("distributed.strategy=fsdp", "distributed.reshard_after_forward=false", "optimizer.name=muon")
    found = count(tmp_path, 2, *sets)
    expected = {
        "_allgather_base_": MICRO_BATCHES * UNITS,
        "_reduce_scatter_base_": MICRO_BATCHES * UNITS,
        "allreduce_": 1,
        "allgather_into_tensor_coalesced_": MATRICES,
    }
    check(found, {f"c10d::{name}": number for name, number in expected.items()})
