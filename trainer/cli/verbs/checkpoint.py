"""`train checkpoint list` and `verify`: the checkpoints a run can resume from, and whether they are complete."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from trainer.cli.options import JsonOption
from trainer.cli.terminal import output
from trainer.errors import UserError, UserErrors

RunDirArgument = Annotated[str, typer.Argument(help="A run directory.", metavar="RUN_DIR")]

app = typer.Typer(help="Checkpoints of a run.", no_args_is_help=True)


@dataclass(frozen=True)
class CheckpointEntry:
    """One checkpoint of a run."""

    step: int
    path: str
    saved: str
    """Local time, ISO 8601; that of the directory if there is no marker."""
    num_bytes: int
    world_size: int | None
    """None if unknown."""
    is_latest: bool
    problem: str | None
    """What is wrong; None: it has its marker (list), or all its files match the marker (verify)."""


@app.command("list")
def list_(run_dir: RunDirArgument, as_json: JsonOption = False) -> None:
    """List the checkpoints a run can resume from, newest first, without reading their tensors."""
    _print(run_dir, [_entry_of(path, is_deep=False) for path in _paths(run_dir)], as_json=as_json)


@app.command()
def verify(run_dir: RunDirArgument, as_json: JsonOption = False) -> None:
    """Compare every file of every checkpoint with its hash; exit with 2 if any differs."""
    paths = _paths(run_dir)
    if not paths:
        raise UserError(run_dir, "has no checkpoint", "set checkpoint.every, or let the run finish")
    entries = [_entry_of(path, is_deep=True) for path in paths]
    _print(run_dir, entries, as_json=as_json)
    fix = "resume from an older one: --resume auto does so by itself"
    damaged = [UserError("checkpoint", entry.problem, fix) for entry in entries if entry.problem is not None]
    if damaged:
        raise UserErrors(damaged)


def _paths(run_dir: str) -> list[Path]:
    """The run's checkpoints, complete or not, newest first."""
    from trainer.training.checkpointing.checkpoint import step_of

    directory = Path(run_dir) / "checkpoints"
    if not directory.is_dir():
        raise UserError(run_dir, "has no directory checkpoints", "name a run directory (runs/NAME-TIME)")
    return sorted((path for path in directory.glob("step_*") if step_of(path) >= 0), key=step_of, reverse=True)


def _entry_of(path: Path, *, is_deep: bool) -> CheckpointEntry:
    from trainer.training.checkpointing import checkpoint

    problem, world_size = None, None
    try:
        state = checkpoint.verify(path) if is_deep else checkpoint.read_state(path)
        world_size = int(state["world_size"])
    except checkpoint.CheckpointError as error:
        problem = str(error)
    except (KeyError, TypeError):
        problem = f"{path}: its state.json is damaged"
    marker = path / checkpoint.MARKER
    saved = (marker if marker.exists() else path).stat().st_mtime
    latest = path.parent / checkpoint.LATEST
    return CheckpointEntry(
        step=checkpoint.step_of(path),
        path=str(path),
        saved=datetime.fromtimestamp(saved).astimezone().isoformat(timespec="seconds"),
        num_bytes=sum(file.stat().st_size for file in path.iterdir() if file.is_file()),
        world_size=world_size,
        is_latest=latest.is_symlink() and latest.readlink().name == path.name,
        problem=problem,
    )


def _print(run_dir: str, entries: list[CheckpointEntry], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"run_dir": run_dir, "checkpoints": [asdict(entry) for entry in entries]}, indent=2))
        return
    table = Table(title=escape(f"checkpoints of {run_dir}"), title_justify="left")
    for name in ("step", "saved", "MB", "ranks"):
        table.add_column(name, justify="right")
    table.add_column("state")
    for entry in entries:
        state = "complete" if entry.problem is None else entry.problem.removeprefix(f"{entry.path}: ")
        table.add_row(
            f"{entry.step:,}",
            entry.saved,
            f"{entry.num_bytes / 1e6:,.1f}",
            "?" if entry.world_size is None else str(entry.world_size),
            escape(state + (", latest" if entry.is_latest else "")),
        )
    output().print(table)
