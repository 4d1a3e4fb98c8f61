"""`train payload validate`: an independent consumer of what the trainer writes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import typer

from trainer.errors import UserError
from trainer.metrics.payload_contract import validate_stream

EXIT_INVALID = 1


def validate_file(file: str, *, count_all: bool) -> None:
    """Read payload lines, say where the first is wrong (or how many are), and exit with 1 if any is.

    Raises:
        UserError: the file cannot be read.
    """
    violations = 0
    for violation in validate_stream(_lines(file)):
        typer.echo(f"{file}:{violation.line}: {violation.key}: {violation.reason}", err=True)
        violations += 1
        if not count_all:
            break
    if violations:
        if count_all:
            typer.echo(f"{violations} violations", err=True)
        raise typer.Exit(EXIT_INVALID)
    typer.echo(f"{file}: every line is a valid payload", err=True)


def _lines(file: str) -> Iterator[bytes]:
    if file == "-":
        yield from sys.stdin.buffer
        return
    try:
        with Path(file).open("rb") as opened:
            yield from opened
    except OSError as error:
        raise UserError(file, f"cannot be read: {error.strerror}", "check the path") from None
