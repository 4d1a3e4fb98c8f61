"""The sinks that a config asks for (rank 0)."""

from __future__ import annotations

import sys
from typing import Any

from trainer.config.schema import RunConfig
from trainer.metrics.best_effort import EventCallback
from trainer.metrics.sinks.base import Sink
from trainer.metrics.sinks.jsonl import JsonlSink
from trainer.metrics.sinks.stdout import StdoutSink, resolve_stdout_mode
from trainer.metrics.sinks.tensorboard import TensorboardSink
from trainer.metrics.sinks.wandb import WandbSink
from trainer.training.run_dir import RunDir


def make_sinks(config: RunConfig, run_dir: RunDir, *, wandb_run_id: str | None, on_event: EventCallback) -> list[Sink]:
    """The record first: if it cannot be written, nothing else should say that a step was."""
    mode = resolve_stdout_mode(config.metrics.stdout)
    sinks: list[Sink] = [JsonlSink(run_dir.metrics), StdoutSink(mode)]
    if mode == "json" and sys.stderr.isatty():
        # Somebody watches, and the payload goes to a program: the line for people stands beside the bar.
        sinks.append(StdoutSink("line", stream=sys.stderr))
    table = config.metrics.wandb
    if table.mode != "disabled":
        resolved: dict[str, Any] = config.model_dump(mode="json")
        sinks.append(
            WandbSink(
                mode=table.mode,
                project=table.project,
                entity=table.entity,
                base_url=table.base_url,
                run_dir=run_dir.path,
                name=run_dir.path.name,
                run_id=wandb_run_id,
                config=resolved,
                on_event=on_event,
            )
        )
    if config.metrics.tensorboard:
        sinks.append(TensorboardSink(run_dir.path / "tensorboard", on_event=on_event))
    return sinks


def wandb_id(sinks: list[Sink]) -> str | None:
    """The id of the wandb run among the sinks, to be kept in checkpoints."""
    return next((sink.run_id for sink in sinks if isinstance(sink, WandbSink)), None)
