"""What state.json of a checkpoint may hold: it is read like any input, since a hash that agrees proves no meaning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainer.errors import UserError
from trainer.import_path import format_error
from trainer.metrics.noise_scale.components import WINDOW_LENGTH

MOST = 2**62
Count = Annotated[int, Field(ge=0, le=MOST)]
Pair = Annotated[list[float], Field(min_length=2, max_length=2)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Tracker(_Part):
    tokens_seen: Count
    smoothed: dict[str, float | None]


class _NoiseScale(_Part):
    noise: dict[str, float]
    consistency: dict[str, float]
    gauges: dict[str, float]
    history: list[list[Pair]]
    components: list[Annotated[list[float], Field(min_length=WINDOW_LENGTH, max_length=WINDOW_LENGTH)]]


class _SavedState(_Part):
    """What restoring needs of state.json."""

    step: Count
    world_size: Annotated[int, Field(ge=1, le=MOST)]
    model_files: Annotated[list[Count], Field(min_length=1)]
    reached: Count
    tokens: Annotated[list[Count], Field(min_length=2, max_length=2)]
    micro_batches: Annotated[list[Count], Field(min_length=2, max_length=2)]
    evaluation_is_due: bool
    tracker: _Tracker
    gns: _NoiseScale | None
    extensions: dict[str, dict[str, Any] | None]
    wandb_run_id: str | None = None
    config: dict[str, Any]


def problem_of(state: Mapping[str, Any]) -> str | None:
    """The first thing in a state.json that cannot be, as `tracker.tokens_seen: ...`; None if there is none."""
    try:
        _SavedState.model_validate(state)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}"
    return None


@contextmanager
def loading(path: Path, part: str) -> Iterator[None]:
    """Load a part of a checkpoint. What it holds may raise anything: that is the checkpoint's fault, in one line.

    Raises:
        UserError: naming the part.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        problem = f"{path}: its {part} cannot be restored: {format_error(error)}"
        raise UserError("--resume", problem, "resume from another checkpoint") from error
