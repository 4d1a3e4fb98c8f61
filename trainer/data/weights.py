"""Weights of a blend over time, pure functions of the batch index or the optimizer step; a constant has a single point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from trainer.arrays import Ints
from trainer.errors import UserError
from trainer.micro_batches import ONE, MicroBatches

# Far inside float64's range: no sum of weights overflows and no interpolated weight underflows, so a weight is zero
# exactly where its schedule is.
SMALLEST_WEIGHT, LARGEST_WEIGHT = 1e-100, 1e100
ScheduleKind = Literal["linear", "step"]
Interval: TypeAlias = tuple[int, int | None]  # first and last x, both included; None: unbounded


def _checked(value: Any, path: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (value == 0 or SMALLEST_WEIGHT <= value <= LARGEST_WEIGHT):
        raise UserError(path, f"must be 0 or a number within [1e-100, 1e100], got {value!r}")
    return float(value)


@dataclass(frozen=True)
class ScheduledWeight:
    """A weight that follows points (x -> value, at least one) and is constant outside them.

    Args:
        kind: `linear` interpolates between points; `step` takes the last point at or before x.
        scale: a factor on every value.
        unit: what x counts: micro-batches from 0, or optimizer steps from 1.
        path: the name of this weight in messages.
    """

    kind: ScheduleKind
    points: Mapping[int, float]
    scale: float = 1.0
    unit: Literal["batch", "step"] = "batch"
    path: str = field(default="weight", compare=False)

    def __post_init__(self) -> None:
        kinds, units = get_args(ScheduleKind), ("batch", "step")
        are_places = all(type(x) is int and 0 <= x < 2**53 for x in self.points)
        for key, is_right, rule, found in (
            ("schedule", self.kind in kinds, f"one of {', '.join(kinds)}", self.kind),
            ("unit", self.unit in units, f"one of {', '.join(units)}", self.unit),
            ("points", self.points and are_places, "at least one point, at an integer >= 0", dict(self.points)),
        ):
            if not is_right:
                raise UserError(f"{self.path}.{key}", f"must be {rule}, got {found!r}")
        points = {x: _checked(self.points[x], f"{self.path}.points.{x}") for x in sorted(self.points)}
        object.__setattr__(self, "points", points)
        object.__setattr__(self, "scale", _checked(self.scale, f"{self.path}.scale"))

    def __hash__(self) -> int:
        return hash((self.kind, tuple(self.points.items()), self.scale, self.unit))

    def evaluate(self, x: int) -> float:
        """The weight at x."""
        return float(self.evaluate_many(np.array([x]))[0])

    def evaluate_many(self, xs: Ints) -> npt.NDArray[np.float64]:
        """The weight at each x."""
        knots = np.fromiter(self.points, np.int64)
        values = np.fromiter(self.points.values(), np.float64)
        after = np.searchsorted(knots, xs, side="right")
        left = np.maximum(after - 1, 0)
        if self.kind == "step":
            return values[left] * self.scale
        right = np.minimum(after, len(knots) - 1)
        share = np.where(right > left, (xs - knots[left]) / np.maximum(knots[right] - knots[left], 1), 0.0)
        share = np.where(after == 0, 0.0, share)
        return (values[left] * (1.0 - share) + values[right] * share) * self.scale

    def zero_from(self) -> int | None:
        """The first x from which the weight stays zero, None if there is none."""
        if self.scale == 0:
            return 0
        last = max((i for i, value in enumerate(self.points.values()) if value), default=-1)
        zeros = list(self.points)[last + 1 :]
        return None if not zeros else zeros[0] if last >= 0 else 0


WeightSpec: TypeAlias = ScheduledWeight


class ConstantWeight(ScheduledWeight):
    """The same weight at every batch. Raises UserError unless finite and not negative."""

    def __init__(self, value: float, path: str = "weight") -> None:
        super().__init__("step", {0: _checked(value, path)}, path=path)


def compose_weights(a: WeightSpec, b: WeightSpec, *, path_a: str, path_b: str) -> WeightSpec:
    """The product of two weights on one path of a nested blend.

    Raises:
        UserError: both are schedules; the message names both paths.
    """
    if len(a.points) > 1 and len(b.points) > 1:
        problem = f"is a schedule, and so is {path_a} above it; the two cannot be multiplied"
        raise UserError(path_b, problem, "make one of them a constant")
    constant, other = (a, b) if len(a.points) == 1 else (b, a)
    if len(other.points) == 1:
        return ConstantWeight(constant.evaluate(0) * other.evaluate(0), path_b)
    return replace(other, scale=constant.evaluate(0) * other.scale)


Batches = TypeVar("Batches", int, Ints)


def positions(unit: str, batches: Batches, micro_batches: MicroBatches) -> Batches:
    """The x of a weight at a batch index: the index itself, or the optimizer step that it belongs to.

    Batches count from 0 and steps from 1, as `global_step` does.
    """
    if unit == "batch":
        return batches
    if isinstance(batches, int):
        return micro_batches.step_of(batches)
    first_steps, first_batches, ms = np.array(micro_batches.stretches).T
    at = np.searchsorted(first_batches, batches, side="right") - 1
    steps: Ints = first_steps[at] + (batches - first_batches[at]) // ms[at]
    return steps


def first_all_zero(
    specs: Sequence[WeightSpec], *, micro_batches: MicroBatches = ONE, num_batches: int | None = None
) -> Interval | None:
    """The first and last batch of the first stretch in which every weight is zero, or None. See `positions`.

    Exact: between two neighbouring points of all schedules, a weight is zero everywhere, nowhere, or at an end alone.

    Args:
        specs: the weights of one blend.
        micro_batches: micro-batches per optimizer step.
        num_batches: ignore stretches that begin at this batch or later; None: ignore none.
    """
    edges = {0}
    for spec in specs:
        for x in spec.points:
            near = (x, x + 1) if spec.unit == "batch" else map(micro_batches.batches_before, (max(x, 1), x + 1))
            edges |= {at + shift for at in near for shift in (-1, 0)}
    batches = np.array(sorted(edge for edge in edges if edge >= 0))
    values = [spec.evaluate_many(positions(spec.unit, batches, micro_batches)) for spec in specs]
    is_zero = ~np.any(values, axis=0) if specs else np.zeros(1, np.bool_)
    first = int(is_zero.argmax())
    if not is_zero[first] or (num_batches is not None and batches[first] >= num_batches):
        return None
    ends = np.flatnonzero(~is_zero[first:])
    return int(batches[first]), int(batches[first + ends[0] - 1]) if len(ends) else None
