"""Verbs on the files of runs: `train config` and `train payload`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument

from trainer.cli.terminal import echo
from trainer.files import read_lines
from trainer.tools.verbs.shared import writing

EXIT_INVALID = 1

config = typer.Typer(help="The config's schema, and its keys.", no_args_is_help=True)
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
