"""Runs a function on several real processes joined by gloo; and a training step for tests that lay rows over ranks."""

from __future__ import annotations

import gc
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.support.runs import run
from trainer.distributed.strategy import Strategy
from trainer.metrics.best_effort import Diagnostics
from trainer.objective import Objective
from trainer.training.extension import Extensions
from trainer.training.step import TrainStep


def run_on_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, torch_keeps_group: bool = False
) -> list[Any]:
    """`function(rank, world_size, *args)` on each rank; the results by rank. It must be importable by name.

    With `torch_keeps_group` the group may outlive its end: torch itself holds on to groups of device meshes.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "job").write_bytes(pickle.dumps((function, args, torch_keeps_group)))
        done = run(folder, nproc=world_size, code="from tests.support.gloo import work; work()", is_alone=True)
        assert done.returncode == 0, done.stderr
        return [pickle.loads(Path(folder, f"result{rank}").read_bytes()) for rank in range(world_size)]


def work() -> None:
    """In each rank: the job of the folder that the command line names."""
    folder, rank, world_size = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    function, args, is_kept = pickle.loads((folder / "job").read_bytes())
    init = f"file://{folder}/init"
    dist.init_process_group("gloo", init, timedelta(seconds=240), world_size=world_size, rank=rank)
    # Not kept: a result may hold on to the group.
    (folder / f"result{rank}").write_bytes(pickle.dumps(function(rank, world_size, *args)))
    # Four or more gloo ranks can abort in teardown unless they meet first.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    if is_kept:
        os._exit(0)  # past the interpreter's own end, where the threads that are left could abort the process
    # Threads that outlive the group can abort the process at its end, now and then: say so always instead.
    deadline = time.monotonic() + 60  # the system may list a thread for a moment after it was joined
    while any("gloo" in name.read_text() for name in Path("/proc/self/task").glob("*/comm")):
        assert time.monotonic() < deadline, f"{function.__name__} leaves the process group alive"
        time.sleep(0.01)


def make_step(model: nn.Module, strategy: Strategy, **changes: Any) -> TrainStep:
    """By plain SGD, in which the change of a weight is its gradient; `changes` replace the settings here."""
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    settings: dict[str, Any] = {"ledgers": (), "objective": Objective(), "optimizer": sgd, "gns": None}
    settings |= {"max_tokens_per_micro": 50, "clip_grad_norm": 0.0, "world_size": 1, "autocast": nullcontext}
    given, device = {**settings, **changes}, torch.device("cpu")
    given.setdefault("extensions", Extensions(Diagnostics(), device=device, world_size=given["world_size"]))
    return TrainStep(model=strategy.wrap(model, model), strategy=strategy, device=device, **given)
