"""Operations on storages: which of them a model's parameters need, and how they are run again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only


class NotReplayable(Exception):
    """The construction of a model cannot be replayed, so the model has to be built whole."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as a part of a storage, which is known by a number."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor, storage: int) -> View:
        """What `tensor` is in its storage.

        Raises:
            NotReplayable: it is not only a part of a storage.
        """
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            raise NotReplayable("it uses sparse tensors, or views of conjugates")
        return cls(storage, tensor.dtype, tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))

    def on(self, storages: dict[int, torch.UntypedStorage]) -> Tensor:
        """The real tensor."""
        empty = torch.empty(0, dtype=self.dtype, device="cpu")
        return empty.set_(storages[self.storage], self.offset, self.size, self.stride)


@dataclass(slots=True)
class Step:
    """One operation. Tensors in `args` and `kwargs` are `View`s."""

    call: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    draws: bool = False
    """Whether it takes numbers from a generator, which must happen even if nothing needs them."""
    constant_bytes: int = 0
    """Of data that the step holds."""
    writes: set[int] = field(default_factory=set)
    overwrites: dict[int, int] = field(default_factory=dict)
    """Bytes of each storage that is written whole without being read."""
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    outputs: list[View | None] = field(default_factory=list)
    creates: set[int] = field(default_factory=set)
    frees: set[int] = field(default_factory=set)
    finishes: set[int] = field(default_factory=set)
    """Storages of parameters and buffers that no later operation needs."""

    def reads(self) -> set[int]:
        """Storages whose content matters to the operation."""
        seen = [leaf.storage for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, View)]
        # An overwritten storage is read where another argument is a part of it too.
        return {storage for storage in seen if storage not in self.overwrites or seen.count(storage) > 1}

    def run(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """Run it on real tensors, adding to `storages` what it makes.

        Raises:
            NotReplayable: it returned something else than on fake tensors.
        """
        for storage, size in self.overwrites.items():
            if storage not in storages:
                storages[storage] = torch.UntypedStorage(size, device="cpu")  # type: ignore[no-untyped-call]
        args, kwargs = tree_map_only(View, lambda view: view.on(storages), (self.args, self.kwargs))
        for view, made in zip(self.outputs, tree_leaves(self.call(*args, **kwargs)), strict=True):
            if view is not None and view.storage in self.creates:
                if View.of(made, view.storage) != view:
                    raise NotReplayable(f"{self.call} returned another layout than on fake tensors")
                storages[view.storage] = made.untyped_storage()


@dataclass(frozen=True)
class Record:
    """How the parameters and buffers of a model are made."""

    steps: list[Step]
    kept: dict[int, list[tuple[str, View]]]
    """Parameters and buffers with their names, by storage; several names where weights are tied."""
    generators: dict[torch.Generator, bytes]
    """Generators of the constructor's own, with their states before the first draw."""


def needed(steps: list[Step], kept: dict[int, list[tuple[str, View]]]) -> list[Step]:
    """The steps that matter to a generator or to what is kept, each with what it frees and finishes.

    A weight that is drawn twice is live from its last draw on: what an earlier one made is freed at once.

    Raises:
        NotReplayable: something is needed that no step makes.
    """
    live, unfinished, found = set(kept), set(kept), []
    for step in reversed(steps):
        if not step.draws and not live & (step.writes | step.creates):
            continue
        touched = step.reads() | step.writes | step.creates
        step.finishes = touched & unfinished
        step.frees = (touched - live) | step.finishes
        unfinished -= step.finishes
        live = (live - step.creates - step.overwrites.keys()) | step.reads()
        found.append(step)
    if live:
        names = [name for storage in live & kept.keys() for name, _ in kept[storage]]
        raise NotReplayable(f"{names[0] if names else 'a tensor that it uses'} was made before or outside of torch")
    return found[::-1]


@torch.no_grad()
def replay(record: Record, keep: Callable[[str, Tensor], None]) -> None:
    """Make the numbers of each parameter and buffer, and hand them to `keep(name, tensor)` as soon as they are final.

    Each tensor, on the CPU, comes once per name and is freed unless `keep` holds it. Torch's global generator advances as in a
    plain construction.

    Raises:
        NotReplayable: an operation returned something else than on fake tensors.
    """
    for generator, state in record.generators.items():
        set_state(generator, state)
    storages: dict[int, torch.UntypedStorage] = {}
    default_dtype = torch.get_default_dtype()
    try:
        for step in record.steps:
            torch.set_default_dtype(step.default_dtype)
            step.run(storages)
            torch.set_default_dtype(default_dtype)
            for storage in step.finishes:
                for name, view in record.kept[storage]:
                    keep(name, view.on(storages))
            for storage in step.frees:
                del storages[storage]
    finally:
        torch.set_default_dtype(default_dtype)


def set_state(generator: torch.Generator, state: bytes) -> None:
    """Put a generator into a state of `get_state().numpy().tobytes()`."""
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
