"""The values of `train.micro_batches` that are not a number: a schedule, or `auto`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from trainer.config.base import AUTO_TAG, NUMBER_TAG, SCHEDULE_TAG, Count, PositiveFactor, Table, Tokens, integer_keys
from trainer.config.messages import shown
from trainer.micro_batches import AutoRule, LrRule, MicroBatches

MicroBatchCount = Annotated[int, Field(ge=1, le=10_000)]
BatchPoints = Annotated[dict[Tokens, MicroBatchCount], BeforeValidator(integer_keys), Field(min_length=1)]


class BatchScheduleTable(Table):
    """A number of micro-batches that is planned: `{ schedule = "step", unit = "steps", points = { 0 = 1, 1000 = 2 } }`."""

    schedule: Literal["step"]
    """step: take the last point reached, in whatever order they are written; the first point holds before it, too."""
    unit: Literal["steps", "tokens"] = "steps"
    """Unit of the points: steps, optimizer steps, from 1; tokens, the target tokens over all ranks before the step, its
    predecessor counted as full."""
    points: BatchPoints
    """Position in the run -> micro-batches."""
    lr: LrRule = "none"
    """The scheduler's learning rate is multiplied by 1 (none), sqrt(m / m_start) (sqrt) or m / m_start (linear)."""


class AutoBatchTable(Table):
    """A number of micro-batches that doubles when the noise scale B permits: `{ schedule = "auto", start = 1, max = 16 }`."""

    schedule: Literal["auto"]
    """auto: decide during the run. Needs gns.enabled."""
    start: MicroBatchCount = 1
    """Micro-batches of the first steps; one rank needs 2, since one micro-batch alone has no noise to measure."""
    max: MicroBatchCount = 16
    """Micro-batches at most."""
    multiple: PositiveFactor = 2.0
    """Double when the lower bound of B exceeds this many times the batch, both in sequences per step over all ranks."""
    every: Count = 100
    """Steps between decisions, and from a change to the next at least."""
    lr: LrRule = "none"
    """As in a schedule."""

    @model_validator(mode="after")
    def _can_grow(self) -> AutoBatchTable:
        if self.max < 2 * self.start:
            raise ValueError(
                f"max = {self.max} leaves start = {self.start} no room to double: set max to {2 * self.start}"
            )
        return self


def _table_of_word(value: Any) -> Any:
    """`"auto"` is short for a table."""
    if isinstance(value, str) and value != "auto":
        raise ValueError(f'must be an integer, "auto" or a schedule, got "{value}"')
    if isinstance(value, Mapping) and value.get("schedule") not in (None, "step", "auto"):
        raise ValueError(f'schedule must be "step" or "auto", got {shown(value["schedule"])}')
    return {"schedule": "auto"} if value == "auto" else value


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return AUTO_TAG if value.get("schedule") == "auto" else SCHEDULE_TAG
    if isinstance(value, AutoBatchTable):
        return AUTO_TAG
    return SCHEDULE_TAG if isinstance(value, BatchScheduleTable) else NUMBER_TAG


BatchSize = Annotated[
    Annotated[MicroBatchCount, Tag(NUMBER_TAG)]
    | Annotated[BatchScheduleTable, Tag(SCHEDULE_TAG)]
    | Annotated[AutoBatchTable, Tag(AUTO_TAG)],
    Discriminator(_kind),
    BeforeValidator(
        _table_of_word, json_schema_input_type=MicroBatchCount | Literal["auto"] | BatchScheduleTable | AutoBatchTable
    ),
]


def plan_of(setting: int | BatchScheduleTable | AutoBatchTable) -> MicroBatches:
    """What the setting says, in one form for all."""
    if isinstance(setting, int):
        return MicroBatches.constant(setting)
    if isinstance(setting, AutoBatchTable):
        rule = AutoRule(max=setting.max, multiple=setting.multiple, every=setting.every)
        return MicroBatches(((0, setting.start),), lr=setting.lr, auto=rule)
    points = dict(sorted(setting.points.items()))
    points = {0: next(iter(points.values())), **points}  # the first point holds before it, too
    return MicroBatches(tuple(points.items()), unit=setting.unit, lr=setting.lr)
