"""Runs a function on several real processes joined by gloo."""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from tests.support.forks import fork_server
from tests.support.launches import count_launch


def _worker(
    rank: int, function: Callable[..., Any], world_size: int, folder: str, args: tuple[Any, ...], is_kept: bool
) -> None:
    os.environ["RANK"] = str(rank)
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # trainer.distributed.env.process_group says why
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/init", rank=rank, world_size=world_size, timeout=timedelta(seconds=240)
    )
    # Not kept: a result may hold on to the group.
    Path(folder, f"result{rank}").write_bytes(pickle.dumps(function(rank, world_size, *args)))
    # Four or more gloo ranks can abort in teardown unless they meet first.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    if is_kept:
        os._exit(0)  # past the interpreter's own end, where the threads that are left could abort the process
    # Threads that outlive the group can abort the process at its end, now and then: say so always instead.
    assert not gloo_threads_left(), f"{function.__name__} leaves the process group alive"


def gloo_threads() -> list[str]:
    """Names of this process's threads that work for a gloo process group (Linux)."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


def gloo_threads_left() -> list[str]:
    """Those that stay: the system may list a thread for a moment after it was joined."""
    deadline = time.monotonic() + 60
    while (threads := gloo_threads()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return threads


def run_on_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, torch_keeps_group: bool = False
) -> list[Any]:
    """`function(rank, world_size, *args)` on each rank; the results by rank. It must be importable by name.

    With `torch_keeps_group` the group may outlive its end: torch itself holds on to groups of device meshes.
    """
    with tempfile.TemporaryDirectory() as folder:
        fork_server()
        count_launch()
        start_processes(
            _worker,
            args=(function, world_size, folder, args, torch_keeps_group),
            nprocs=world_size,
            start_method="forkserver",
        )
        return [pickle.loads(Path(folder, f"result{rank}").read_bytes()) for rank in range(world_size)]
