"""Checkpoints that are whole or absent.

A checkpoint is a directory `checkpoints/step_00000100/`:

    model_000.safetensors   weights and optimizer: rank 0's, and those of each rank that holds shards of its own
    rank_000.safetensors    every rank: its ledger shard, data cursors, generator
    rank_000.rows           every rank with a ledger: the states, one after another, as they lie in memory
    state.json              step, noise-scale averages, sink state, config, versions
    COMPLETE                JSON: bytes and SHA-256 of every other file; written last, and what makes the checkpoint exist

All is written to `.tmp_step_...` first, synced to disk, renamed, and only then marked. Nothing in it is a pickle, so a
checkpoint cannot run code.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from trainer.errors import UserError
from trainer.files import (
    did_you_mean,
    is_file_name,
    open_plain,
    parse_json,
    read_bytes,
    read_json,
    remove_leftovers,
    remove_tree,
    replace_link,
    replacing,
    sync_directory,
    write_json,
)
from trainer.import_path import format_error
from trainer.metrics.logger import get_logger
from trainer.training.checkpointing.tensor_files import DamagedFile, Rows, TensorFiles, unpack, write_tensors
from trainer.wording import counted

FORMAT_VERSION = 2
MARKER = "COMPLETE"
STATE_FILE = "state.json"
LATEST = "latest"
CHECKPOINTS = "checkpoints"  # in a run's directory

logger = get_logger("checkpoint")


class CheckpointError(Exception):
    """A checkpoint is damaged or not of this program; the message names the file and what is wrong."""


def checkpoint_name(step: int) -> str:
    """Directory name of the checkpoint after `step`."""
    return f"step_{step:08d}"


def model_file(rank: int) -> str:
    """File name of a rank's part of weights and optimizer."""
    return f"model_{rank:03d}.safetensors"


def rank_file(rank: int) -> str:
    """File name of a rank's own part."""
    return f"rank_{rank:03d}.safetensors"


def rows_file(rank: int) -> str:
    """File name of the states of a rank's ledger."""
    return f"rank_{rank:03d}.rows"


class TensorPart(NamedTuple):
    """A file of tensors and plain values."""

    rows: Mapping[str, Rows]
    values: Any = None
    shapes: Mapping[str, tuple[int, ...]] | None = None
    """See `write_tensors`."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the file, or some more."""
        tensors = sum(part.tensor.nbytes for part in self.rows.values())
        # An entry of the header holds name, type, shape and place, one of the metadata name and first row, or shape.
        entries = sum(2 * len(name) + 160 for name in self.rows) + sum(len(name) + 24 for name in self.shapes or ())
        return tensors + entries + 2 * len(json.dumps(self.values)) + 512


class StatePart(NamedTuple):
    """A file of states, as pieces [n, width] of the CPU, which are taken one by one."""

    num_bytes: int
    pieces: Iterable[Tensor]


Part = TensorPart | StatePart


def write_part(path: Path, part: Part) -> None:
    """Write one file of a checkpoint to disk, not merely to the page cache.

    Raises:
        OSError, RuntimeError: it cannot be written.
    """
    if isinstance(part, TensorPart):
        write_tensors(path, part.rows, part.values, shapes=part.shapes)
        return
    with replacing(path) as file:
        for piece in part.pieces:
            file.write(piece.view(torch.uint8).numpy().data)


def read_rank(path: Path, rank: int) -> dict[str, Any]:
    """What a rank of a checkpoint wrote; the states of its ledger are read when they are used.

    Raises:
        CheckpointError: a file is damaged; or there are not as many states as it says.
    """
    try:
        files = TensorFiles([path / rank_file(rank)])
        part: dict[str, Any] = unpack(files.values, files.read)
    except (DamagedFile, ValueError) as error:
        raise CheckpointError(str(error)) from None
    ledger = part.get("ledger", {})
    if ledger:
        size = {"count": len(ledger["groups"]), "width": ledger["width"], "dtype": ledger["dtype"]}
        ledger["rows"] = _map_rows(path / rows_file(rank), **size)
    return part


def _map_rows(path: Path, *, count: int, width: int, dtype: torch.dtype) -> Tensor:
    """States that `write_part` wrote, [count, width], as a part of memory that is the file's.

    Raises:
        CheckpointError: there are not as many.
    """
    needed = count * width * dtype.itemsize
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    if size != needed:
        raise CheckpointError(f"{path}: has {size} bytes, not the {needed} of {counted(count, 'state')}")
    if not count:
        return torch.empty(0, width, dtype=dtype)
    return torch.from_numpy(np.memmap(path, np.uint8, mode="c")).view(dtype).view(count, width)


