"""Which rank owns a group, and the all-to-all that takes ids and rows to their owners and brings answers back.

Every rank must make each call, in the same order, also with nothing to send.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainer.arrays import Ints
from trainer.hashing import splitmix64


def owner_of(group_ids: Ints, world_size: int) -> Ints:
    """The rank owning each group: `splitmix64(group_id) % world_size`; plain modulo would follow the ids' strides."""
    return (splitmix64(group_ids) % np.uint64(world_size)).astype(np.int64)


class Route(NamedTuple):
    """Where the items of this rank go, and how many arrive from each rank."""

    order: Tensor
    """Item indices sorted by owner, int64 [n] on the exchange's device."""

    send_counts: list[int]
    receive_counts: list[int]


class OwnerExchange:
    """All-to-all between the ranks of a process group.

    Args:
        world_size: ranks in the group.
        process_group: None is the default group.
        device: of the rows; for gloo, which moves CPU tensors only, they are copied to the CPU and back.
    """

    def __init__(self, *, world_size: int, process_group: Any, device: torch.device) -> None:
        self._world_size = world_size
        self._group = process_group
        is_gloo = dist.get_backend(process_group) == "gloo"
        self._wire = torch.device("cpu") if is_gloo else device
        self._device = device
        self.seconds = 0.0
        """Spent in collectives so far."""

    def route(self, group_ids: Ints) -> Route:
        """Exchange the number of items per pair of ranks: one collective."""
        owners = owner_of(group_ids, self._world_size)
        send = np.bincount(owners, minlength=self._world_size)
        counts = torch.from_numpy(send.astype(np.int64)).to(self._wire)
        received = torch.empty_like(counts)
        self._run(received, counts, None, None)
        order = torch.from_numpy(np.argsort(owners, kind="stable")).to(self._wire)
        return Route(order, send.tolist(), received.tolist())

    def to_owners(self, route: Route, items: Tensor) -> Tensor:
        """Send each of `items` [n, ...] to its owner; returns the items sent to this rank, ordered by sending rank."""
        sorted_items = items.to(self._wire).index_select(0, route.order)
        received = self._all_to_all(sorted_items, route.send_counts, route.receive_counts)
        return received.to(items.device)

    def from_owners(self, route: Route, answers: Tensor) -> Tensor:
        """Return one answer per item that `to_owners` received; returns the answers to this rank's items, in their order."""
        returned = self._all_to_all(answers.to(self._wire), route.receive_counts, route.send_counts)
        items = torch.empty_like(returned)
        items.index_copy_(0, route.order, returned)
        return items.to(answers.device)

    def _all_to_all(self, items: Tensor, send_counts: list[int], receive_counts: list[int]) -> Tensor:
        received = items.new_empty((sum(receive_counts), *items.shape[1:]))
        self._run(received, items.contiguous(), receive_counts, send_counts)
        return received

    def _run(
        self, received: Tensor, sent: Tensor, receive_counts: list[int] | None, send_counts: list[int] | None
    ) -> None:
        began = time.perf_counter()
        dist.all_to_all_single(received, sent, receive_counts, send_counts, group=self._group)
        self.seconds += time.perf_counter() - began
