"""What every table of a config has in common, and the types that tables share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

# Tags of the number-or-schedule union. They show up in pydantic's error paths, and the brackets let `load` take them out.
NUMBER_TAG = "<number>"
SCHEDULE_TAG = "<schedule>"
# The forms of names, and what a person is told of them.
PLAIN_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$"
SOURCE_NAME = r"^[A-Za-z0-9_.-]+$"
IMPORT_PATH = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
FORMS = {
    PLAIN_NAME: 'letters, digits, "_", "." and "-" alone, the first no "." or "-"',
    SOURCE_NAME: 'letters, digits, "_", "." and "-" alone',
    IMPORT_PATH: "an import path package.module:function",
}


class Table(BaseModel):
    """One TOML table: frozen, strictly typed, closed to unknown keys, no NaN or infinity."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
    )


def _integer_keys(value: Any) -> Any:
    """TOML keys are strings; the points of a schedule are positions in the run."""
    if not isinstance(value, Mapping):
        return value
    points: dict[Any, Any] = {}
    for key, weight in value.items():
        try:
            points[int(key)] = weight
        except (TypeError, ValueError):
            raise ValueError(f"every point's key must be a whole number (a batch or step), got {key!r}") from None
    if len(points) < len(value):
        raise ValueError("two points have the same key")
    return points


NonNegative = Annotated[float, Field(ge=0)]
Points = Annotated[dict[Annotated[int, Field(ge=0)], NonNegative], BeforeValidator(_integer_keys), Field(min_length=1)]


class ScheduleTable(Table):
    """A weight that changes during the run: `{ schedule = "linear", unit = "step", points = { 0 = 3.0, 150 = 1.0 } }`."""

    schedule: Literal["linear", "step"]
    """linear: interpolate between the points, clamped outside; step: the last point at or before."""
    unit: Literal["batch", "step"] = "batch"
    """What the points count: micro-batches of a rank from 0, or optimizer steps from 1."""
    points: Points
    """Position in the run -> weight."""
    scale: NonNegative = 1.0
    """Multiplies every point."""


def _weight_kind(value: Any) -> str:
    return SCHEDULE_TAG if isinstance(value, Mapping | ScheduleTable) else NUMBER_TAG


Weight = Annotated[
    Annotated[NonNegative, Tag(NUMBER_TAG)] | Annotated[ScheduleTable, Tag(SCHEDULE_TAG)], Discriminator(_weight_kind)
]
