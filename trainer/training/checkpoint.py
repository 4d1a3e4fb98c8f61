"""Checkpoints on disk, written atomically.

A checkpoint is a directory `checkpoints/step_00000100/`:

    model_000.safetensors   weights and optimizer: of rank 0, or of each rank of the first replica
    rank_000.safetensors    of each data shard: data cursors, counts, which states its ledger holds
    rank_000.rows           of each with a ledger: those states, one after another, as in memory
    state.json              step, averages, states of extensions, config, versions
    COMPLETE                JSON: bytes and SHA-256 of every other file; written last

A checkpoint is written to `.tmp_step_...`, synced to disk, marked, and then renamed: without the
marker it does not exist. Nothing in it is a pickle, so it cannot run code.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from trainer.errors import UserError
from trainer.files import (
    discard,
    open_plain,
    read_json,
    remove_leftovers,
    remove_tree,
    replace_link,
    sync_directory,
    write_json,
)
from trainer.import_path import users_code
from trainer.metrics.logger import get_logger
from trainer.training.tensor_files import CheckpointError, model_file, rank_file

FORMAT_VERSION = 4
MARKER = "COMPLETE"
STATE_FILE = "state.json"
LATEST = "latest"
CHECKPOINTS = "checkpoints"  # in a run's directory

logger = get_logger("checkpoint")


def checkpoint_name(step: int) -> str:
    """Name of the directory of the checkpoint after `step`."""
    return f"step_{step:08d}"


def staging_dir(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint after `step` is written before it is renamed."""
    return checkpoints / f".tmp_{checkpoint_name(step)}"


def finish(checkpoints: Path, step: int, state: dict[str, Any]) -> Path:
    """Turn the files that all ranks have written for `step` into a checkpoint (rank 0).

    An OSError if the disk is full or read-only; no older checkpoint is touched.
    """
    staging, target = staging_dir(checkpoints, step), checkpoints / checkpoint_name(step)
    write_json(staging / STATE_FILE, {"format_version": FORMAT_VERSION, **state})
    files = {path.name: _fingerprint(path) for path in sorted(staging.iterdir())}
    # Last of the files: a directory with the marker has all, wherever the process is killed.
    write_json(staging / MARKER, {"format_version": FORMAT_VERSION, "step": step, "files": files})
    # A name of that step too, so that a kill between the two renames costs no checkpoint.
    former = target.with_name(f"step_0{step:08d}")
    if target.exists():  # the same step again, such as with its evaluation
        discard(former)
        target.rename(former)
    staging.rename(target)
    sync_directory(checkpoints)
    discard(former)
    # Last, so that the link never points to an incomplete checkpoint.
    replace_link(checkpoints / LATEST, target.name)
    return target


def discard_staging(checkpoints: Path) -> None:
    """Remove the files of an interrupted or failed save (rank 0)."""
    for path in checkpoints.glob(".tmp_step_*"):
        discard(path)
    remove_leftovers(checkpoints)  # such as a half-made link


def set_aside_after(checkpoints: Path, step: int, found: Path) -> Path:
    """Move the checkpoints of `step` and later, but `found`, from which the run continues after
    `step`, to `checkpoints/abandoned/` (rank 0); all, if `found` comes back from there. Returns its
    path. Otherwise `auto` would later continue from the abandoned branch.
    """
    found, abandoned = found.resolve(), checkpoints / "abandoned"
    comes_back, meanwhile = found.parent == abandoned.resolve(), checkpoints / f"step_00{step:08d}"
    if comes_back:  # a name of that step here, so that a kill does not leave `auto` without one
        replace_link(meanwhile, f"abandoned/{found.name}")
    for path in _newest_first(checkpoints.glob("step_*")):
        if path.resolve() == found or (step_of(path) < step and not comes_back):
            continue
        abandoned.mkdir(exist_ok=True)
        for link in filter(Path.is_symlink, abandoned.iterdir()):  # to one that came back
            if not link.exists() or link.samefile(path):
                link.unlink()
        target = abandoned / path.name
        while target.exists() or target.is_symlink():  # of a branch that was abandoned before
            target = target.with_name(f"{target.name}_again")
        logger.warning("the run does not continue from %s, moved to %s", path.name, path.rename(target))
    if comes_back:
        former, found = found, found.rename(checkpoints.resolve() / checkpoint_name(step))
        meanwhile.unlink()
        replace_link(former, f"../{found.name}")  # for a restart by the same command
    for path in complete_checkpoints(checkpoints)[:1]:
        replace_link(checkpoints / LATEST, path.name)
    return found


def prune(checkpoints: Path, *, keep_last: int, keep_every: int, spared: int | None = None) -> None:
    """Delete checkpoints except the newest `keep_last`, each `keep_every`-th, best and `spared`."""
    found = complete_checkpoints(checkpoints)
    kept = {spared, *map(best_step, found[:1])}
    for path in found[keep_last:]:
        step = step_of(path)
        if step not in kept and (not keep_every or step % keep_every):
            try:
                remove_tree(path)
            except OSError as error:
                logger.warning("%s cannot be removed: %s", path, error.strerror)


def best_step(path: Path) -> int:
    """The step of the best one when this was saved, see `checkpoint.keep_best`; -1: none."""
    return int((read_state(path)["extensions"].get("best") or {}).get("step", -1))


def complete_checkpoints(checkpoints: Path) -> list[Path]:
    """Directories named after a step that carry the marker, newest first."""
    return _newest_first(path.parent for path in checkpoints.glob(f"step_*/{MARKER}"))


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    """Those that are named after a step; of one step the former, see `finish`, comes last."""
    named = [path for path in paths if step_of(path) >= 0]
    return sorted(named, key=lambda path: (step_of(path), path.name), reverse=True)


