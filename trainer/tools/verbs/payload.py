"""`train payload validate`: an independent consumer of the metrics stream."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from trainer.cli.terminal import echo
from trainer.errors import UserError

EXIT_INVALID = 1

app = typer.Typer(help="Metrics payloads, as another program reads them.", no_args_is_help=True)


@app.command()
def validate(
    file: Annotated[str, typer.Argument(help="A metrics.jsonl or captured stdout; - for stdin.")],
    count_all: Annotated[bool, typer.Option("--all", help="Report and count all violations.")] = False,
) -> None:
    """Check that every line is a payload of a supported schema version; exit with 1 at a violation."""
    from trainer.metrics.payload_contract import validate_stream

    violations = 0
    for violation in validate_stream(_lines(file)):
        echo(f"{file}:{violation.line}: {violation.key}: {violation.reason}", err=True)
        violations += 1
        if not count_all:
            break
    if violations:
        if count_all:
            echo(f"{violations} violations", err=True)
        raise typer.Exit(EXIT_INVALID)
    echo(f"{file}: every line is a valid payload", err=True)


def _lines(file: str) -> Iterator[bytes]:
    if file == "-":
        yield from sys.stdin.buffer
        return
    try:
        with Path(file).open("rb") as opened:
            yield from opened
    except OSError as error:
        raise UserError(file, f"cannot be read: {error.strerror}", "check the path") from None
