"""What every sink offers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Sink(Protocol):
    """Takes payloads, one a call, in the order of the steps.

    What `log` raises stops the run. A sink that is not essential therefore guards itself with `BestEffort`.
    """

    def log(self, payload: Mapping[str, Any]) -> None:
        """Take one payload (see `payload_contract`)."""

    def event(self, event: Mapping[str, Any]) -> None:
        """Take one event of the stream, such as a restart; a sink without use for it ignores it."""

    def close(self) -> None:
        """Write out what is held back; nothing is logged afterwards. A second call does nothing."""
