"""`train config`: the schema that editors use, the list of all keys, and the differences of two configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from trainer.cli.options import JsonOption
from trainer.cli.terminal import echo, put_text

EXIT_DIFFERENT = 1
OutOption = Annotated[str | None, typer.Option(help="File to write; default: stdout.", metavar="FILE")]

app = typer.Typer(help="The config's schema, its keys, and the differences of two configs.", no_args_is_help=True)


@app.command()
def schema(out: OutOption = None) -> None:
    """Print the JSON Schema of a config; editors complete and check a TOML that starts with `#:schema FILE`."""
    from trainer.tools.config_docs import render_config_schema

    put_text(render_config_schema(), out)


@app.command()
def docs(out: OutOption = None) -> None:
    """Print every table and key with its type, default and meaning, as Markdown."""
    from trainer.tools.config_docs import render_config_markdown

    put_text(render_config_markdown(), out)


@app.command()
def diff(
    first: Annotated[str, typer.Argument(help="A config, or a run directory.", metavar="A")],
    second: Annotated[str, typer.Argument(help="The other one.", metavar="B")],
    as_json: JsonOption = False,
) -> None:
    """Print the keys whose values differ, defaults filled in; exit with 1 if there are any."""
    from trainer.config.load import differences, load_config, render_differences

    found = differences(load_config(_config_of(first)), load_config(_config_of(second)))
    if as_json:
        echo(json.dumps({d.key: {"a": d.first, "b": d.second} for d in found}, indent=2))
    elif found:
        echo(render_differences(found, first, second))
    else:
        echo(f"{first} and {second} do not differ", err=True)
    if found:
        raise typer.Exit(EXIT_DIFFERENT)


def _config_of(given: str) -> str:
    """The file itself, or the resolved config of a run directory."""
    resolved = Path(given) / "config.resolved.toml"
    return str(resolved) if Path(given).is_dir() else given
