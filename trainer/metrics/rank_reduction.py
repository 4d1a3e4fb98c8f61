"""Combines the values of all ranks: every key of a logged step in one collective.

The catalog says how each key combines; the keys are the same on all ranks. A rank without a value contributes the identity; one
that should have a value and cannot give it (None) takes the key away on all ranks, unless it is a mean. The collective is one
all-gather of a float64 vector, two numbers per key (six for a mean with a standard error), from which every rank computes the
same minima, maxima, sums and means.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from trainer.metrics.aggregate import Moments, Reported, Scalar, SumCount, Value, as_scalar
from trainer.metrics.best_effort import BestEffort
from trainer.metrics.catalog.lookup import ERROR_SUFFIX, WORST_SUFFIX, lookup_or_gauge
from trainer.metrics.catalog.spec import RankReduction
from trainer.wording import message_of

_MEANS = ("mean", "weighted_mean")
NUM_MOMENTS = len(Moments._fields)
_Matrix = NDArray[np.float64]
Operations = Mapping[str, RankReduction]


class Reporter(Protocol):
    """A part of a run that has metrics of its own."""

    @property
    def metric_keys(self) -> tuple[str, ...]:
        """Every key that it can report."""

    def drain_metrics(self) -> Mapping[str, Reported]:
        """This rank's values since the last drain, some of the keys; starts anew."""


def rank_operations(keys: Iterable[str]) -> Operations:
    """Key -> how it combines over ranks, sorted, so that ranks agree on the order however they collect their keys.

    A key that is not in the catalog is a gauge: its mean over ranks.
    """
    return {key: lookup_or_gauge(key).ranks for key in sorted(set(keys))}


def _with_errors(operations: Operations) -> list[str]:
    """The keys that have a standard error, for which `Moments` are sent."""
    return [key for key, operation in operations.items() if operation == "mean_and_error"]


def _length(operations: Operations) -> int:
    """Numbers in the vector of `_pack`."""
    return 2 * len(operations) + NUM_MOMENTS * len(_with_errors(operations))


def _pack(
    local: Mapping[str, Reported], operations: Operations, device: torch.device | str, guard: BestEffort | None = None
) -> torch.Tensor:
    """The vector float64: for each key its value (or sum) and its count, count 0 where the rank has none; then the moments.

    Keys with moments leave their pair at zero. The count of a value that is not known (None) is NaN, but of a mean's 0.
    """
    unlisted = sorted(local.keys() - operations.keys())
    if unlisted and guard is None:
        raise KeyError(f"not among the keys of the reduction: {', '.join(unlisted)}")
    for key in unlisted:
        _leave_out(key, "it is not among the keys of the reduction", guard)
    numbers = np.zeros(_length(operations))
    places: list[int] = []
    tensors: list[torch.Tensor] = []
    moments = iter(range(2 * len(operations), len(numbers), NUM_MOMENTS))
    for index, (key, operation) in enumerate(operations.items()):
        first = 2 * index if operation != "mean_and_error" else next(moments)
        try:
            scalars = _scalars(local[key], operation, device) if key in local else ()
        except Exception as error:  # noqa: BLE001 - one value must not cost the others
            _leave_out(key, message_of(error), guard)
            scalars = None
        if scalars is None:
            numbers[first + 1] = _count_of_unknown(operation)
            continue
        for place, scalar in enumerate(scalars, start=first):
            if isinstance(scalar, torch.Tensor):
                places.append(place)
                tensors.append(scalar)
            else:
                numbers[place] = scalar
    vector = torch.from_numpy(numbers).to(device)
    if tensors:
        vector[torch.tensor(places, device=device)] = torch.stack(tensors)
    return vector


def _leave_out(key: str, problem: str, guard: BestEffort | None) -> None:
    if guard is None:
        raise TypeError(f"{key}: {problem}")
    guard.leave_out(key, problem)


def _count_of_unknown(operation: RankReduction) -> float:
    return 0.0 if operation in (*_MEANS, "mean_and_error") else np.nan


def _scalars(value: Reported, operation: RankReduction, device: torch.device | str) -> Sequence[Scalar] | None:
    """What stands for a value in the vector; None if it is not known.

    A plain number counts once, and is a sample of one: the mean over ranks then has the standard error over ranks.
    """
    if value is None:
        return None
    if operation != "mean_and_error":
        if isinstance(value, Moments):
            raise TypeError(f"has moments, but its reduction over ranks is {operation}")
        given: tuple[Any, ...] = value if isinstance(value, tuple) and len(value) == 2 else (value, 1.0)
    elif isinstance(value, Moments):
        given = value
    elif isinstance(value, tuple):
        raise TypeError("a sum and a count have no standard error; report Moments")
    else:
        taken = as_scalar(value)
        given = Moments(1.0, taken, 1.0, taken * taken, taken, 1.0)
    scalars = (scalar if type(scalar) is float else as_scalar(scalar) for scalar in given)
    return [
        scalar.to(device=device, dtype=torch.float64).reshape(()) if isinstance(scalar, torch.Tensor) else scalar
        for scalar in scalars
    ]


