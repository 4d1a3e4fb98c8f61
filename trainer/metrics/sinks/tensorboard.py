"""TensorBoard event files (extra `tensorboard`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.metrics.best_effort import BestEffort, EventCallback
from trainer.metrics.payload_contract import RESTART, all_values
from trainer.metrics.sinks.base import display_key
from trainer.metrics.sinks.jsonl import SAMPLE


class TensorboardSink:
    """Writes each metric as a scalar at its step; a failure disables the sink with one warning, never the run."""

    def __init__(self, log_dir: Path, *, on_event: EventCallback | None = None) -> None:
        self._log_dir = log_dir
        self._guard = BestEffort("tensorboard", on_event=on_event)
        self._writer: Any = None
        self._guard.run(self._open, None)

    def _open(self, purge_step: int | None) -> None:
        # Imported here: tensorboard is an extra, and its import takes seconds.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._log_dir), purge_step=purge_step, flush_secs=30)

    def log(self, payload: Mapping[str, Any]) -> None:
        """Write one payload."""
        self._guard.run(self._log, payload)

    def _log(self, payload: Mapping[str, Any]) -> None:
        step = payload["global_step"]
        for key, value in all_values(payload).items():
            self._writer.add_scalar(display_key(key), value, step)

    def event(self, event: Mapping[str, Any]) -> None:
        """After a restart, hide earlier rows of the repeated steps; show a sample as text."""
        if event.get("event") == RESTART:
            self._guard.run(self._purge, event["global_step"] + 1)
        elif event.get("event") == SAMPLE:
            self._guard.run(self._sample, event)

    def _sample(self, event: Mapping[str, Any]) -> None:
        # Indented text is shown verbatim; anything else would be rendered as Markdown.
        shown = "".join(f"    {line}\n" for line in f"{event['prompt']}{event['text']}".splitlines() or [""])
        self._writer.add_text("sample/text", shown, event["global_step"])

    def _purge(self, first_step: int) -> None:
        self._writer.close()
        self._open(first_step)

    def close(self) -> None:
        """Flush and close the files."""
        if self._writer is not None:
            self._guard.run(self._writer.close)
