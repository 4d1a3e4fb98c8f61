"""Reducing data metrics over ranks: at most one MAX and one SUM all-reduce, whatever a rank has to say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist

from trainer.data.mixing import pool

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


REDUCTIONS: Mapping[ReduceOp, Callable[[list[float]], float]] = {"min": min, "max": max, "sum": sum}
IDENTITIES: Mapping[ReduceOp, float] = {"min": float("inf"), "max": -float("inf"), "sum": 0.0}


def pool_ops(modalities: Iterable[str]) -> dict[str, ReduceOp]:
    """How each metric of a pool is reduced."""
    return {**POOL_OPS, **dict.fromkeys((pool.MODALITY_PREFIX + m for m in sorted(modalities)), "sum")}


class MetricsMerger:
    """The metrics of several sources on one rank, reduced key by key whenever asked.

    A column of plain floats a key: for the few sources of a blend that is several times as fast as an array.

    Args:
        ops: every key that a source may have, and how it is reduced.
        num_sources: entries of a column.
    """

    def __init__(self, ops: Mapping[str, ReduceOp], num_sources: int) -> None:
        self._ops = ops
        self._columns = {key: [IDENTITIES[op]] * num_sources for key, op in ops.items()}
        self._said: set[str] = set()
        self._merged: dict[str, float] = {}
        self._stale: set[str] = set()  # keys whose column changed since they were merged

    def update(self, source: int, metrics: Mapping[str, float]) -> None:
        """Replace what a source said; keys it left out keep their value."""
        if not self._said.issuperset(metrics):
            self._said.update(metrics)
            self._stale.update(metrics)
        columns, merged = self._columns, self._merged
        for key, value in metrics.items():
            column = columns[key]
            old = column[source]
            if old == value:
                continue
            column[source] = value
            # Where the old peak tells the new one, the column need not be gone through.
            op, peak = self._ops[key], merged.get(key)
            if peak is None or op == "sum":
                self._stale.add(key)
            elif (value > peak) if op == "max" else (value < peak):
                merged[key] = value
            elif old == peak:
                self._stale.add(key)

    def merged(self) -> dict[str, float]:
        """All sources reduced; a key that no source has said is absent. Counted events are forgotten with it."""
        merged, columns = self._merged, self._columns
        if self._stale:
            for key in self._stale:
                merged[key] = REDUCTIONS[self._ops[key]](columns[key])
            self._stale.clear()
        result = merged.copy()
        if merged.get(pool.EXHAUST_EVENTS):
            merged[pool.EXHAUST_EVENTS] = 0.0
            columns[pool.EXHAUST_EVENTS] = [0.0] * len(columns[pool.EXHAUST_EVENTS])
        return result


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
