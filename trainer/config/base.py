"""Base class of all config tables, the types they share, and schedules of weights and of micro-batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from trainer.micro_batches import AutoRule, LrRule, MicroBatches
from trainer.wording import short_repr

# Tags of the unions of numbers and tables. pydantic puts them into error paths, from which `messages` removes them; the angle
# brackets keep them distinct from keys.
NUMBER_TAG = "<number>"
SCHEDULE_TAG = "<schedule>"
AUTO_TAG = "<auto>"
TAGS = (NUMBER_TAG, SCHEDULE_TAG, AUTO_TAG)
# String patterns, and how error messages describe them.
PLAIN_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$"
SOURCE_NAME = r"^[A-Za-z0-9_.-]+$"
IMPORT_PATH = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
NO_NUL = r"^[^\x00]*$"
WEB_ADDRESS = r"^https?://([\w.-]+|\[[0-9A-Fa-f:]+\])(:[0-9]+)?(/\S*)?$"
FORMS = {
    PLAIN_NAME: 'letters, digits, "_", "." and "-", starting with a letter, digit or "_"',
    SOURCE_NAME: 'letters, digits, "_", "." and "-"',
    IMPORT_PATH: "an import path package.module:function",
    NO_NUL: "text without NUL characters",
    WEB_ADDRESS: "an address such as https://HOST",
}

# Every number has an upper bound: what lies beyond it is a typing mistake, and would overflow or never end.
Count = Annotated[int, Field(ge=1, le=10**9)]  # over a whole run: steps, groups
WholeNumber = Annotated[int, Field(ge=0, le=10**9)]
Size = Annotated[int, Field(ge=1, le=10**6)]  # what exists at once in a step: rows, cells, widths
Tokens = Annotated[int, Field(ge=0, le=10**15)]  # float64 counts exactly so far; also a position in a run, in any unit
MOST_MICRO_BATCHES: Final = 10_000  # of a step on one rank, which runs them in turn
MicroBatchCount = Annotated[int, Field(ge=1, le=MOST_MICRO_BATCHES)]
Factor = Annotated[float, Field(ge=0, le=1000)]  # multiplies something of the order of 1
PositiveFactor = Annotated[float, Field(gt=0, le=1000)]
Amount = Annotated[float, Field(ge=0, le=1e9)]  # in the key's unit: a norm, GB, TFLOPS
Share = Annotated[float, Field(ge=0, le=1e15)]  # relative to the others: may be a size in bytes
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(gt=0, le=1e8)]  # three years; torch counts milliseconds
Fraction = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1, max_length=4096, pattern=NO_NUL)]
ImportPath = Annotated[str, Field(pattern=IMPORT_PATH, max_length=4096)]


def _storable(args: dict[str, Any]) -> dict[str, Any]:
    """Refuses values that a checkpoint's config would give back changed, or not at all."""
    values: list[Any] = [args]
    for value in values:
        if isinstance(value, int) and value.bit_length() > 63:
            raise ValueError("holds an integer of more than 64 bits: TOML has none, write it as a string")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"holds {value}, which JSON has not: write it as a string")
        if not isinstance(value, bool | int | float | str | list | dict):
            raise ValueError(f"holds a {type(value).__name__}, which JSON has not: write it as a string")
        values += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return args


Args = Annotated[dict[str, Any], AfterValidator(_storable)]


def _no_number(value: Any) -> Any:
    """Refuses 1 and 0, which Python takes for true and false."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError(f'must be "auto", true or false, got {value}')
    return value


AutoSwitch = Annotated[Literal["auto", True, False], BeforeValidator(_no_number)]


class Table(BaseModel):
    """One TOML table: frozen and strictly typed; refuses unknown keys, NaN and infinity."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
    )


def _integer_keys(value: Any) -> Any:
    """Converts the points' keys to integers: TOML keys are strings."""
    if not isinstance(value, Mapping):
        return value
    try:
        points = {int(key): weight for key, weight in value.items()}
    except (TypeError, ValueError):
        problem = "the points' keys must be whole numbers (positions in the run)"
        raise ValueError(f"{problem}, got {short_repr(list(value))}") from None
    if len(points) < len(value):
        raise ValueError("two points have the same key")
    return points


Points = Annotated[dict[Tokens, Share], BeforeValidator(_integer_keys), Field(min_length=1)]
BatchPoints = Annotated[dict[Tokens, MicroBatchCount], BeforeValidator(_integer_keys), Field(min_length=1)]


