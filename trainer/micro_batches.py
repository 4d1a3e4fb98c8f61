"""m, the micro-batches per optimizer step and rank, by step, tokens and noise scale."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Final, Literal, NamedTuple, Self

from trainer.options import Count, Limits, Options, PositiveFactor, part_options

Unit = Literal["steps", "tokens"]
LrRule = Literal["none", "sqrt", "linear"]
MOST_MICRO_BATCHES: Final = 10_000  # of a step on one rank, which runs them in turn
MicroBatchCount = Annotated[int, Limits(ge=1, le=MOST_MICRO_BATCHES)]
FAR = 2**62  # a step beyond every run


@part_options
class AutoRule(Options):
    """When `train.micro_batches = "auto"` doubles m."""

    max: MicroBatchCount = 16
    """Micro-batches at most."""
    multiple: PositiveFactor = 2.0
    """Double when the lower bound of B exceeds this many times the batch."""
    every: Count = 100
    """Steps between decisions, and at least between changes."""


class Stretch(NamedTuple):
    """Steps with the same m. Steps count from 1, batches (a rank's micro-batches) from 0."""

    first_step: int
    first_batch: int
    m: int


@dataclass(frozen=True)
class MicroBatches:
    """The value of `train.micro_batches`: a constant, a plan by steps or tokens, or a rule.

    Args:
        points: x -> m from there on, ascending, the first at 0. One: a constant, or `auto`'s start.
        unit: what x counts: optimizer steps, from 1; or tokens over all ranks before the step.
        lr: how the learning rate follows m; see `lr_factor`.
        auto: m doubles by this rule; None: it is planned.
    """

    points: tuple[tuple[int, int], ...]
    unit: Unit = "steps"
    lr: LrRule = "none"
    auto: AutoRule | None = None

    @classmethod
    def constant(cls, m: int) -> Self:
        """The same m in every step."""
        return cls(((0, m),))

    @property
    def is_constant(self) -> bool:
        """m never changes: an integer, or a single point."""
        return self.auto is None and len(self.points) == 1

    @property
    def is_known_ahead(self) -> bool:
        """m is a function of the step alone, so that a micro-batch's step is known ahead."""
        return self.auto is None and (self.unit == "steps" or len(self.points) == 1)

    @cached_property
    def first(self) -> int:
        """m of the first step."""
        return self.at(1, 0)

    @property
    def least(self) -> int:
        """The smallest m that a step can have."""
        return min(m for _, m in self.points)

    @property
    def most(self) -> int:
        """The largest m that a step can have."""
        return max(m for _, m in self.fastest().points)

    def at(self, step: int, tokens: int) -> int:
        """The planned m of `step`, after training on so many tokens; of `auto` its start."""
        x = step if self.unit == "steps" else tokens
        index = bisect_right(self.points, (x, FAR)) - 1
        return self.points[max(index, 0)][1]  # the first point holds before it, too

    def lr_factor(self, m: int) -> float:
        """The factor on the schedule's learning rate at m: 1, sqrt(m / m_start) or m / m_start."""
        ratio = m / self.first
        return {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[self.lr]

    def by_steps(self, micro_tokens: int) -> MicroBatches:
        """This as a plan by steps, for forecasts: all batches are full, and `auto` never grows.

        Args:
            micro_tokens: tokens of a full micro-batch over all ranks; 0: not known.
        """
        if self.is_known_ahead:
            return self
        if self.auto is not None or micro_tokens == 0:
            return replace(self.constant(self.first), lr=self.lr)
        points, step, tokens = [(0, self.first)], 1, 0
        for (_, m), (x, following) in zip(self.points, self.points[1:], strict=False):
            steps = -(-max(x - tokens, 0) // (micro_tokens * m))  # whole steps, up to the point
            step, tokens = step + steps, tokens + steps * micro_tokens * m
            # A step may pass several points: the last of them holds.
            points = [point for point in points if point[0] < step] + [(step, following)]
        return MicroBatches(tuple(points), lr=self.lr)

    def fastest(self) -> MicroBatches:
        """The plan by steps of an `auto` that grows whenever it may; others as they are."""
        if self.auto is None:
            return self
        doublings = (self.auto.max // self.first).bit_length() - 1
        later = tuple((n * self.auto.every + 1, self.first << n) for n in range(1, doublings + 1))
        return MicroBatches(((0, self.first), *later), lr=self.lr)

    @cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        """The stretches of a plan by steps."""
        assert self.is_known_ahead, "when m changes is not known ahead"
        found = [Stretch(1, 0, self.first)]
        for x, m in self.points:
            if x > 1:
                step, batch, former = found[-1]
                found.append(Stretch(x, batch + (x - step) * former, m))
        return tuple(found)

    def batches_before(self, step: int) -> int:
        """Micro-batches of a rank before `step`."""
        first_step, first_batch, m = self.stretches[bisect_right(self.stretches, (step, FAR)) - 1]
        return first_batch + (step - first_step) * m

    @cached_property
    def _firsts(self) -> list[int]:
        return [stretch.first_batch for stretch in self.stretches]

    def step_of(self, batch: int) -> int:
        """The step that a rank's micro-batch belongs to."""
        first_step, first_batch, m = self.stretches[bisect_right(self._firsts, batch) - 1]
        return first_step + (batch - first_batch) // m


ONE = MicroBatches.constant(1)
