"""Options and arguments that several verbs share, and how they import torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from trainer.errors import UserError
from trainer.files import did_you_mean

ConfigOption = Annotated[str | None, typer.Option("--config", "-c", help="TOML config of the run.", metavar="X.TOML")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Override a config value; repeatable.", metavar="TABLE.KEY=VALUE")
]
StrategyOption = Annotated[
    str | None, typer.Option(help="How ranks share the model (distributed.strategy).", metavar="ddp|fsdp|hsdp")
]
ReplicasOption = Annotated[int | None, typer.Option(min=1, help="Replicas of hsdp (distributed.replicas).")]
TextOption = Annotated[bool, typer.Option("--text", help="The text of the rows too.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust-code", help="Import the code that the run's config names: your own, or of somebody you trust."
    ),
]
RunArgument = Annotated[str, typer.Argument(help="A run directory, or a metrics.jsonl.", metavar="RUN_DIR")]
RunsArgument = Annotated[
    list[str], typer.Argument(help="Run directories, or metrics.jsonl files.", metavar="RUN_DIR...")
]
StepOption = Annotated[int | None, typer.Option(help="Step of the checkpoint; default: the latest.")]
DeviceOption = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where the model is.")]
TokenizerOption = Annotated[
    str | None, typer.Option("--tokenizer", help="Path of the tokenizer.json if it moved.", metavar="PATH")
]
FormatOption = Annotated[
    str, typer.Option(help="auto (by file extension), a format's name, or package.module:function.", metavar="NAME")
]
ColumnOption = Annotated[
    str | None, typer.Option(help="As data.source.column, of .jsonl and .parquet.", metavar="NAME")
]
EodOption = Annotated[int | None, typer.Option(help="Id that ends a document in .npy and headerless .bin files.")]


@contextmanager
def uncollected() -> Iterator[None]:
    """Import without garbage collections, and leave what was imported out of all that follow: it stays anyway.

    Some 20 % of the time that importing torch takes, and most of that of each later collection.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def require_run(run_dir: str) -> Path:
    """The directory that was given, looked at before torch, whose import takes seconds. Raises UserError if there is none."""
    if not Path(run_dir).is_dir():
        fix = did_you_mean(run_dir) or "name the directory of a run that has saved a checkpoint (runs/<name>-<time>)"
        raise UserError(run_dir, "is not a directory", fix)
    return Path(run_dir)


def require_config(config: str | None, command: str) -> str:
    """The path that was given. Raises UserError if none was."""
    if config is None:
        raise UserError("--config", "is required", f"{command} --config train_configs/smoke.toml")
    return config
