"""Verbs on the files of runs: `train config`, `train checkpoint` and `train payload`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table
from typer import Argument, Option

from trainer.cli.terminal import echo
from trainer.errors import UserError, UserErrors
from trainer.files import read_lines
from trainer.tools.verbs.shared import JsonOption, RunDirArgument, output, print_json, put_text, writing

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


@dataclass(frozen=True)
class CheckpointEntry:
    step: int
    path: str
    num_bytes: int
    world_size: int | None  # None if unknown
    # What is wrong; None: it has its marker (list), or all its files match the marker (verify).
    problem: str | None


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
    problems = [entry.problem for entry in entries if entry.problem is not None]
    if problems:
        raise UserErrors([UserError("checkpoint", problem, fix) for problem in problems])


def _entries(run_dir: str, *, is_deep: bool) -> list[CheckpointEntry]:
    """The run's checkpoints, complete or not, newest first."""
    from trainer.training.checkpointing.checkpoint import step_of

    found = [path for path in (Path(run_dir) / "checkpoints").glob("step_*") if step_of(path) >= 0]
    if not found:
        raise UserError(run_dir, "has no checkpoint", "name a run (runs/NAME-TIME) that saved one")
    return [_entry_of(path, is_deep=is_deep) for path in sorted(found, key=step_of, reverse=True)]


def _entry_of(path: Path, *, is_deep: bool) -> CheckpointEntry:
    from trainer.training.checkpointing.checkpoint import read_state, step_of, verify
    from trainer.training.checkpointing.tensor_files import CheckpointError

    problem, world_size = None, None
    try:
        world_size = int((verify if is_deep else read_state)(path)["world_size"])
    except CheckpointError as error:
        problem = str(error)
    num_bytes = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    return CheckpointEntry(step_of(path), str(path), num_bytes, world_size, problem)


def _print(run_dir: str, entries: list[CheckpointEntry], good: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"run_dir": run_dir, "checkpoints": [asdict(entry) for entry in entries]})
        return
    table = Table(title=escape(f"checkpoints of {run_dir}"), title_justify="left")
    for name in ("step", "MB", "ranks"):
        table.add_column(name, justify="right")
    table.add_column("state")
    for entry in entries:
        state = good
        if entry.problem is not None:
            state = entry.problem.removeprefix(f"{entry.path}: ")
        size = f"{entry.num_bytes / 1e6:,.1f}"
        table.add_row(f"{entry.step:,}", size, str(entry.world_size or "?"), escape(state))
    output().print(table)
