"""Reducing data metrics over ranks: at most one MAX and one SUM all-reduce, whatever a rank has to say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from trainer.data import pool

ReduceOp: TypeAlias = Literal["min", "max", "sum"]

POOL_OPS: Mapping[str, ReduceOp] = {
    pool.REMAINING_MIN: "min",
    pool.REMAINING_MAX: "max",
    pool.FRACTION_MIN: "min",
    pool.FRACTION_MAX: "max",
    pool.STEPS_SINCE_PICK_MAX: "max",
    pool.PICK_SURPRISE_MAX: "max",
    pool.EXHAUST_EVENTS: "sum",
}


def pool_ops(modalities: Iterable[str]) -> dict[str, ReduceOp]:
    """How each metric of a pool is reduced."""
    return {**POOL_OPS, **dict.fromkeys((pool.MODALITY_PREFIX + m for m in sorted(modalities)), "sum")}


class MetricsMerger:
    """The metrics of several sources on one rank, reduced key by key whenever asked.

    A table of one row a source, with minima kept negated, so that reducing is one maximum and one sum over the rows.

    Args:
        ops: every key that a source may have, and how it is reduced.
        num_sources: rows of the table.
    """

    def __init__(self, ops: Mapping[str, ReduceOp], num_sources: int) -> None:
        keys = sorted(ops, key=lambda key: ops[key] == "sum")  # extremes first
        self._columns = {key: column for column, key in enumerate(keys)}
        self._num_extremes = sum(op != "sum" for op in ops.values())
        self._signs = np.array([-1.0 if ops[key] == "min" else 1.0 for key in keys])
        self._table = np.zeros((num_sources, len(keys)))
        self._table[:, : self._num_extremes] = -np.inf
        self._layouts: dict[tuple[str, ...], npt.NDArray[np.int64]] = {}
        self._known: list[tuple[str, int]] = []

    def update(self, source: int, metrics: Mapping[str, float]) -> None:
        """Replace what a source said; keys it left out keep their value."""
        layout = tuple(metrics)
        columns = self._layouts.get(layout)
        if columns is None:
            columns = self._layouts[layout] = np.array([self._columns[key] for key in layout], dtype=np.int64)
            known = {key for each in self._layouts for key in each}
            self._known = [(key, column) for key, column in self._columns.items() if key in known]
        self._table[source, columns] = self._signs[columns] * list(metrics.values())

    def merged(self) -> dict[str, float]:
        """All sources reduced; a key that no source has said is absent. Counted events are forgotten with it."""
        table, split = self._table, self._num_extremes
        values = np.concatenate([table[:, :split].max(axis=0), table[:, split:].sum(axis=0)])
        merged = (self._signs * values).tolist()
        if pool.EXHAUST_EVENTS in self._columns:
            table[:, self._columns[pool.EXHAUST_EVENTS]] = 0.0
        return {key: merged[column] for key, column in self._known}


def reduce_over_ranks(
    local: Mapping[str, float],
    ops: Mapping[str, ReduceOp],
    *,
    world_size: int,
    device: torch.device | str,
    group: dist.ProcessGroup | None = None,
) -> dict[str, float]:
    """Reduce `local` over the ranks of a group; every rank must call it, with the same `ops`.

    A rank without a key contributes the identity element. A key that no rank has is absent from the result, so an
    identity element is never reported. MIN rides negated in the MAX; its presence flags do too.

    Args:
        local: this rank's metrics; empty if it has nothing to say. Every key must be in `ops`.
        ops: all keys that any rank may have, and how each is reduced.
        world_size: 1: `local` is returned, without a collective.
        device: where the packed tensors live (the backend's).
        group: the process group; None: the default one.
    """
    unknown = set(local) - set(ops)
    assert not unknown, f"metrics without a declared reduction: {sorted(unknown)}"
    if world_size == 1:
        return dict(local)
    keys = sorted(ops)
    extremes = [key for key in keys if ops[key] != "sum"]
    sums = [key for key in keys if ops[key] == "sum"]
    signs = [-1.0 if ops[key] == "min" else 1.0 for key in extremes]
    peaks = [sign * local[key] if key in local else -float("inf") for key, sign in zip(extremes, signs, strict=True)]
    presence = [1.0 if key in local else 0.0 for key in keys]
    # float64: counts and sums stay exact. Both collectives run on every rank even if one of them is trivial.
    packed_max = torch.tensor(presence + peaks, dtype=torch.float64, device=device)
    packed_sum = torch.tensor([local.get(key, 0.0) for key in sums], dtype=torch.float64, device=device)
    dist.all_reduce(packed_max, op=dist.ReduceOp.MAX, group=group)
    if sums:
        dist.all_reduce(packed_sum, op=dist.ReduceOp.SUM, group=group)
    reduced = packed_max.tolist()
    known = {key for key, present in zip(keys, reduced[: len(keys)], strict=True) if present}
    values = {key: sign * peak for key, sign, peak in zip(extremes, signs, reduced[len(keys) :], strict=True)}
    values.update(zip(sums, packed_sum.tolist(), strict=True))
    return {key: values[key] for key in keys if key in known}
