"""`train checkpoint list` and `train checkpoint verify`: what a run can go on from, and whether all of it is whole."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trainer.errors import UserError, UserErrors
from trainer.training.checkpointing.checkpoint import LATEST, MARKER, CheckpointError, read_state, step_of, verify

WIDTH = 110  # where stdout is no terminal


@dataclass(frozen=True)
class Found:
    """One checkpoint of a run."""

    step: int
    path: str
    saved: str
    """Local time, ISO 8601; of its directory if it has no marker."""
    num_bytes: int
    world_size: int | None
    """None if it cannot be told."""
    is_latest: bool
    problem: str | None
    """What is wrong with it; None: it has its marker (list), or all its files are as the marker says (verify)."""


def list_checkpoints(run_dir: str, *, as_json: bool) -> None:
    """Print the checkpoints of a run, newest first, without reading their tensors.

    Raises:
        UserError: there is no such run.
    """
    _print(run_dir, [_look(path, is_deep=False) for path in _paths(run_dir)], as_json=as_json)


def verify_checkpoints(run_dir: str, *, as_json: bool) -> None:
    """Read every file of every checkpoint and compare it with its hash; print what was found.

    Raises:
        UserErrors: one for each checkpoint that is not whole.
        UserError: there is no such run, or it has no checkpoint.
    """
    paths = _paths(run_dir)
    if not paths:
        raise UserError(run_dir, "has no checkpoint", "set checkpoint.every, or let the run end")
    found = [_look(path, is_deep=True) for path in paths]
    _print(run_dir, found, as_json=as_json)
    fix = "resume from an older one: --resume auto does so by itself"
    damaged = [UserError("checkpoint", each.problem, fix) for each in found if each.problem is not None]
    if damaged:
        raise UserErrors(damaged)


def _paths(run_dir: str) -> list[Path]:
    """The run's checkpoints, whole or not, newest first."""
    directory = Path(run_dir) / "checkpoints"
    if not directory.is_dir():
        fix = "name the directory of a run (runs/NAME-TIME)"
        raise UserError(run_dir, "has no directory checkpoints", fix)
    return sorted((path for path in directory.glob("step_*") if step_of(path) >= 0), key=step_of, reverse=True)


def _look(path: Path, *, is_deep: bool) -> Found:
    problem, world_size = None, None
    try:
        state = verify(path) if is_deep else read_state(path)
        world_size = int(state["world_size"])
    except (CheckpointError, KeyError, TypeError) as error:
        problem = str(error) if isinstance(error, CheckpointError) else f"{path}: its state.json is damaged"
    marker = path / MARKER
    saved = (marker if marker.exists() else path).stat().st_mtime
    latest = path.parent / LATEST
    return Found(
        step=step_of(path),
        path=str(path),
        saved=datetime.fromtimestamp(saved).astimezone().isoformat(timespec="seconds"),
        num_bytes=sum(file.stat().st_size for file in path.iterdir() if file.is_file()),
        world_size=world_size,
        is_latest=latest.is_symlink() and latest.readlink().name == path.name,
        problem=problem,
    )


def _print(run_dir: str, found: list[Found], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"run_dir": run_dir, "checkpoints": [asdict(each) for each in found]}, indent=2))
        return
    table = Table(title=escape(f"checkpoints of {run_dir}"), title_justify="left")
    for name in ("step", "saved", "MB", "ranks"):
        table.add_column(name, justify="right")
    table.add_column("state")
    for each in found:
        state = "whole" if each.problem is None else each.problem.removeprefix(f"{each.path}: ")
        table.add_row(
            f"{each.step:,}",
            each.saved,
            f"{each.num_bytes / 1e6:,.1f}",
            "?" if each.world_size is None else str(each.world_size),
            escape(state + (", latest" if each.is_latest else "")),
        )
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)
