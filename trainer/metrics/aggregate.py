"""Combines metrics over micro-steps, steps between logged ones, and ranks, by the catalog.

On one rank tensors stay on their device and nothing is read: a value is a number, a 0-dim tensor, a
`SumCount` for keys whose mean is weighted. Over ranks all keys of a logged step, the same on every
rank, go through one all-gather of a float64 vector, from which every rank computes the same minima,
maxima, sums and means. A rank without a value contributes the identity. One that should have a
value and cannot give it (None) removes the key on all ranks, unless it is a mean: a total or an
extreme over the others would look right and be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from trainer.metrics.best_effort import BestEffort, LeaveOut, as_number, is_name
from trainer.metrics.catalog import WORST_SUFFIX, lookup_or_gauge
from trainer.metrics.catalog_rows import MetricSpec, RankReduction, WindowReduction
from trainer.wording import short_repr

Scalar = float | torch.Tensor
Operations = Mapping[str, RankReduction]
_MEANS = ("mean", "weighted_mean")
_GUARD = BestEffort("reduction")  # of loops without one


class SumCount(NamedTuple):
    """A mean or a ratio in the making: a sum, and the number or total weight of its summands."""

    total: Scalar
    weight: Scalar


Value = Scalar | SumCount
# None: this rank should have a value and cannot give it; see the module.
Reported = Value | None
# What callers may pass: a component's own pair counts as a SumCount.
Input = Scalar | tuple[Scalar, Scalar]


def as_scalar(value: Any, device: torch.device | str | None = None) -> Scalar:
    """A number, or a float64 copy [] of a tensor of one element, on `device` (None: on its own). A
    TypeError if it is neither."""
    if type(value) is float or (type(value) is int and abs(value) < 2**53):  # most are
        return float(value)
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        # float64, since sums of 16 bits stop growing.
        return value.detach().to(device, torch.float64, copy=True).reshape(())
    return as_number(value)


def _extreme(a: Scalar, b: Scalar, how: WindowReduction) -> Scalar:
    """The larger of two scalars, or the smaller; NaN wins over any number."""
    # On the device as well as off it.
    if isinstance(a, torch.Tensor):
        other = b if isinstance(b, torch.Tensor) else a.new_full((), b)
        return torch.maximum(a, other) if how == "max" else torch.minimum(a, other)
    if isinstance(b, torch.Tensor):
        return _extreme(b, a, how)
    if math.isnan(a) or math.isnan(b):
        return math.nan
    return max(a, b) if how == "max" else min(a, b)


@dataclass(slots=True)
class _Entry:
    spec: MetricSpec
    total: Scalar | None  # None: see `Reported`
    count: Scalar


class Recorder:
    """The one place where a run's metrics are recorded: combines all values until it is drained.

    A key is combined over the micro-batches that reported it. One without a catalog row is a gauge.
    `leave_out`: called for an unusable value, which then counts as None; by default it warns once.
    """

    def __init__(self, *, leave_out: LeaveOut | None = None) -> None:
        self._leave_out = leave_out or BestEffort("metrics").leave_out
        self._specs: dict[str, MetricSpec] = {}  # looked up once
        self._entries: dict[str, _Entry] = {}

    def add(self, values: Mapping[str, Input | None]) -> None:
        """Take in the values of one micro-batch; a pair is (sum, count), None an unknown value. A
        TypeError if they are no mapping."""
        if not isinstance(values, Mapping):
            raise TypeError(f"must be a mapping of names to numbers, got {short_repr(values)}")
        for key, value in values.items():
            if key not in self._specs:
                if not is_name(key, self._leave_out):
                    continue
                self._specs[key] = lookup_or_gauge(key)
            try:
                self._add(key, value)
            except Exception as error:  # noqa: BLE001 - one value must not cost the others
                self._leave_out(key, str(error))
                self._add(key, None)

    def _add(self, key: str, value: Input | None) -> None:
        spec, entry = self._specs[key], self._entries.get(key)
        how = spec.window
        if value is None:
            if how not in _MEANS:
                self._entries[key] = _Entry(spec, None, 1.0)
            return
        total: Scalar
        count: Scalar = 1.0
        if isinstance(value, tuple) and len(value) == 2:
            if not spec.is_ratio:
                raise ValueError(f"a (sum, count) pair, but its window reduction is {how}")
            total, count = map(as_scalar, value)
        else:
            total = as_scalar(value)
        if entry is None or how == "last":
            self._entries[key] = _Entry(spec, total, count)
        elif entry.total is None:
            return
        elif how in ("max", "min"):
            entry.total = _extreme(entry.total, total, how)
        else:
            entry.total, entry.count = entry.total + total, entry.count + count

    def drain_metrics(self) -> dict[str, Reported]:
        """The aggregates so far, ratios still as `SumCount`; starts anew."""
        drained: dict[str, Reported] = {}
        for key, entry in self._entries.items():
            drained[key] = entry.total
            if entry.total is not None and entry.spec.is_ratio:
                drained[key] = SumCount(entry.total, entry.count)
            elif entry.total is not None and entry.spec.window == "mean":
                drained[key] = entry.total / entry.count
        self._entries = {}
        return drained

    def state_dict(self) -> dict[str, list[float | None]]:
        """Total (None: unknown) and count of each key, as numbers; waits for their devices."""
        state: dict[str, list[float | None]] = {}
        for key, entry in self._entries.items():
            total = entry.total
            state[key] = [total if total is None else float(total), float(entry.count)]
        return state

    def load_state_dict(self, state: Mapping[str, Sequence[Any]]) -> None:
        self._entries = {key: _Entry(lookup_or_gauge(key), *saved) for key, saved in state.items()}


class Reporter(Protocol):
    """A part of a run that has metrics of its own."""

    @property
    def metric_keys(self) -> tuple[str, ...]:
        """Every key that it can report."""

    def drain_metrics(self) -> Mapping[str, Reported]:
        """This rank's values since the last drain, some of the keys; starts anew."""


