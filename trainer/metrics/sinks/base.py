"""The interface of all sinks, and the names of metrics in backends that group by prefix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from trainer.metrics.catalog.lookup import EVAL_PREFIX


class Sink(Protocol):
    """Receives payloads, one per call, in step order.

    An exception costs that sink alone, with one warning. Of a sink with the attribute `is_essential = True` it ends the run.
    """

    def log(self, payload: Mapping[str, Any]) -> None:
        """Write one payload (see `payload_contract`)."""

    def event(self, event: Mapping[str, Any]) -> None:
        """Write one event, such as a restart; sinks ignore events that they do not support."""

    def close(self) -> None:
        """Flush and close; nothing is logged afterwards. A second call does nothing."""


def display_key(key: str) -> str:
    """`loss` -> `train/loss`, `eval_loss` -> `eval/loss`, `eval_x/y` -> `eval/x/y`, and `x/y` unchanged."""
    if key.startswith(EVAL_PREFIX):
        return f"eval/{key.removeprefix(EVAL_PREFIX)}"
    return key if "/" in key else f"train/{key}"
