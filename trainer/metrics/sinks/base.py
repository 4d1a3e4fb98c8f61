"""The interface of all sinks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Sink(Protocol):
    """Receives payloads, one per call, in step order.

    An exception from `log` stops the run, so a non-essential sink guards itself with `BestEffort`.
    """

    def log(self, payload: Mapping[str, Any]) -> None:
        """Write one payload (see `payload_contract`)."""

    def event(self, event: Mapping[str, Any]) -> None:
        """Write one event, such as a restart; sinks ignore events that they do not support."""

    def close(self) -> None:
        """Flush and close; nothing is logged afterwards. A second call does nothing."""