def rank_operations(keys: Iterable[str]) -> Operations:
    """Key -> reduction over ranks, sorted, so that all ranks have the same order.

    A key that is not in the catalog is a gauge: its mean over ranks.
    """
    return {key: lookup_or_gauge(key).ranks for key in sorted(set(keys))}


def _pack(
    local: Mapping[str, Reported], operations: Operations, device: torch.device | str, guard: BestEffort
) -> torch.Tensor:
    """The vector, float64: each key's value (or sum) and count, 0 where the rank has no value."""
    for key in local.keys() - operations.keys():
        guard.leave_out(key, "it is not among the keys of the reduction: list it in metric_keys")
    numbers = np.zeros(2 * len(operations))
    tensors: dict[int, torch.Tensor] = {}  # by place
    for index, (key, operation) in enumerate(operations.items()):
        if key not in local:
            continue
        scalars: list[Scalar] = []
        try:
            scalars = _scalars(local[key], device)
        except Exception as error:  # noqa: BLE001 - one value must not cost the others
            guard.leave_out(key, str(error))
        if not scalars and operation not in _MEANS:  # a mean leaves an unknown value out
            numbers[2 * index + 1] = math.nan
        for place, scalar in enumerate(scalars, start=2 * index):
            if isinstance(scalar, torch.Tensor):
                tensors[place] = scalar
            else:
                numbers[place] = scalar
    vector = torch.from_numpy(numbers).to(device)
    if tensors:  # all at once: one copy for each would cost a launch each
        vector[torch.tensor(list(tensors), device=device)] = torch.stack(list(tensors.values()))
    return vector


def _scalars(value: Any, device: torch.device | str) -> list[Scalar]:
    """A value (or sum) and its count; empty if it is not known."""
    if value is None:
        return []
    total, count = value, 1.0
    if isinstance(value, tuple) and len(value) == 2:
        total, count = value
    return [as_scalar(total, device), as_scalar(count, device)]


@np.errstate(all="ignore")  # inf - inf is NaN, without a warning
def _combine(gathered: NDArray[np.float64], operations: Operations) -> dict[str, float]:
    """The values over ranks, from their vectors [W, numbers]."""
    values, counts = gathered[:, 0::2], gathered[:, 1::2]  # [W, K] each
    present = counts != 0
    is_reported: list[bool] = present.any(0).tolist()
    totals = np.where(present, values, 0.0).sum(0)
    weights = counts.sum(0)
    least = np.where(present, values, np.inf).min(0)
    most = np.where(present, values, -np.inf).max(0)
    # An unknown value has the count NaN, which is present.
    unknown: list[bool] = np.any(np.isnan(counts), axis=0).tolist()
    reduced: dict[str, float] = {}
    for index, (key, operation) in enumerate(operations.items()):
        if not is_reported[index]:
            continue
        if operation in _MEANS:
            reduced[key] = float(totals[index] / weights[index])
        elif unknown[index]:
            continue
        elif operation == "min":
            reduced[key] = float(least[index])
        elif operation == "max":
            reduced[key] = float(most[index])
        elif operation == "max_over_sum":
            reduced[key] = float(most[index] / weights[index])
        else:
            reduced[key] = float(totals[index])
            if operation == "sum_and_worst":
                reduced[key + WORST_SUFFIX] = float(most[index])
    return reduced


def reduce_over_ranks(
    local: Mapping[str, Reported] | Sequence[Mapping[str, Reported]],
    keys: Iterable[str] | Operations,
    *,
    device: torch.device | str,
    world_size: int,
    guard: BestEffort | None = None,
) -> dict[str, float]:
    """A logged step's values over all ranks, in at most one collective. Every rank must call it.

    Args:
        local: this rank's values, or those of each of its data shards, which count as ranks; keys
            may be missing. Plain numbers count once in a mean, a `SumCount` by its count. None is a
            value that this rank should have and cannot give.
        keys: all that any rank may have, the same on every rank; or their `rank_operations`.
        device: where the collective runs (the CPU for gloo, this rank's device for nccl).
        guard: warns, once, of a key that is not among `keys`, and of a value that is no number,
            which counts as None.

    Returns:
        The same on every rank: a value for each key that some rank has, and `<key>_max` (the worst
        rank) for counters that ask for it. A NaN on any rank makes the result NaN.
    """
    operations = keys if isinstance(keys, Mapping) else rank_operations(keys)
    guard = guard or _GUARD
    shards = [local] if isinstance(local, Mapping) else local
    own = torch.stack([_pack(each, operations, device, guard) for each in shards])  # [shards, numbers]
    ranks = [own]
    if world_size > 1:
        ranks = [torch.empty_like(own) for _ in range(world_size)]
        dist.all_gather(ranks, own)
    return _combine(torch.cat(ranks).cpu().numpy(), operations)
