"""Tiny real runs of `train` on the device of the tests marked `cuda`, in this process; and on the CPU CUDA graphs, memory.

A recorded graph stands for a CUDA graph: what is dispatched while it is captured is run again, into the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support import in_process
from tests.support.fault_runs import MEASURED
from tests.support.runs import read_rows, write_tiny_config
from trainer.training import loop, main
from trainer.training.open_run import Run

OF_DEVICE = (*MEASURED, "mfu", "smoothed/mfu", "gpu/")


def settings(device: torch.device, *sets: str) -> list[str]:
    """The overrides of a run on the device."""
    return [f'train.device="{device.type}"', 'train.precision="fp32"', 'metrics.stdout="off"', *sets]


def train_here(folder: Path, device: torch.device, *sets: str, extra: str = "") -> Path:
    """Train in this process; gives the run's directory."""
    in_process.train_here(write_tiny_config(folder, extra), folder / "run", *settings(device, *sets))
    return folder / "run"


def differences(one: Path, other: Path, close: float, names: Collection[str] = ()) -> dict[str, tuple[float, float]]:
    """What a run reports otherwise than another, which may have more: of the metrics named, or all but the device's own."""
    rows, others = (read_rows(run / "metrics.jsonl") for run in (one, other))
    assert rows.keys() == others.keys()
    pairs = {
        f"{at} {name}": (value, others[at][name])
        for at, row in rows.items()
        for name, value in row.items()
        if not name.startswith(OF_DEVICE) and (name in names or not names)
    }
    return {name: pair for name, pair in pairs.items() if pair[1] != pytest.approx(pair[0], rel=close, abs=1e-5)}


def around_steps(monkeypatch: pytest.MonkeyPatch, around: Callable[[loop.Order], AbstractContextManager[None]]) -> None:
    """Enter `around` at each iteration of the loop, with the step that it launches."""
    next_order, run_loop, entered = loop.next_order, main.run_loop, ExitStack()

    def watched(run: Run, before: loop.InFlight | None) -> loop.Order:
        entered.close()
        order = next_order(run, before)
        entered.enter_context(around(order))
        return order

    def closed(run: Run) -> str:
        with entered:
            return run_loop(run)

    monkeypatch.setattr(loop, "next_order", watched)
    monkeypatch.setattr(main, "run_loop", closed)


@contextmanager
def synchronization_forbidden(device: torch.device) -> Iterator[None]:
    """On CUDA, whatever makes the host wait for the device raises; on the CPU there is nothing to wait for."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def resident_bytes() -> int:
    """What is in use; 0 where it is not known."""
    file = Path("/proc/self/status")
    if not file.exists():  # not Linux
        return 0
    return int(file.read_text(encoding="utf-8").partition("VmRSS:")[2].split()[0]) * 1024


def saved_bytes(model: nn.Module, tokens: Tensor) -> int:
    """What the forward keeps for the backward, next to the parameters."""
    kept = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    total = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal total
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in kept:
            kept.add(storage.data_ptr())
            total += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens=tokens, state=None)
    return total


class RecordedGraph:
    """Stands for `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.num_replays = 0

    def pool(self) -> None:
        """It has none."""

    def replay(self) -> None:
        """Run all of it again. What the capture has computed is done already, as it is not on a device."""
        self.num_replays += 1
        if self.num_replays == 1:
            return
        with torch.no_grad():
            for function, args, kwargs, found in self.calls:
                again = function(*args, **kwargs)
                for place, value in zip(tree_leaves(found), tree_leaves(again), strict=True):
                    if isinstance(place, Tensor) and place.data_ptr() != value.data_ptr():
                        place.copy_(value)


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = func(*args, **(kwargs or {}))
        self._graph.calls.append((func, args, kwargs or {}, found))
        return found


@contextmanager
def recorded(graph: RecordedGraph, **_: Any) -> Iterator[None]:
    """Stands for `torch.cuda.graph`."""
    with _Recorder(graph):
        yield


def use_recorded_graphs(monkeypatch: Any) -> None:
    """Let CUDA graphs be recorded ones."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", recorded)
