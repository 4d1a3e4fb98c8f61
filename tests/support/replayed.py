"""CUDA graphs on a CPU: what is dispatched while one is captured is run again, into the same tensors, when it is replayed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
