"""metrics.jsonl, the durable record of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.metrics.payload_contract import RESTART, encode_payload
from trainer.metrics.sinks.line_file import LineFile


class JsonlSink:
    """Appends each payload and restart event as one line; write failures raise, since a run needs its record."""

    is_essential = True

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path)

    def log(self, payload: Mapping[str, Any]) -> None:
        """Append one payload.

        Raises:
            OSError: it could not be written completely.
        """
        self._file.append(encode_payload(payload))

    def event(self, event: Mapping[str, Any]) -> None:
        """Append a restart event; other events go to events.jsonl."""
        if event.get("event") == RESTART:
            self._file.append(encode_payload(event))

    def close(self) -> None:
        """Close the file."""
        self._file.close()
