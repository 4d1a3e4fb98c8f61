"""Weights of a blend over time: constants and schedules, pure functions of the batch index or the optimizer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, TypeVar, get_args

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


def _checked(value: object, path: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (value == 0 or SMALLEST_WEIGHT <= value <= LARGEST_WEIGHT):  # type: ignore[operator]
        raise UserError(
            path, f"must be 0 or a number within [1e-100, 1e100], got {value!r}", "give a weight such as 2.0"
        )
    return float(value)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ConstantWeight:
    """The same weight at every batch. Raises UserError unless finite and not negative."""

    value: float
    path: str = field(default="weight", compare=False)
    unit: Literal["batch"] = field(default="batch", init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", _checked(self.value, self.path))

    def evaluate(self, x: int) -> float:
        """The weight at x."""
        return self.value

    def evaluate_many(self, xs: Ints) -> npt.NDArray[np.float64]:
        """The weight at each x."""
        return np.full(len(xs), self.value)

    def zero_from(self) -> int | None:
        """The first x from which the weight stays zero, None if there is none."""
        return 0 if self.value == 0 else None

    def zero_intervals(self) -> list[Interval]:
        """Where the weight is zero: disjoint, ascending intervals of integers x >= 0."""
        return [(0, None)] if self.value == 0 else []


@dataclass(frozen=True)
class ScheduledWeight:
    """A weight that follows points (x -> value) and is constant outside them.

    Args:
        kind: `linear` interpolates between points; `step` takes the last point at or before x.
        points: x (an integer >= 0) to value (finite, >= 0). At least one.
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
        for key, value, known in (
            ("schedule", self.kind, get_args(ScheduleKind)),
            ("unit", self.unit, ("batch", "step")),
        ):
            if value not in known:
                raise UserError(f"{self.path}.{key}", f"must be one of {', '.join(known)}; got {value!r}")
        if not self.points or any(
            isinstance(x, bool) or not isinstance(x, int) or not 0 <= x < 2**53 for x in self.points
        ):
            problem = f"must have at least one point, and integers >= 0 as points; got {dict(self.points)!r}"
            raise UserError(f"{self.path}.points", problem, "write points = { 0 = 1.0 }")
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
        intervals = self.zero_intervals()
        return intervals[-1][0] if intervals and intervals[-1][1] is None else None

    def zero_intervals(self) -> list[Interval]:
        """Where the weight is zero: disjoint, ascending intervals of integers x >= 0 (single points included)."""
        if self.scale == 0:
            return [(0, None)]
        xs, ys = list(self.points), list(self.points.values())
        found: list[Interval] = []
        for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
            if y != 0:
                continue
            start = 0 if i == 0 else x
            if i + 1 == len(xs):
                end: int | None = None
            elif self.kind == "step" or ys[i + 1] == 0:
                end = xs[i + 1] - 1
            else:
                end = x
            if found and found[-1][1] is not None and found[-1][1] + 1 >= start:
                found[-1] = (found[-1][0], end)
            else:
                found.append((start, end))
        return found


WeightSpec: TypeAlias = ConstantWeight | ScheduledWeight


def compose_weights(a: WeightSpec, b: WeightSpec, *, path_a: str, path_b: str) -> WeightSpec:
    """The product of two weights on one path of a nested blend.

    Raises:
        UserError: both are schedules; the message names both paths.
    """
    if isinstance(a, ScheduledWeight) and isinstance(b, ScheduledWeight):
        problem = f"is a schedule, and so is {path_a} above it; the two cannot be multiplied"
        raise UserError(path_b, problem, "make one of them a constant")
    if isinstance(a, ScheduledWeight):
        a, b = b, a
    assert isinstance(a, ConstantWeight)
    if isinstance(b, ScheduledWeight):
        return replace(b, scale=a.value * b.scale)
    return ConstantWeight(a.value * b.value, path_b)


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


def zero_batches(spec: WeightSpec, micro_batches: MicroBatches) -> list[Interval]:
    """The batches at which a weight is zero: disjoint, ascending intervals; see `positions` for weights in steps."""
    if spec.unit == "batch":
        return spec.zero_intervals()
    found: list[Interval] = []
    for start, end in spec.zero_intervals():
        if end != 0:  # there is no step 0
            first = micro_batches.batches_before(max(start, 1))
            found.append((first, None if end is None else micro_batches.batches_before(end + 1) - 1))
    return found


def first_all_zero(
    specs: Sequence[WeightSpec], *, micro_batches: MicroBatches = ONE, num_batches: int | None = None
) -> Interval | None:
    """The first interval of batches in which every weight is zero, or None.

    Exact: intersects the zero sets of the schedules instead of sampling them. See `positions` for weights in steps.

    Args:
        specs: the weights of one blend.
        micro_batches: micro-batches per optimizer step.
        num_batches: ignore intervals that begin at this batch or later; None: ignore none.
    """
    if not specs:
        return None
    far = 1 << 62
    common: list[Interval] = [(0, None)]
    for spec in specs:
        zeros = zero_batches(spec, micro_batches)
        pairs = (
            (max(a, c), min(far if b is None else b, far if d is None else d)) for a, b in common for c, d in zeros
        )
        common = sorted((start, None if end == far else end) for start, end in pairs if start <= end)
    return common[0] if common and (num_batches is None or common[0][0] < num_batches) else None
