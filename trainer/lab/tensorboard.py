"""Metrics in TensorBoard's event files (`metrics.tensorboard`, extra `tensorboard`).

It can go when nobody reads event files any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.metrics.payload_contract import RESTART, all_values
from trainer.metrics.sinks import SAMPLE, display_key


def _verbatim(text: str) -> str:
    """Indented, since TensorBoard would render it as Markdown otherwise."""
    return "".join(f"    {line}\n" for line in text.splitlines() or [""])


class TensorboardSink:
    """Writes each metric as a scalar, and `config`, settings by dotted key, as hyperparameters."""

    def __init__(self, log_dir: Path, config: Mapping[str, Any] | None = None) -> None:
        self._log_dir, self._config = log_dir, config or {}
        self._writer: Any = None
        self._purge_step: int | None = None

    def _opened(self) -> Any:
        if self._writer is None:
            # Imported here: tensorboard is an extra, and its import takes seconds.
            from torch.utils.tensorboard import SummaryWriter, summary

            self._writer = SummaryWriter(str(self._log_dir), purge_step=self._purge_step, flush_secs=30)
            if self._config:
                self._show(self._config, summary.hparams)
        return self._writer

    def _show(self, config: Mapping[str, Any], hparams: Any) -> None:
        self._writer.add_text("config", _verbatim("\n".join(f"{key} = {each!r}" for key, each in config.items())))
        texts = {key: str(each) for key, each in config.items() if not isinstance(each, int | float)}
        # The writer's `add_hparams` would make a separate run, which the third part ends.
        for part in hparams({**config, **texts}, {"train/loss": 0.0, "eval/loss": 0.0})[:2]:
            self._writer.file_writer.add_summary(part)

    def log(self, payload: Mapping[str, Any]) -> None:
        """Write one payload."""
        for key, value in all_values(payload).items():
            self._opened().add_scalar(display_key(key), value, payload["global_step"])

    def event(self, event: Mapping[str, Any]) -> None:
        """After a restart, hide earlier rows of the repeated steps; show a sample as text."""
        if event.get("event") == RESTART:  # before any row
            self._purge_step = event["global_step"] + 1
        elif event.get("event") == SAMPLE:
            text = _verbatim(f"{event['prompt']}{event['text']}")
            self._opened().add_text("sample/text", text, event["global_step"])

    def close(self) -> None:
        """Flush and close the files."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