def _gather(vector: torch.Tensor, group: dist.ProcessGroup | None, world_size: int) -> _Matrix:
    """[W, N]: the vectors of all ranks."""
    if world_size == 1:
        return vector.cpu().numpy()[None]
    gathered = [torch.empty_like(vector) for _ in range(world_size)]
    dist.all_gather(gathered, vector, group=group)
    return torch.stack(gathered).cpu().numpy()


def _combine(gathered: _Matrix, operations: Operations) -> dict[str, float]:
    pairs = gathered[:, : 2 * len(operations)]
    values, counts = pairs[:, 0::2], pairs[:, 1::2]  # [W, K] each
    present = counts != 0
    totals = np.where(present, values, 0.0).sum(0)
    weights = counts.sum(0)
    least = np.where(present, values, np.inf).min(0)
    most = np.where(present, values, -np.inf).max(0)
    unknown: list[bool] = np.any(np.isnan(counts), axis=0).tolist()
    reduced: dict[str, float] = {}
    for index, (key, operation) in enumerate(operations.items()):
        if not present[:, index].any():
            continue
        if operation in _MEANS:
            reduced[key] = float(totals[index] / weights[index])
        elif unknown[index]:
            continue
        elif operation == "min":
            reduced[key] = float(least[index])
        elif operation == "max":
            reduced[key] = float(most[index])
        else:
            reduced[key] = float(totals[index])
            if operation == "sum_and_worst":
                reduced[key + WORST_SUFFIX] = float(most[index])
    sums = gathered[:, 2 * len(operations) :].sum(0).reshape(-1, NUM_MOMENTS)
    for key, numbers in zip(_with_errors(operations), sums.tolist(), strict=True):
        moments = Moments(*numbers)
        if moments.num > 0:
            reduced[key] = moments.mean()
        if moments.num > 1:
            reduced[key + ERROR_SUFFIX] = moments.error()
    return reduced


def _reduce(
    local: Mapping[str, Reported],
    operations: Operations,
    group: dist.ProcessGroup | None,
    device: torch.device | str,
    world_size: int,
    guard: BestEffort | None = None,
) -> dict[str, float]:
    if guard is None:
        return _combine(_gather(_pack(local, operations, device), group, world_size), operations)
    # The collective stands outside of the guard: the other ranks wait for it.
    vector = guard.run(_pack, local, operations, device, guard)
    if vector is None:  # nothing of this rank is known
        vector = torch.zeros(_length(operations), dtype=torch.float64, device=device)
        counts = [_count_of_unknown(operation) for operation in operations.values()]
        vector[1 : 2 * len(operations) : 2] = torch.tensor(counts, dtype=torch.float64)
    gathered = _gather(vector, group, world_size)
    return guard.run(_combine, gathered, operations) or {}


def reduce_over_ranks(
    local: Mapping[str, Reported],
    keys: Iterable[str] | Operations,
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str,
    world_size: int,
    guard: BestEffort | None = None,
) -> dict[str, float]:
    """One logged step's values over all ranks, in one collective (none for a single rank). Every rank must call it.

    Args:
        local: this rank's values; keys may be missing. Plain numbers count once in a mean, a `SumCount` by its count, and
            the units of `Moments` one by one. None is a value that this rank should have and cannot give.
        keys: all keys that any rank may have, the same on every rank; or what `rank_operations` makes of them.
        device: where the collective runs (the CPU for gloo, this rank's device for nccl).
        guard: a value that is no number costs a warning, and counts as None; without a guard, it raises.

    Returns:
        The same on every rank: a value for each key that some rank has, and `<key>_max` (the worst rank) beside
        counters that ask for it, or `<key>_se` (the standard error) beside means that have one. A NaN on any rank makes the
        result NaN; a key that no rank has is absent, and so is one that is None on any rank, unless it is a mean.

    Raises:
        KeyError, TypeError: a local key is not among `keys`, or a value is no number (without a guard).
    """
    operations = keys if isinstance(keys, Mapping) else rank_operations(keys)
    return _reduce(local, operations, group, device, world_size, guard)


def reduce_loss_metrics(
    values: Mapping[str, Scalar],
    counts: Mapping[str, Scalar] | None = None,
    sum_keys: Iterable[str] | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str,
    world_size: int,
) -> dict[str, float]:
    """Means and totals over ranks in one collective. Every rank must call it with the same names.

    Args:
        values: this rank's numbers. The names in `values`, `counts` and `sum_keys` together must be the same on all
            ranks; a rank that has no value for a name in `counts` or `sum_keys` leaves it out of `values`.
        counts: weight of this rank's mean, by name; names without a count weigh the same on every rank.
        sum_keys: names that are totals: the cluster's total under the name, the worst rank's under `<name>_max`.

    Returns:
        The same on every rank; a mean over nothing is absent, a total over nothing is 0.
    """
    counts = counts or {}
    totals = frozenset(sum_keys or ())
    names = sorted(values.keys() | counts.keys() | totals)
    operations: dict[str, RankReduction] = {name: "sum_and_worst" if name in totals else "mean" for name in names}
    local: dict[str, Value] = dict.fromkeys(totals, 0.0)
    for name, value in values.items():
        # A mean over nothing may be NaN: its count 0 leaves it out.
        is_weighted = name in counts and name not in totals
        local[name] = SumCount(value * counts[name], counts[name]) if is_weighted else value
    return _reduce(local, operations, group, device, world_size)