def _accept_kind(schema: dict[str, Any]) -> None:
    """Adds the alias to the JSON Schema, from which pydantic leaves it out."""
    properties = schema["properties"]
    properties["kind"] = {**properties["schedule"], "description": "Another name for schedule."}
    schema["required"].remove("schedule")
    schema["oneOf"] = [{"required": ["schedule"]}, {"required": ["kind"]}]


class ScheduleTable(Table):
    """A weight that changes during the run: `{ schedule = "linear", unit = "step", points = { 0 = 3.0, 150 = 1.0 } }`."""

    model_config = ConfigDict(json_schema_extra=_accept_kind)

    schedule: Annotated[Literal["linear", "step"], Field(validation_alias=AliasChoices("schedule", "kind"))]
    """linear: interpolate between points; step: take the last point reached. Constant outside the points."""
    unit: Literal["batch", "step"] = "batch"
    """Unit of the points: a rank's micro-batches, from 0, or optimizer steps, from 1."""
    points: Points
    """Position in the run -> weight."""
    scale: Share = 1.0
    """Factor on the weight of every point."""


class BatchScheduleTable(Table):
    """A number of micro-batches that is planned: `{ schedule = "step", unit = "steps", points = { 0 = 1, 1000 = 2 } }`."""

    schedule: Literal["step"]
    """step: take the last point reached, or the first one."""
    unit: Literal["steps", "tokens"] = "steps"
    """Unit of the points: optimizer steps, from 1, or target tokens over all ranks."""
    points: BatchPoints
    """Position in the run -> micro-batches."""
    lr: LrRule = "none"
    """Factor on the learning rate: 1 (none), sqrt(m / m_start) or m / m_start (linear)."""


class AutoBatchTable(Table):
    """A number of micro-batches that doubles when the noise scale B permits: `{ schedule = "auto", start = 1, max = 16 }`."""

    schedule: Literal["auto"]
    """auto: decide during the run. Needs gns.enabled."""
    start: MicroBatchCount = 1
    """Micro-batches of the first steps; one rank needs 2."""
    max: MicroBatchCount = 16
    """Micro-batches at most."""
    multiple: PositiveFactor = 2.0
    """Double when the lower bound of B exceeds this many times the batch."""
    every: Count = 100
    """Steps between decisions, and at least between changes."""
    lr: LrRule = "none"
    """As in a schedule."""

    @model_validator(mode="after")
    def _can_grow(self) -> AutoBatchTable:
        if self.max < 2 * self.start:
            raise ValueError(f"max = {self.max} is less than twice start = {self.start}: set max to {2 * self.start}")
        return self


def _table_of_word(value: Any) -> Any:
    """`"auto"` is short for a table."""
    if value == "auto":
        return {"schedule": "auto"}
    form = value.get("schedule", "step") if isinstance(value, Mapping) else value
    if isinstance(form, str) and form not in ("auto", "step"):
        raise ValueError(
            f'must be an integer, "auto" or a table with schedule = "step" or "auto"; got {short_repr(form)}'
        )
    return value


def _weight_kind(value: Any) -> str:
    return SCHEDULE_TAG if isinstance(value, Mapping | Table) else NUMBER_TAG


def _batch_kind(value: Any) -> str:
    form = value.get("schedule") if isinstance(value, Mapping) else getattr(value, "schedule", None)
    return AUTO_TAG if form == "auto" else _weight_kind(value)


Weight = Annotated[
    Annotated[Share, Tag(NUMBER_TAG)] | Annotated[ScheduleTable, Tag(SCHEDULE_TAG)], Discriminator(_weight_kind)
]
BatchSize = Annotated[
    Annotated[MicroBatchCount, Tag(NUMBER_TAG)]
    | Annotated[BatchScheduleTable, Tag(SCHEDULE_TAG)]
    | Annotated[AutoBatchTable, Tag(AUTO_TAG)],
    Discriminator(_batch_kind),
    BeforeValidator(
        _table_of_word, json_schema_input_type=MicroBatchCount | Literal["auto"] | BatchScheduleTable | AutoBatchTable
    ),
]


def plan_of(setting: int | BatchScheduleTable | AutoBatchTable) -> MicroBatches:
    """The plan of `train.micro_batches`, whichever form it has."""
    if isinstance(setting, int):
        return MicroBatches.constant(setting)
    if isinstance(setting, AutoBatchTable):
        rule = AutoRule(max=setting.max, multiple=setting.multiple, every=setting.every)
        return MicroBatches(((0, setting.start),), lr=setting.lr, auto=rule)
    points = dict(sorted(setting.points.items()))
    points = {0: next(iter(points.values())), **points}  # the first point holds before it, too
    return MicroBatches(tuple(points.items()), unit=setting.unit, lr=setting.lr)
