"""events.jsonl: what happened in a run besides metrics (diagnostics that went off, signals, loss spikes, restarts)."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from trainer.metrics.payload_contract import non_finite_word
from trainer.metrics.sinks.line_file import LineFile

SAMPLE: Final = "sample"
"""The event that carries what a model wrote: `global_step`, `prompt`, `text`."""


def _strict(value: Any) -> Any:
    """The value with NaN and infinities as words, so that the line is strict JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return non_finite_word(value)
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value


class EventWriter:
    """Appends events, each one line of strict JSON with `event` (what) and `time` (seconds since 1970)."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._file = LineFile(path)
        self._clock = clock

    def write(self, event: Mapping[str, Any]) -> None:
        """Append one event; values that JSON does not know are written as text.

        Raises:
            ValueError: the event does not say what it is.
            OSError: it could not be written.
        """
        if not event.get("event"):
            raise ValueError(f"an event needs its name under 'event', got {sorted(event)}")
        line = {"time": round(self._clock(), 3), **_strict(event)}
        self._file.append(json.dumps(line, allow_nan=False, separators=(",", ":"), default=str))

    def close(self) -> None:
        """Close the file."""
        self._file.close()
