"""The sinks that a config asks for (rank 0)."""

from __future__ import annotations

import sys
from typing import Any

from trainer.config.schema import RunConfig, WandbTable
from trainer.metrics.best_effort import Diagnostics, EventCallback
from trainer.metrics.logger import get_logger
from trainer.metrics.services import CLOSE_SEC, TensorboardSink, WandbMode, WandbSink, resolve_mode
from trainer.metrics.sinks import BackgroundSink, JsonlSink, Output, Sink, StdoutSink, resolve_stdout_mode
from trainer.training.run_dir import RunDir

logger = get_logger(__name__)


def make_sinks(
    config: RunConfig,
    run_dir: RunDir,
    *,
    stdout: Output,
    wandb_run_id: str | None,
    diagnostics: Diagnostics,
    on_event: EventCallback,
) -> list[Sink]:
    """The record first: if it cannot be written, nothing else should say that a step was.

    Every sink but the record has a queue and a thread, except those that write to a terminal, beside the progress bar.
    """

    def in_background(sink: Sink, name: str, close_sec: float = 5.0) -> Sink:
        return BackgroundSink(sink, name=name, guard=diagnostics.best_effort(name), close_sec=close_sec)

    mode = resolve_stdout_mode(config.metrics.stdout, stdout)
    sinks: list[Sink] = [JsonlSink(run_dir.metrics)]
    if mode != "off":
        to_stdout = StdoutSink(mode, stream=stdout)
        sinks.append(to_stdout if stdout.isatty() else in_background(to_stdout, "stdout"))
    if mode == "json" and sys.stderr.isatty():
        # Somebody watches, and the payload goes to a program: the line for people stands beside the bar.
        sinks.append(StdoutSink("line", stream=sys.stderr))
    table = config.metrics.wandb
    if (wandb_mode := _wandb_mode(table)) != "disabled":
        resolved: dict[str, Any] = config.model_dump(mode="json")
        wandb = WandbSink(
            mode=wandb_mode,
            project=table.project,
            entity=table.entity,
            base_url=table.base_url,
            run_dir=run_dir.path,
            run_id=wandb_run_id,
            config=resolved,
            on_event=on_event,
        )
        sinks.append(in_background(wandb, "wandb", CLOSE_SEC))
    if config.metrics.tensorboard:
        sinks.append(in_background(TensorboardSink(run_dir.path / "tensorboard"), "tensorboard"))
    return sinks


def _wandb_mode(table: WandbTable) -> WandbMode:
    """The mode, `auto` resolved and its reason said in one line."""
    if table.mode != "auto":
        return table.mode
    mode, why = resolve_mode(table.base_url)
    logger.info("wandb: %s, since %s", mode, why)
    return mode


def wandb_id(sinks: list[Sink]) -> str | None:
    """The id of the wandb run among the sinks, to be kept in checkpoints."""
    within = [sink.sink for sink in sinks if isinstance(sink, BackgroundSink)]
    return next((sink.run_id for sink in within if isinstance(sink, WandbSink)), None)
