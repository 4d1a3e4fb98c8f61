"""Options and arguments that several verbs share."""

from __future__ import annotations

from typing import Annotated

import typer

from trainer.errors import UserError

ConfigOption = Annotated[str | None, typer.Option("--config", "-c", help="TOML config of the run.", metavar="X.TOML")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a config value; repeatable.", metavar="TABLE.KEY=VALUE"),
]
StrategyOption = Annotated[
    str | None,
    typer.Option(help="How ranks share the model (distributed.strategy).", metavar="ddp|fsdp|hsdp"),
]
ReplicasOption = Annotated[int | None, typer.Option(min=1, help="Replicas of hsdp (distributed.replicas).")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RunArgument = Annotated[str, typer.Argument(help="A run directory, or a metrics.jsonl.", metavar="RUN_DIR")]
FormatOption = Annotated[
    str, typer.Option(help="auto (by file extension), a format's name, or package.module:function.", metavar="NAME")
]
EodOption = Annotated[int | None, typer.Option(help="Id that ends a document in .npy and headerless .bin files.")]


def require_config(config: str | None, command: str) -> str:
    """The path that was given.

    Raises:
        UserError: none was.
    """
    if config is None:
        raise UserError("--config", "is required", f"{command} --config train_configs/smoke.toml")
    return config
