"""`train checkpoint list`, `verify` and `push`: the checkpoints a run can resume from, whether they are complete, and where."""

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
from trainer.cli.terminal import echo, output
from trainer.errors import UserError, UserErrors

PlaceArgument = Annotated[
    str, typer.Argument(help="A run directory, or the URL of a store (checkpoint.remote).", metavar="RUN_DIR|URL")
]
RunDirArgument = Annotated[str, typer.Argument(help="A run directory.", metavar="RUN_DIR")]

app = typer.Typer(help="Checkpoints of a run.", no_args_is_help=True)


@dataclass(frozen=True)
class CheckpointEntry:
    """One checkpoint of a run."""

    step: int
    path: str
    saved: str
    """Local time, ISO 8601; that of the directory if there is no marker. `?` in a store."""
    num_bytes: int
    world_size: int | None
    """None if unknown."""
    is_latest: bool
    problem: str | None
    """What is wrong; None: it has its marker (list), or all its files match the marker (verify)."""


@app.command("list")
def list_(run_dir: PlaceArgument, as_json: JsonOption = False) -> None:
    """List the checkpoints a run can resume from, newest first, without reading their tensors."""
    _print(run_dir, _entries(run_dir, is_deep=False), as_json=as_json)


@app.command()
def verify(run_dir: PlaceArgument, as_json: JsonOption = False) -> None:
    """Compare every file of every checkpoint with its hash; exit with 2 if any differs."""
    entries = _entries(run_dir, is_deep=True)
    if not entries:
        raise UserError(run_dir, "has no checkpoint", "set checkpoint.every, or let the run finish")
    _print(run_dir, entries, as_json=as_json, is_deep=True)
    fix = "resume from an older one: --resume auto does so by itself"
    damaged = [UserError("checkpoint", entry.problem, fix) for entry in entries if entry.problem is not None]
    if damaged:
        raise UserErrors(damaged)


@app.command()
def push(
    run_dir: RunDirArgument,
    to: Annotated[
        str | None, typer.Option(help="Where to; default: checkpoint.remote of the run.", metavar="URL")
    ] = None,
) -> None:
    """Upload the checkpoints of a run that has ended, where its store lacks them; exit with 1 if that fails."""
    from trainer.config.load import load_config
    from trainer.extensions.mirror.checkpoints import RemoteCheckpoints
    from trainer.extensions.mirror.claim import Claimed, claim
    from trainer.extensions.mirror.mirror import start_mirror
    from trainer.metrics.best_effort import Diagnostics
    from trainer.storage import StorageError
    from trainer.training.run_dir import RunDir

    run = RunDir(Path(run_dir))
    if not _paths(run_dir):
        raise UserError(run_dir, "has no checkpoint", "set checkpoint.every, or let the run finish")
    config = load_config(run.resolved_config)
    url = to or config.checkpoint.remote
    if url is None:
        raise UserError(run_dir, "the run was not given a store", "name one with --to")
    with run.lock():
        remote = RemoteCheckpoints(url, key="--to" if to else "checkpoint.remote")
        try:
            owner = claim(remote, run.path, config.run.name, resumes=True, may_adopt=False)
        except StorageError as error:
            raise UserError(
                url, f"cannot be used: {error}", "check the URL, the endpoint and the credentials"
            ) from None
        mirror = start_mirror(Claimed(remote, owner, lambda: owner), run, config.checkpoint, -1, Diagnostics())
        if not mirror.wait():
            raise typer.Exit(1)


def _entries(place: str, *, is_deep: bool) -> list[CheckpointEntry]:
    """Of a run directory or a store, newest first."""
    from trainer.storage import is_url

    if is_url(place):
        return _stored_entries(place, is_deep=is_deep)
    return [_entry_of(path, is_deep=is_deep) for path in _paths(place)]


def _stored_entries(url: str, *, is_deep: bool) -> list[CheckpointEntry]:
    from trainer.extensions.mirror.checkpoints import RemoteCheckpoints
    from trainer.storage import StorageError
    from trainer.training.checkpointing.checkpoint import MARKER, STATE_FILE, CheckpointError, checkpoint_name
    from trainer.untrusted import parse_json

    remote, entries = RemoteCheckpoints(url, key="URL"), []
    try:
        steps = sorted(remote.files().items(), reverse=True)
        newest = next((step for step, files in steps if MARKER in files), None)
        for step, files in steps:
            path = f"{remote.url}/{checkpoint_name(step)}"
            problem, world_size = None if MARKER in files else f"{path}: is not complete (no {MARKER})", None
            try:
                world_size = int(parse_json(remote.storage.read(f"{checkpoint_name(step)}/{STATE_FILE}"))["world_size"])
                if is_deep and problem is None:
                    remote.verify(step)
            except CheckpointError as error:
                problem = str(error)
            except (StorageError, ValueError, KeyError, TypeError):
                problem = problem or f"{path}: its {STATE_FILE} is missing or damaged"
            num_bytes = sum(file.size for file in files.values())
            entries.append(CheckpointEntry(step, path, "?", num_bytes, world_size, step == newest, problem))
    except StorageError as error:
        raise UserError(url, f"cannot be read: {error}", "check the URL, the endpoint and the credentials") from None
    if not entries:
        raise UserError(url, "has no checkpoint", "name what checkpoint.remote names, without the step")
    return entries


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


def _print(run_dir: str, entries: list[CheckpointEntry], *, as_json: bool, is_deep: bool = False) -> None:
    if as_json:
        echo(json.dumps({"run_dir": run_dir, "checkpoints": [asdict(entry) for entry in entries]}, indent=2))
        return
    table = Table(title=escape(f"checkpoints of {run_dir}"), title_justify="left")
    for name in ("step", "saved", "MB", "ranks"):
        table.add_column(name, justify="right")
    table.add_column("state")
    for entry in entries:
        state = (
            ("verified" if is_deep else "complete")
            if entry.problem is None
            else entry.problem.removeprefix(f"{entry.path}: ")
        )
        table.add_row(
            f"{entry.step:,}",
            entry.saved,
            f"{entry.num_bytes / 1e6:,.1f}",
            "?" if entry.world_size is None else str(entry.world_size),
            escape(state + (", latest" if entry.is_latest else "")),
        )
    output().print(table)