def staging_dir(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint after `step` is written before it is renamed."""
    return checkpoints / f".tmp_{checkpoint_name(step)}"


def finish(checkpoints: Path, step: int, state: dict[str, Any]) -> Path:
    """Turn the files that all ranks have written for `step` into a checkpoint (rank 0).

    Raises:
        OSError: the disk is full or read-only; no older checkpoint is touched.
    """
    staging, target = staging_dir(checkpoints, step), checkpoints / checkpoint_name(step)
    write_json(staging / STATE_FILE, {"format_version": FORMAT_VERSION, **state})
    files = {path.name: _fingerprint(path) for path in sorted(staging.iterdir())}
    if target.exists():  # The same step again, after a resume from an older checkpoint.
        remove_tree(target)
    staging.rename(target)
    write_json(target / MARKER, {"format_version": FORMAT_VERSION, "step": step, "files": files})
    sync_directory(checkpoints)
    replace_link(checkpoints / LATEST, target.name)
    return target


def discard_staging(checkpoints: Path) -> None:
    """Remove what an interrupted save left behind (rank 0, at the start of a run)."""
    for path in checkpoints.glob(".tmp_step_*"):
        shutil.rmtree(path, ignore_errors=True)
    remove_leftovers(checkpoints)


def set_aside_after(checkpoints: Path, step: int) -> list[Path]:
    """Move checkpoints of later steps out of the way (rank 0): the run continues from `step`, and they are another branch.

    They stay in `checkpoints/abandoned/`. Without this, `auto` would later continue from the branch that was left.
    """
    moved = []
    for path in checkpoints.glob("step_*"):
        if step_of(path) > step:
            target = checkpoints / "abandoned" / path.name
            target.parent.mkdir(exist_ok=True)
            if target.exists():
                remove_tree(target)
            moved.append(path.rename(target))
    return moved


def prune(checkpoints: Path, *, keep_last: int, keep_every: int, spared: int | None = None) -> None:
    """Delete all but the newest `keep_last` checkpoints, those at multiples of `keep_every` (0: none), and step `spared`."""
    for path in complete_checkpoints(checkpoints)[keep_last:]:
        step = step_of(path)
        if step == spared:
            continue
        if not keep_every or step % keep_every:
            remove_tree(path)


def complete_checkpoints(checkpoints: Path) -> list[Path]:
    """Directories that carry the marker, newest first."""
    return sorted((path.parent for path in checkpoints.glob(f"step_*/{MARKER}")), key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """The step in a checkpoint directory's name; -1 if it is none."""
    text = path.name.removeprefix("step_")
    return int(text) if text.isascii() and text.isdigit() else -1


def verify(path: Path) -> dict[str, Any]:
    """Check every file of the checkpoint against its marker, and return its state.json.

    Raises:
        CheckpointError: no marker, another format, or a missing, truncated or changed file.
    """
    files = _listed_files(path)
    for name, expected in files.items():
        try:
            found = _fingerprint(path / name)
        except OSError as error:
            raise CheckpointError(f"{path / name}: {error.strerror}") from None
        if found != expected:
            raise CheckpointError(f"{path / name}: is damaged (its size or hash is not what {MARKER} says)")
    state = read_state(path)
    world_size = state["world_size"]
    # No more names than there are files, whatever number the state holds.
    expected_ranks = range(min(world_size, len(files)))
    needed = {*map(model_file, state["model_files"]), *map(rank_file, expected_ranks)}
    if files.keys() & (rows := {rows_file(rank) for rank in expected_ranks}):
        needed |= rows
    missing = sorted(needed - files.keys())
    if missing:
        raise CheckpointError(f"{path}: has no {', '.join(missing)}, and was saved on {counted(world_size, 'rank')}")
    return state


def read_state(path: Path) -> dict[str, Any]:
    """state.json of a checkpoint that has its marker; nothing is compared with its hash.

    Raises:
        CheckpointError: there is none, it is no JSON object, or it holds what cannot be.
    """
    files = _listed_files(path)
    if STATE_FILE not in files:
        raise CheckpointError(f"{path / MARKER}: does not list {STATE_FILE}")
    try:
        state = read_json(path / STATE_FILE)
    except OSError as error:
        raise CheckpointError(f"{path / STATE_FILE}: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path / STATE_FILE}: is damaged: {error}") from None
    if (problem := problem_of(state)) is not None:
        raise CheckpointError(f"{path / STATE_FILE}: is damaged: {problem}")
    if (named := step_of(path.resolve())) not in (-1, state["step"]):
        raise CheckpointError(f"{path / STATE_FILE}: is damaged: it is of step {state['step']}, not {named}")
    return state


def _listed_files(path: Path) -> dict[str, dict[str, Any]]:
    """Name -> fingerprint, as the marker has it."""
    try:
        marker = read_bytes(path / MARKER)
    except OSError as error:
        raise CheckpointError(f"{path}: is not complete ({MARKER}: {error.strerror})") from None
    except ValueError as error:
        raise CheckpointError(f"{path / MARKER}: is damaged: {error}") from None
    return parse_marker(marker, path / MARKER)


def parse_marker(marker: bytes, where: Path | str) -> dict[str, dict[str, Any]]:
    """File name -> `bytes` and `sha256`.

    Raises:
        CheckpointError: it is damaged, of another version, or a name is not that of a file in the directory.
    """
    try:
        found = parse_json(marker)
        files = {n: {"bytes": int(e["bytes"]), "sha256": str(e["sha256"])} for n, e in found["files"].items()}
        version, step = found["format_version"], found["step"]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise CheckpointError(f"{where}: is damaged") from None
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{where}: has format version {version}, this program reads {FORMAT_VERSION}")
    if (named := step_of(Path(where).parent)) not in (-1, step):
        raise CheckpointError(f"{where}: is damaged: it is of step {step}, not {named}")
    for name in files:
        if not is_file_name(name) or name == MARKER:
            raise CheckpointError(f"{where}: lists {name!r}, which is no file of the checkpoint")
    return files


def find(checkpoints: Path, resume: str) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint to continue from (rank 0), with its state; None to start a new run.

    Raises:
        UserError: `resume` names a checkpoint that is not whole; or, for `auto`, none of several is.
    """
    if resume == "off":
        return None
    if resume != "auto":
        return Path(resume), named(resume, verify)
    candidates = sorted((p for p in checkpoints.glob("step_*") if step_of(p) >= 0), key=step_of, reverse=True)
    for path in candidates:
        try:
            return path, verify(path)
        except CheckpointError as error:
            logger.warning("%s; falling back to the checkpoint before it", error)
    if candidates:
        raise UserError(
            "--resume auto", f"none of the {len(candidates)} checkpoints in {checkpoints} is whole", "start a new run"
        )
    return None


def refuse_absent(path: str) -> None:
    """Refuse a `--resume` that names nothing, or a run.

    Raises:
        UserError: see above.
    """
    if not Path(path).is_dir():
        fix = did_you_mean(path) or "name a checkpoint, such as RUN_DIR/checkpoints/step_00000100, or use auto"
        raise UserError("--resume", f"{path}: no such directory", fix)
    if (Path(path) / CHECKPOINTS).is_dir():
        fix = f"continue it with --resume auto --run-dir {path}, or name {Path(path) / CHECKPOINTS / LATEST}"
        raise UserError("--resume", f"{path} is a run, not a checkpoint", fix)


def named(path: str, read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """state.json of the checkpoint that `--resume` names, by `verify` or, unverified, by `read_state`.

    Raises:
        UserError: it is not there, or not whole.
    """
    refuse_absent(path)
    try:
        return read(Path(path))
    except CheckpointError as error:
        raise UserError("--resume", str(error), "name a whole checkpoint, or use auto") from None


class BackgroundWriter:
    """Writes one file at a time in a thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: list[Future[None]] = []

    def submit(self, path: Path, part: Part) -> None:
        """Write `part`, which nobody may change until it is written, to `path`."""
        self._pending.append(self._pool.submit(write_part, path, part))

    @property
    def is_idle(self) -> bool:
        """Whether all that was submitted is written (or failed)."""
        return all(future.done() for future in self._pending)

    def wait(self) -> None:
        """Until all is written.

        Raises:
            OSError: a write failed.
        """
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(wait=True)


def _fingerprint(path: Path) -> dict[str, Any]:
    with open_plain(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


MOST = 2**62
Count = Annotated[int, Field(ge=0, le=MOST)]
Pair = Annotated[list[float], Field(min_length=2, max_length=2)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Tracker(_Part):
    tokens_seen: Count
    smoothed: dict[str, float | None]


class _NoiseScale(_Part):
    noise: dict[str, float]
    consistency: dict[str, float]
    gauges: dict[str, float]
    history: list[list[Pair]]


class _SavedState(_Part):
    """What restoring needs of state.json."""

    step: Count
    world_size: Annotated[int, Field(ge=1, le=MOST)]
    model_files: Annotated[list[Count], Field(min_length=1)]
    reached: Count
    tokens: Annotated[list[Count], Field(min_length=2, max_length=2)]
    micro_batches: Annotated[list[Count], Field(min_length=2, max_length=2)]
    evaluation_is_due: bool
    tracker: _Tracker
    gns: _NoiseScale | None
    extensions: dict[str, dict[str, Any] | None]
    wandb_run_id: str | None = None
    config: dict[str, Any]


def problem_of(state: Mapping[str, Any]) -> str | None:
    """The first thing in a state.json that cannot be, as `tracker.tokens_seen: ...`; None if there is none."""
    try:
        _SavedState.model_validate(state)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}"
    return None


@contextmanager
def loading(path: Path, part: str) -> Iterator[None]:
    """Load a part of a checkpoint. What it holds may raise anything: that is the checkpoint's fault, in one line.

    Raises:
        UserError: naming the part.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        problem = f"{path}: its {part} cannot be restored: {format_error(error)}"
        raise UserError("--resume", problem, "resume from another checkpoint") from error
