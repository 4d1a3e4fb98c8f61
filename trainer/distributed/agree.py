"""Values that all ranks agree on. Branch only on these: every rank must reach every collective."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

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


@contextmanager
def raise_on_all_ranks(*, world_size: int) -> Iterator[None]:
    """Run a block in which some ranks may raise a `UserError`: then all ranks raise it, or none does.

    The block must not contain a collective.

    Raises:
        UserError: that of the lowest rank that raised one.
    """
    own: UserError | None = None
    try:
        yield
    except UserError as error:
        own = error
    # As plain fields: pickling an exception passes only `args` to its constructor.
    fields = None if own is None else (own.key, own.problem, own.fix, own.where)
    everyone = gather_from_ranks((fields,), world_size=world_size)
    first = next((each for (each,) in everyone if each is not None), None)
    if first is None:
        return
    if own is not None and fields == first:
        raise own
    key, problem, fix, where = first
    raise UserError(key, problem, fix, where=where) from own