def step_of(path: Path) -> int:
    """The step in a checkpoint directory's name; -1 if it is none."""
    found = re.fullmatch("step_([0-9]+)", path.name)
    return int(found[1]) if found else -1


def verify(path: Path) -> dict[str, Any]:
    """Check every file of the checkpoint against its marker, and return its state.json.

    A CheckpointError if a file or the marker is missing or changed, or has another format.
    """
    files = listed_files(path)
    for name, expected in files.items():
        with _reading(path / name):
            found = _fingerprint(path / name)
        if found != expected:
            problem = f"is damaged (its size or hash is not what {MARKER} says)"
            raise CheckpointError(f"{path / name}: {problem}")
    state = read_state(path)
    models, shards = state["model_files"], range(state["data_shards"])
    missing = {STATE_FILE, *map(model_file, models), *map(rank_file, shards)} - files.keys()
    if missing:
        raise CheckpointError(f"{path}: {MARKER} does not list {', '.join(sorted(missing))}")
    return state


def read_state(path: Path) -> dict[str, Any]:
    """state.json of a checkpoint, unverified. A CheckpointError if it is missing or damaged."""
    listed_files(path)
    state = _read_as(_SavedState, path / STATE_FILE)
    if step_of(path.resolve()) not in (-1, state["step"]):  # the run would resume at the wrong one
        raise CheckpointError(f"{path / STATE_FILE}: is damaged: it is of step {state['step']}")
    return state


def listed_files(path: Path) -> dict[str, dict[str, Any]]:
    """File name -> `bytes` and `sha256`, from the marker. A CheckpointError if it is missing,
    damaged or of another format."""
    if not (path / MARKER).exists():
        raise CheckpointError(f"{path}: is not complete (it has no {MARKER})")
    found = _read_as(_Marker, path / MARKER)
    if found["format_version"] != FORMAT_VERSION:
        problem = f"has format version {found['format_version']}, this program reads {FORMAT_VERSION}"
        raise CheckpointError(f"{path / MARKER}: {problem}")
    return dict(found["files"])


def _read_as(model: type[BaseModel], path: Path) -> dict[str, Any]:
    """The JSON object in a file. A CheckpointError if it does not fit the model."""
    with _reading(path):
        found = read_json(path)
    try:
        model.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}"
        raise CheckpointError(f"{path}: is damaged: {problem}") from None
    return found


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Around reading a file: a failure is a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: is damaged: {error}") from None


def find(checkpoints: Path, resume: str) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint to continue from (rank 0), with its state; None to start a new run.

    A UserError if the checkpoint of `resume` is incomplete or damaged, or for `auto` all there are.
    """
    if resume == "off":
        return None
    if resume != "auto":
        refuse_absent(resume)
        path = Path(resume).resolve()  # `latest` may move meanwhile
        with loading(path, "state"):
            return path, verify(path)
    candidates = _newest_first(checkpoints.glob("step_*"))
    for path in candidates:
        try:
            return path, verify(path)
        except CheckpointError as error:
            # Killed while it was written, or damaged since: an earlier one may be complete.
            logger.warning("%s; falling back to the checkpoint before it", error)
    if candidates:
        problem = f"no checkpoint in {checkpoints} is whole"
        raise UserError("--resume auto", problem, "start a new run")
    return None


def refuse_absent(path: str, *, is_of_run: bool = False) -> None:
    """Refuse a `--resume` that names nothing, a run, or its directory of checkpoints;
    if it `is_of_run`, also one that lies elsewhere."""
    given = Path(path)
    is_elsewhere = is_of_run and given.absolute().parent.name != CHECKPOINTS
    if is_elsewhere or not given.is_dir() or (given / CHECKPOINTS).is_dir() or complete_checkpoints(given):
        fix = "name one, such as RUN_DIR/checkpoints/latest, or continue a run with --resume auto --run-dir RUN_DIR"
        raise UserError("--resume", f"{path} is no checkpoint" + " of a run" * is_elsewhere, fix)


def _fingerprint(path: Path) -> dict[str, Any]:
    with open_plain(path) as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": file.tell()}


# Larger numbers are damage: they would overflow an int64, or fill the memory.
Count = Annotated[int, Field(ge=0, le=2**62)]
Ranks = Annotated[int, Field(ge=1, le=2**20)]
# A path could make `verify` or a download leave the directory.
FileName = Annotated[str, Field(pattern=r"^[^/\x00]+$")]


class _File(BaseModel, strict=True):
    bytes: Count
    sha256: str


class _Marker(BaseModel, strict=True):
    format_version: int
    files: dict[FileName, _File]


class _Tracker(BaseModel, strict=True):
    tokens_seen: Count
    smoothed: dict[str, float | None]


class _SavedState(BaseModel, strict=True):
    """The fields of state.json that restoring needs."""

    step: Count
    data_shards: Ranks
    model_files: Annotated[list[Count], Field(min_length=1)]
    reached: Count
    tokens: Annotated[list[Count], Field(min_length=2, max_length=2)]
    evaluation_is_due: bool
    boundary_is_due: bool
    tracker: _Tracker
    gns: dict[str, Any] | None
    extensions: dict[str, dict[str, Any] | None]
    wandb_run_id: str | None = None
    lane_sets: list[Annotated[list[Count], Field(min_length=2, max_length=2)]] = []
    config: dict[str, Any]
    environment: dict[str, Any] = {}


@contextmanager
def loading(path: Path, part: str) -> Iterator[None]:
    """Around loading a part of a checkpoint: what is no UserError becomes one that names it."""
    problem = f"{path}: its {part} cannot be restored"
    with users_code("--resume", problem, "resume from another checkpoint"):
        yield
