"""Verbs on the files of runs: `train config`, `train checkpoint` and `train payload`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer import Argument, Option

from trainer.cli.terminal import echo
from trainer.errors import UserError, raise_found
from trainer.files import read_lines
from trainer.tools.verbs.shared import JsonOption, RunDirArgument, print_json, print_table, put_text, writing

EXIT_DIFFERENT, EXIT_INVALID = 1, 1
OutOption = Annotated[str | None, Option(help="File to write; default: stdout.", metavar="FILE")]

config = typer.Typer(help="The config's schema, its keys, and the differences of two configs.", no_args_is_help=True)
checkpoint = typer.Typer(help="Checkpoints of a run.", no_args_is_help=True)
payload = typer.Typer(help="Metrics payloads, as another program reads them.", no_args_is_help=True)


@config.command()
def schema(out: OutOption = None) -> None:
    """Print the JSON Schema of a config; editors complete and check a TOML that starts with `#:schema FILE`."""
    from trainer.tools.reference_docs import render_config_schema

    put_text(render_config_schema(), out)


@config.command()
def docs(out: OutOption = None) -> None:
    """Print every table and key with its type, default and meaning, as Markdown."""
    from trainer.tools.reference_docs import render_config_markdown

    put_text(render_config_markdown(), out)


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


@checkpoint.command("list")
def list_(run_dir: RunDirArgument, as_json: JsonOption = False) -> None:
    """List the checkpoints a run can resume from, newest first, without reading their tensors."""
    _print(run_dir, _entries(run_dir, is_deep=False), "complete", as_json=as_json)


@checkpoint.command()
def verify(run_dir: RunDirArgument, as_json: JsonOption = False) -> None:
    """Compare every file of every checkpoint with its hash; exit with 2 if any differs."""
    entries = _entries(run_dir, is_deep=True)
    _print(run_dir, entries, "verified", as_json=as_json)
    fix = "resume from an older one: --resume auto does so by itself"
    raise_found([UserError("checkpoint", entry["problem"], fix) for entry in entries if entry["problem"]])


def _entries(run_dir: str, *, is_deep: bool) -> list[dict[str, Any]]:
    """The run's checkpoints, complete or not, newest first. `problem`: with the marker, or if
    `is_deep`, with any file; None: whole."""
    from trainer.training.checkpointing import checkpoint as checkpoints
    from trainer.training.checkpointing.tensor_files import CheckpointError

    step_of, entries = checkpoints.step_of, []
    found = [path for path in (Path(run_dir) / "checkpoints").glob("step_*") if step_of(path) >= 0]
    if not found:
        raise UserError(run_dir, "has no checkpoint", "name a run (runs/NAME-TIME) that saved one")
    read = checkpoints.verify if is_deep else checkpoints.read_state
    for path in sorted(found, key=step_of, reverse=True):
        size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        entry = {"step": step_of(path), "path": str(path), "num_bytes": size, "world_size": None, "problem": None}
        try:
            entry["world_size"] = int(read(path)["world_size"])
        except CheckpointError as error:
            entry["problem"] = str(error)
        entries.append(entry)
    return entries


def _print(run_dir: str, entries: list[dict[str, Any]], good: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"run_dir": run_dir, "checkpoints": entries})
        return
    columns = {
        "step": [f"{entry['step']:,}" for entry in entries],
        "MB": [f"{entry['num_bytes'] / 1e6:,.1f}" for entry in entries],
        "ranks": [str(entry["world_size"] or "?") for entry in entries],
        "state": [escape((entry["problem"] or good).removeprefix(f"{entry['path']}: ")) for entry in entries],
    }
    print_table(columns, right=("step", "MB", "ranks"), title=escape(f"checkpoints of {run_dir}"))
