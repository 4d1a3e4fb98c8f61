"""Weights of a blend over time: pure functions of the batch index or the optimizer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from trainer.arrays import Ints
from trainer.options import MicroBatches, Options, part_options

# Far inside float64's range: no sum of weights overflows, no interpolated weight underflows, and a
# weight is zero exactly where its schedule is.
Value = Annotated[float, Field(ge=1e-100, le=1e100)] | Annotated[float, Field(ge=0, le=0)]


@part_options
class ScheduledWeight(Options):
    """A weight that follows points and is constant outside them."""

    kind: Literal["linear", "step"]
    """`linear` interpolates; `step` takes the last point at or before x."""
    points: Annotated[Mapping[Annotated[int, Field(ge=0, lt=2**53)], Value], Field(min_length=1)]
    """x -> value."""
    scale: Value = 1.0
    """A factor on every value."""
    unit: Literal["batch", "step"] = "batch"
    """What x counts: micro-batches from 0, or optimizer steps from 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "points", {x: float(self.points[x]) for x in sorted(self.points)})

    def evaluate(self, x: int) -> float:
        return float(self.evaluate_many(np.array([x]))[0])

    def evaluate_many(self, xs: Ints) -> npt.NDArray[np.float64]:
        knots = np.fromiter(self.points, np.int64)
        values = np.fromiter(self.points.values(), np.float64)
        after = np.searchsorted(knots, xs, side="right")
        left = np.maximum(after - 1, 0)
        if self.kind == "step":
            return values[left] * self.scale
        right = np.minimum(after, len(knots) - 1)
        width = np.maximum(knots[right] - knots[left], 1)
        # Constant before the first point and behind the last.
        share = np.where((right > left) & (after > 0), (xs - knots[left]) / width, 0.0)
        return (values[left] * (1.0 - share) + values[right] * share) * self.scale

    def zero_from(self) -> int | None:
        """The first x from which the weight stays zero, None if there is none."""
        on = [x for x, value in self.points.items() if value * self.scale]
        if not on:
            return 0
        return next((x for x in self.points if x > on[-1]), None)


class ConstantWeight(ScheduledWeight):
    """The same weight at every batch. Raises UserError unless it is a `Value`."""

    def __init__(self, value: float) -> None:
        super().__init__("step", {0: value})


Batches = TypeVar("Batches", int, Ints)


def positions(unit: str, batches: Batches, micro_batches: MicroBatches) -> Batches:
    """The x of a weight at a batch index (from 0): the index, or its optimizer step (from 1)."""
    if unit == "batch":
        return batches
    if isinstance(batches, int):
        return micro_batches.step_of(batches)
    return np.array([*map(micro_batches.step_of, batches.tolist())], np.int64)


def first_all_zero(specs: Sequence[ScheduledWeight], micro_batches: MicroBatches, num_batches: int) -> int | None:
    """The first of `num_batches` at which every weight is zero, or None."""
    # Exact: between neighbouring points of all schedules, a weight is zero everywhere, nowhere, or
    # at an end alone.
    edges = {0}
    for spec in specs:
        for x in spec.points:
            near = [x, x + 1]
            if spec.unit == "step":
                near = [micro_batches.batches_before(max(step, 1)) for step in near]
            edges |= {at + shift for at in near for shift in (-1, 0)}
    batches = np.array(sorted(edge for edge in edges if 0 <= edge < num_batches))
    weights = [spec.evaluate_many(positions(spec.unit, batches, micro_batches)) for spec in specs]
    found: Ints = batches[sum(weights, np.zeros(len(batches))) == 0]
    return next(iter(found.tolist()), None)
