"""Values that all ranks agree on. Branch only on these: every rank must reach every collective."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from trainer.errors import UserError

T = TypeVar("T")


def gather_from_ranks(value: T, *, world_size: int) -> list[T]:
    """`value` of every rank, in rank order, on every rank. For small plain objects, outside the step."""
    if world_size == 1:
        return [value]
    values: list[T | None] = [None] * world_size
    dist.all_gather_object(values, value)
    return [found for found in values if found is not None]


def from_main_rank(value: T, *, world_size: int) -> T:
    """`value` of rank 0, on every rank. For small plain objects, outside the step."""
    if world_size == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def most_of_ranks(*numbers: int, device: torch.device, world_size: int) -> list[int]:
    """The largest of all ranks, number by number. Waits for the device."""
    if world_size == 1:
        return list(numbers)
    most = torch.tensor(numbers, dtype=torch.int64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    found: list[int] = most.tolist()
    return found


@contextmanager
def raise_on_all_ranks(*, world_size: int) -> Iterator[None]:
    """Run a block in which some ranks may find a user's mistake: all ranks leave it with that mistake, or none does.

    The block must hold no collective of its own.

    Raises:
        UserError: the mistake of the lowest rank that found one.
    """
    found: UserError | None = None
    try:
        yield
    except UserError as error:
        found = error
    summary = None if found is None else (found.key, found.problem, found.fix, found.where)
    summaries = gather_from_ranks((summary,), world_size=world_size)
    speaker, first = next(((rank, each) for rank, (each,) in enumerate(summaries) if each is not None), (0, None))
    if first is None:
        return
    key, problem, fix, where = first
    agreed = found if found is not None and summary == first else UserError(key, problem, fix, where=where)
    agreed.speaker = speaker
    raise agreed from None
