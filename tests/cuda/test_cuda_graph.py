"""A run whose micro-batches are replayed from CUDA graphs is the run without, to the last bit: payloads and checkpoints.

On the CPU, where there are no graphs, recorded ones stand for them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.fault_runs import events
from tests.support.on_device import OF_DEVICE, train_here, use_recorded_graphs
from tests.support.ranks import checkpoint_differences
from tests.support.runs import FULL_ROWS, read_rows
from trainer.distributed.strategy import Replicated
from trainer.errors import UserError
from trainer.lab.cuda_graph import MicroGraphs
from trainer.training import open_run
from trainer.training.step import TrainStep

pytestmark = pytest.mark.cuda
STEPS = 14
SETS = (FULL_ROWS, f"train.steps={STEPS}", "train.micro_batches=3", "checkpoint.every=0", "data.seq_len=16")
OWN = ('model.target="tests.support.models:StatefulDropout"', "model.contract=false")
RUNS = {
    "rglru": ("eval.every=3", "eval.holdout_fraction=0.2", "sample.every=7"),
    "gated_delta": ('model.family="gated_delta"',),
    "transformer": ('model.family="transformer"',),
    "one micro-batch": ("train.micro_batches=1",),
    "growing": ('train.micro_batches={schedule="step", points={0=1, 6=2, 9=4}}',),
    "layers": ("metrics.per_layer=true",),
    "without noise scale": ("gns.enabled=false",),
    "dropout, unused parameter": OWN,
    "compiled": ("train.compile=true",),
    "compiled, bf16": ("train.compile=true", "train.precision=bf16"),
    "head in chunks": ("objective.chunk_tokens=16",),
    "blocks run again": ("train.activation_checkpointing=block",),
}


def train(
    folder: Path, device: torch.device, *sets: str, graphs: list[MicroGraphs] | None = None, is_asked: bool = True
) -> Path:
    """One run; with `graphs`, what replays its micro-batches is added to them."""
    with pytest.MonkeyPatch.context() as patch:
        if graphs is not None:
            began = TrainStep.__post_init__

            def begin(step: TrainStep) -> None:
                began(step)
                step.graphs = MicroGraphs(device, is_asked=is_asked, stream=getattr(step.strategy, "stream", None))
                graphs.append(step.graphs)

            patch.setattr(TrainStep, "__post_init__", begin)
            if device.type == "cpu":
                use_recorded_graphs(patch)
        torch.compiler.reset()
        return train_here(folder, device, *SETS, "train.cuda_graph=false", "train.compile=false", *sets)


def assert_same(one: Path, other: Path) -> None:
    """All that does not measure the device is equal."""
    rows, others = (read_rows(run / "metrics.jsonl") for run in (one, other))
    names = {name for row in rows.values() for name in row if not name.startswith(OF_DEVICE)}
    for at, row in rows.items():
        assert {name: row.get(name) for name in names} == {name: others[at].get(name) for name in names}, at
    places = (run / "checkpoints" / f"step_{STEPS:08d}" for run in (one, other))
    assert checkpoint_differences(*places) == []


@pytest.mark.parametrize("kind", RUNS)
def test_a_replayed_run_is_the_same_run(tmp_path: Path, device: torch.device, kind: str) -> None:
    if device.type == "cpu" and "train.compile=true" in RUNS[kind]:
        pytest.skip("what is compiled runs uncompiled while a graph is recorded")
    graphs: list[MicroGraphs] = []
    plain = train(tmp_path / "plain", device, *RUNS[kind])
    replayed = train(tmp_path / "replayed", device, *RUNS[kind], graphs=graphs)
    assert graphs[0]._graphs
    assert [event for event in events(replayed) if event["event"] == "diagnostic_disabled"] == []
    assert_same(replayed, plain)


def test_what_waits_for_the_device_cannot_be_captured(tmp_path: Path, device: torch.device) -> None:
    """It is refused where graphs are asked for; otherwise the run continues without them."""
    if device.type == "cpu":
        pytest.skip("nothing waits on a CPU")
    waits = ('model.target="tests.support.models:WaitingModel"', "model.contract=false")
    with pytest.raises(UserError, match="cannot be captured"):
        train_here(tmp_path / "asked", device, *SETS, *waits, "train.cuda_graph=true")
    graphs: list[MicroGraphs] = []
    plain = train(tmp_path / "plain", device, *waits)
    assert_same(train(tmp_path / "auto", device, *waits, graphs=graphs, is_asked=False), plain)
    assert not graphs[0]._graphs


def test_ddp_on_one_rank_is_captured_too(tmp_path: Path, device: torch.device, monkeypatch) -> None:
    if device.type == "cpu":
        pytest.skip("DDP is captured on NCCL alone")
    monkeypatch.setattr(open_run, "make_strategy", lambda plan, info, device: Replicated(world_size=1, device=device))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    dist.init_process_group("nccl", rank=0, world_size=1, device_id=device)
    try:
        graphs: list[MicroGraphs] = []
        plain = train(tmp_path / "plain", device)
        replayed = train(tmp_path / "replayed", device, graphs=graphs)
        assert graphs[0]._graphs
        assert_same(replayed, plain)
    finally:
        dist.destroy_process_group()
