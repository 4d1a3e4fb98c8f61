"""`train config`: the schema that editors use, the list of all keys, and what two configs do differently."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="The config: its schema, its keys, two of them compared.", no_args_is_help=True)

EXIT_DIFFERENT = 1
OutOption = Annotated[str | None, typer.Option(help="Write it to this file; absent: to stdout.", metavar="FILE")]


@app.command()
def schema(out: OutOption = None) -> None:
    """Print the JSON Schema of a config; editors complete and check a TOML that begins with `#:schema FILE`."""
    from trainer.config.docs import render_config_schema

    put_text(render_config_schema(), out)


@app.command()
def docs(out: OutOption = None) -> None:
    """Print every table and key with its type, default and meaning, as Markdown."""
    from trainer.config.docs import render_config_markdown

    put_text(render_config_markdown(), out)


@app.command()
def diff(
    first: Annotated[str, typer.Argument(help="A config, or a run's directory.", metavar="A")],
    second: Annotated[str, typer.Argument(help="Another one.", metavar="B")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the keys whose values differ, defaults filled in; exit with 1 if there are any, with 0 if there are none."""
    from trainer.config.compare import differences, render_differences
    from trainer.config.load import load_config

    found = differences(load_config(_config_of(first)), load_config(_config_of(second)))
    if as_json:
        import json

        typer.echo(json.dumps({d.key: {"a": d.first, "b": d.second} for d in found}, indent=2))
    elif found:
        typer.echo(render_differences(found, first, second))
    else:
        typer.echo(f"{first} and {second} say the same", err=True)
    if found:
        raise typer.Exit(EXIT_DIFFERENT)


def put_text(text: str, out: str | None) -> None:
    """Write to a file, or to stdout.

    Raises:
        UserError: the file cannot be written.
    """
    if out is None:
        typer.echo(text, nl=False)
        return
    from trainer.errors import UserError

    try:
        Path(out).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(out, f"cannot be written: {error.strerror}", "name a file in a directory that exists") from None
    typer.echo(f"wrote {out}", err=True)


def _config_of(given: str) -> str:
    """The file itself, or the resolved config of a run's directory."""
    resolved = Path(given) / "config.resolved.toml"
    return str(resolved) if Path(given).is_dir() else given
