"""Base class of all config tables, and the types they share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

# Tags of the number-or-schedule union. pydantic puts them into error paths, from which `messages` removes them; the angle
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
    """Refuses integers that TOML does not have: some have too many digits to be written at all."""
    values: list[Any] = [args]
    for value in values:
        if isinstance(value, int) and value.bit_length() > 63:
            raise ValueError("holds an integer of more than 64 bits: TOML has none, write it as a string")
        values += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return args


Args = Annotated[dict[str, Any], AfterValidator(_storable)]


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


def integer_keys(value: Any) -> Any:
    """Converts the points' keys to integers: TOML keys are strings."""
    if not isinstance(value, Mapping):
        return value
    points: dict[Any, Any] = {}
    for key, weight in value.items():
        try:
            points[int(key)] = weight
        except (TypeError, ValueError):
            raise ValueError(f"a point's key must be a whole number (its position in the run), got {key!r}") from None
    if len(points) < len(value):
        raise ValueError("two points have the same key")
    return points


Points = Annotated[dict[Tokens, Share], BeforeValidator(integer_keys), Field(min_length=1)]


def _accept_kind(schema: dict[str, Any]) -> None:
    """Adds the alias to the JSON Schema, from which pydantic leaves it out."""
    properties = schema["properties"]
    properties["kind"] = {
        **properties["schedule"],
        "description": "Another name for schedule; one of the two is required.",
    }
    schema["required"].remove("schedule")
    schema["oneOf"] = [{"required": ["schedule"]}, {"required": ["kind"]}]


class ScheduleTable(Table):
    """A weight that changes during the run: `{ schedule = "linear", unit = "step", points = { 0 = 3.0, 150 = 1.0 } }`."""

    model_config = ConfigDict(json_schema_extra=_accept_kind)

    schedule: Annotated[Literal["linear", "step"], Field(validation_alias=AliasChoices("schedule", "kind"))]
    """linear: interpolate between points; step: take the last point reached. Constant outside the points."""
    unit: Literal["batch", "step"] = "batch"
    """Unit of the points: batch, the micro-batches of a rank, from 0; step, optimizer steps, from 1."""
    points: Points
    """Position in the run -> weight."""
    scale: Share = 1.0
    """Factor on the weight of every point."""


def _weight_kind(value: Any) -> str:
    return SCHEDULE_TAG if isinstance(value, Mapping | ScheduleTable) else NUMBER_TAG


Weight = Annotated[
    Annotated[Share, Tag(NUMBER_TAG)] | Annotated[ScheduleTable, Tag(SCHEDULE_TAG)], Discriminator(_weight_kind)
]
