"""Verbs on the files of runs: `train config`, `train checkpoint` and `train payload`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument

from trainer.cli.terminal import echo
from trainer.errors import UserError, raise_found
from trainer.files import read_lines
from trainer.tools.verbs.shared import RunDirArgument, writing
from trainer.wording import counted

EXIT_DIFFERENT, EXIT_INVALID = 1, 1

config = typer.Typer(help="The config's schema, its keys, and the differences of two configs.", no_args_is_help=True)
checkpoint = typer.Typer(help="Checkpoints of a run.", no_args_is_help=True)
payload = typer.Typer(help="Metrics payloads, as another program reads them.", no_args_is_help=True)


@config.command()
def schema() -> None:
    """Print the JSON Schema of a config; editors complete and check a TOML that starts with `#:schema FILE`."""
    from trainer.tools.reference_docs import render_config_schema

    echo(render_config_schema(), nl=False)


@config.command()
def docs() -> None:
    """Print every table and key with its type, default and meaning, as Markdown."""
    from trainer.tools.reference_docs import render_config_markdown

    echo(render_config_markdown(), nl=False)


@config.command()
def diff(
    first: Annotated[str, Argument(help="A config, or a run directory.", metavar="A")],
    second: Annotated[str, Argument(help="The other one.", metavar="B")],
) -> None:
    """Print the keys whose values differ, defaults filled in; exit with 1 if there are any."""
    from trainer.config.load import flatten, load_config

    tables = []
    for file in map(Path, (first, second)):
        if file.is_dir():
            file /= "config.resolved.toml"
        tables.append(flatten(load_config(file).model_dump(mode="json", exclude_none=True)))
    one, other = tables
    found = [key for key in sorted(one.keys() | other.keys()) if one.get(key) != other.get(key)]
    if not found:
        echo(f"{first} and {second} do not differ", err=True)
        return
    echo(f"--- {first}\n+++ {second}")
    for key, (sign, values) in product(found, (("-", one), ("+", other))):
        if key in values:  # JSON's spelling of a value is TOML's as well
            echo(f"{sign}{key} = {json.dumps(values[key], ensure_ascii=False)}")
    raise typer.Exit(EXIT_DIFFERENT)


@payload.command()
def validate(
    file: Annotated[str, Argument(help="A metrics.jsonl or captured stdout; - for stdin.")],
) -> None:
    """Check that every line is a payload of a supported schema version; exit with 1 at a violation."""
    from trainer.metrics.payload_contract import validate_stream

    for violation in validate_stream(_lines(file)):
        echo(f"{file}:{violation.line}: {violation.key}: {violation.reason}", err=True)
        raise typer.Exit(EXIT_INVALID)
    echo(f"{file}: every line is a valid payload", err=True)


def _lines(file: str) -> Iterator[bytes]:
    if file == "-":
        yield from sys.stdin.buffer
        return
    with writing(file):
        yield from read_lines(Path(file))


@checkpoint.command()
def verify(run_dir: RunDirArgument) -> None:
    """Compare every file of every checkpoint with its hash, newest first; exit with 2 if any differs."""
    from trainer.training import checkpoint as checkpoints
    from trainer.training.tensor_files import CheckpointError

    found = [path for path in (Path(run_dir) / "checkpoints").glob("step_*") if checkpoints.step_of(path) >= 0]
    if not found:
        raise UserError(run_dir, "has no checkpoint", "name a run (runs/NAME-TIME) that saved one")
    problems = []
    for path in sorted(found, key=checkpoints.step_of, reverse=True):
        try:
            ranks = counted(int(checkpoints.verify(path)["world_size"]), "rank")
        except CheckpointError as error:
            problems.append(UserError("checkpoint", str(error), "resume from an older one, as --resume auto does"))
            continue
        size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        echo(f"{path}: {size / 1e6:,.1f} MB, {ranks}: verified")
    raise_found(problems)
