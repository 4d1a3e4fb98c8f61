"""A run's checkpoints in a store: `URL/step_00000100/` as on disk, and `URL/RUN.json`.

As on disk, the marker `COMPLETE` is what makes a checkpoint exist. It is written when every other
file has been read back and has the hash that the marker lists, and deleted before any of them.
RUN.json names the owner: two runs that shared a store by mistake would delete each other's
checkpoints. It could go where every file system of a cluster outlives its nodes.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from trainer.config.schema import RunConfig
from trainer.errors import UserError
from trainer.files import (
    is_url,
    open_plain,
    parse_json,
    read_bytes,
    read_json,
    remove_tree,
    sync_directory,
    write_file,
    write_json,
)
from trainer.lab.storage import MissingError, Storage, StorageError, StoredFile
from trainer.metrics.logger import get_logger
from trainer.training.checkpointing import checkpoint
from trainer.training.checkpointing.checkpoint import MARKER, checkpoint_name, parse_marker, step_of
from trainer.training.checkpointing.tensor_files import CheckpointError
from trainer.training.run_dir import ID_FILE, RunDir

KEY = "checkpoint.remote"
OWNER_FILE = "RUN.json"
ABANDONED = "ABANDONED"  # the marker's name in a checkpoint of a branch that the run has left
ATTEMPTS, FIRST_WAIT_SEC = 5, 1.0

Found = tuple[Path, dict[str, Any]]
T = TypeVar("T")
logger = get_logger(__name__)


class Owner(NamedTuple):
    """Which run a store belongs to, and which process of it writes there."""

    id: str
    name: str
    writer: str


class RemoteCheckpoints:
    """The checkpoints below a URL. Methods raise `StorageError` if a request fails."""

    def __init__(self, url: str, *, key: str = KEY) -> None:
        self.storage = Storage(url, key=key)
        self.url = self.storage.url

    def files(self) -> dict[int, dict[str, StoredFile]]:
        """Step -> the files of its directory, complete or not."""
        steps: dict[int, dict[str, StoredFile]] = {}
        for name, file in self.storage.files().items():
            directory, _, rest = name.partition("/")
            step = step_of(Path(directory))
            if rest and step >= 0 and directory == checkpoint_name(step):
                steps.setdefault(step, {})[rest] = file
        return steps

    def complete(self) -> list[int]:
        """The steps of the complete checkpoints, newest first."""
        return sorted((step for step, files in self.files().items() if MARKER in files), reverse=True)

    def marker(self, step: int) -> bytes:
        """The content of a checkpoint's marker; raises `MissingError` if there is none."""
        return self.storage.read(f"{checkpoint_name(step)}/{MARKER}")

    def _listed(self, step: int, marker: bytes) -> dict[str, Any]:
        """The files that a marker lists. Raises CheckpointError: it is damaged."""
        return parse_marker(marker, f"{self.url}/{checkpoint_name(step)}/{MARKER}")

    def owner(self) -> Owner | None:
        """The content of RUN.json; None without one."""
        try:
            found = parse_json(self.storage.read(OWNER_FILE))
            return Owner(str(found["id"]), str(found["name"]), str(found["writer"]))
        except MissingError:
            return None
        except (ValueError, KeyError, TypeError):
            raise StorageError(f"{self.url}/{OWNER_FILE}: is damaged") from None

    def set_owner(self, owner: Owner) -> None:
        self.storage.write(OWNER_FILE, (json.dumps(owner._asdict(), indent=1) + "\n").encode())

    def upload(self, local: Path, verified: set[str]) -> int:
        """Upload a complete checkpoint, the marker last; returns its bytes. `verified`: files that
        are in the store, to which others are added.

        Raises StorageError: a request failed, or a file does not read back as the marker says;
        OSError, CheckpointError: the local marker is gone or damaged.
        """
        name, marker = local.name, read_bytes(local / MARKER)
        listed = parse_marker(marker, local / MARKER)
        marker_name, there = f"{name}/{MARKER}", self.storage.files(name)
        if MARKER in there:  # of another content: from now on there is no checkpoint here
            self.storage.remove([marker_name])
        unknown = there.keys() - listed.keys() - {MARKER}
        self.storage.remove([f"{name}/{file}" for file in unknown])
        for file in [each for each in listed if each not in verified]:
            self.storage.put(local / file, f"{name}/{file}")
            problem = self._difference(f"{name}/{file}", listed[file])
            if problem:
                raise StorageError(problem)
            verified.add(file)
        self.storage.write(marker_name, marker)
        if self.storage.read(marker_name) != marker:
            self.storage.remove([marker_name])  # nobody may resume from it
            raise StorageError(f"{self.url}/{marker_name}: is not what was uploaded")
        return sum(int(expected["bytes"]) for expected in listed.values())

    def _difference(self, name: str, expected: Mapping[str, Any]) -> str:
        """How a stored file differs from what the marker says of it; empty if it does not."""
        size = self.storage.info(name).size
        if size != expected["bytes"]:
            return f"{self.url}/{name}: has {size} bytes, not {expected['bytes']}"
        if self.storage.sha256(name, size) == expected["sha256"]:
            return ""
        return f"{self.url}/{name}: is damaged (its hash is not what {MARKER} says)"

    def verify(self, step: int) -> None:
        """Compare every file of a complete checkpoint with the marker. Raises CheckpointError."""
        for file, expected in self._listed(step, self.marker(step)).items():
            try:
                problem = self._difference(f"{checkpoint_name(step)}/{file}", expected)
            except MissingError as error:
                problem = str(error)
            if problem:
                raise CheckpointError(problem)

    def download(self, step: int, checkpoints: Path) -> Path:
        """Make the checkpoint a local one, in place of its like: staged, hashed, marker last.
        Raises CheckpointError: a file is missing, truncated or changed, and nothing is left of it
        here."""
        name = checkpoint_name(step)
        staging, target = checkpoints / f".tmp_{name}.remote", checkpoints / name
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        try:
            marker = self.marker(step)
            for file, expected in self._listed(step, marker).items():
                # What arrives damaged may have been damaged on the way: it is asked for once more.
                if not any(self._arrives(f"{name}/{file}", staging / file, expected) for _ in range(2)):
                    problem = f"is damaged (its size or hash is not what {MARKER} says)"
                    raise CheckpointError(f"{self.url}/{name}/{file}: {problem}")
            if target.exists():
                remove_tree(target)
            staging.rename(target)  # whole, but for the marker
        except MissingError as error:
            raise CheckpointError(str(error)) from None
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        write_file(target / MARKER, marker)
        sync_directory(checkpoints)
        return target

    def _arrives(self, name: str, local: Path, expected: Mapping[str, Any]) -> bool:
        """Download a file; whether it is what the marker says."""
        self.storage.get(name, local)
        with open_plain(local) as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        return bool(local.stat().st_size == expected["bytes"] and digest == expected["sha256"])

    def remove(self, step: int) -> None:
        """Delete a checkpoint, the marker first; `clean` deletes what a failure leaves."""
        name = checkpoint_name(step)
        self.storage.remove([f"{name}/{MARKER}"])
        self.storage.remove([f"{name}/{file}" for file in self.storage.files(name)])
        self.storage.remove_directory(name)

    def clean(self) -> list[int]:
        """Delete what interrupted uploads and deletions have left; returns their steps."""
        left = [step for step, files in self.files().items() if not files.keys() & {MARKER, ABANDONED}]
        for step in left:
            self.remove(step)
        return left

    def set_aside_after(self, step: int) -> list[int]:
        """Mark the checkpoints of later steps as abandoned: nobody resumes from them.

        Their files stay, as in the local directory, until the run has a checkpoint of that step
        again.
        """
        later = [each for each in self.complete() if each > step]
        for each in later:
            name = checkpoint_name(each)
            self.storage.write(f"{name}/{ABANDONED}", self.marker(each))
            self.storage.remove([f"{name}/{MARKER}"])
        return later


def kept(steps: Collection[int], *, keep_last: int, keep_every: int) -> set[int]:
    """The steps that retention keeps: the newest, and multiples of `keep_every` (0: none)."""
    newest = sorted(steps, reverse=True)[:keep_last]
    return {*newest, *(step for step in steps if keep_every and step % keep_every == 0)}


class Claimed(NamedTuple):
    """A run's store at its start."""

    remote: RemoteCheckpoints
    owner: Owner | None  # None: the store did not answer, and the run has only its own directory
    claim: Callable[[], Owner]  # claims it later


def claim(remote: RemoteCheckpoints, run_dir: Path, name: str, *, resumes: bool, may_adopt: bool) -> Owner:
    """Claim the store for this run and process, or find that it is. Writes RUN.json alone.

    A store without a checkpoint can be claimed by any run: there is nothing to lose. `may_adopt`:
    this one has no checkpoint, and takes over those of a run of its name. Raises UserError: the
    store holds the checkpoints of another run, or of one that is not to be resumed; StorageError.
    """
    found, own = remote.owner(), _saved_id(run_dir)
    if any(remote.complete()) and (not resumes or found is None or found.id != own):
        is_new_node = resumes and may_adopt and own is None
        if not is_new_node or (found is not None and found.name != name):
            whose = "a run" if found is None else f"another run ({found.name})"
            problem = f"{remote.url} holds the checkpoints of {whose}"
            raise UserError(KEY, problem, "name a prefix of its own, or continue that run with --resume auto")
        own = found and found.id
    owner = Owner(own or uuid.uuid4().hex, name, uuid.uuid4().hex)
    remote.set_owner(owner)
    if remote.owner() != owner:  # two runs may claim it at once: the last one has it
        raise StorageError(f"{remote.url}: does not give back what was just written")
    return owner


def _saved_id(run_dir: Path) -> str | None:
    try:
        return str(read_json(run_dir / ID_FILE)["id"])
    except (OSError, ValueError, KeyError):
        return None


def save_id(run_dir: Path, owner: Owner, url: str) -> None:
    """Keep the id in the run directory. Raises OSError: it cannot be written."""
    write_json(run_dir / ID_FILE, {"id": owner.id, "url": url})


def find_checkpoint(
    config: RunConfig, run_dir: RunDir, resume: str, prepare: Callable[[], None]
) -> tuple[Found | None, Claimed | None]:
    """The checkpoint to continue from, made a local one, and the run's store (rank 0).

    `resume`: `off`, `auto`, or a checkpoint's path or URL. `prepare` makes and locks the run
    directory, before something is downloaded into it. Raises UserError: the store cannot be used,
    holds another run's checkpoints, or cannot be read where nothing else has one; or as
    `checkpoint.find`.
    """
    if config.checkpoint.remote is None:
        return _named_or_local(run_dir, resume, prepare), None
    remote = RemoteCheckpoints(config.checkpoint.remote)
    own_steps = checkpoint.complete_checkpoints(run_dir.checkpoints)
    may_adopt = not own_steps and (resume == "auto" or resume.startswith(f"{remote.url}/"))
    how = {"resumes": resume != "off", "may_adopt": may_adopt}
    claim_it = partial(claim, remote, run_dir.path, config.run.name, **how)
    try:
        owner = claim_it()
    except StorageError as error:
        has_local = bool(own_steps)
        if resume != "auto":
            has_local = resume != "off" and not is_url(resume)
        if not has_local:
            raise _unreadable(KEY, error) from None
        logger.warning("%s; resuming without the store, and mirroring is tried again during the run", error)
        return checkpoint.find(run_dir.checkpoints, resume), Claimed(remote, None, claim_it)
    claimed = Claimed(remote, owner, claim_it)
    if resume == "auto":
        return _newest(remote, run_dir, prepare), claimed
    return _named_or_local(run_dir, resume, prepare), claimed


def _unreadable(key: str, error: StorageError) -> UserError:
    return UserError(key, f"cannot be used: {error}", "check the URL, the endpoint and the credentials")


def _named_or_local(run_dir: RunDir, resume: str, prepare: Callable[[], None]) -> Found | None:
    if not is_url(resume):
        return checkpoint.find(run_dir.checkpoints, resume)
    parent, _, name = resume.rstrip("/").rpartition("/")
    step, local = step_of(Path(name)), run_dir.checkpoints / name
    fix = "name a complete one (train checkpoint list URL), and a --run-dir that does not have another of its step"
    try:
        if step < 0 or name != checkpoint_name(step):
            raise CheckpointError(f"{resume} is no checkpoint")
        remote = RemoteCheckpoints(parent, key="--resume")
        marker = _asked_again(lambda: remote.marker(step))
        if not (local / MARKER).exists():
            return _downloaded(remote, step, run_dir, prepare)
        if read_bytes(local / MARKER) != marker:
            raise CheckpointError(f"{run_dir.path} has another {name} than {resume}")
        return local, checkpoint.verify(local)
    except MissingError:
        problem = f"{resume} is not there, or is not complete"
    except CheckpointError as error:
        problem = str(error)
    except StorageError as error:
        raise _unreadable("--resume", error) from None
    raise UserError("--resume", problem, fix)


def _newest(remote: RemoteCheckpoints, run_dir: RunDir, prepare: Callable[[], None]) -> Found | None:
    """The newest checkpoint that is whole, of the directory and the store; of the same step the
    local one. Raises UserError: there are some, and none is whole; or the store cannot be read."""
    local = {step_of(p): p for p in run_dir.checkpoints.glob("step_*") if step_of(p) >= 0}
    older = "falling back to the checkpoint before it"
    try:
        there = {step for step in _asked_again(remote.complete) if not _was_left(remote, step, run_dir)}
        for step in sorted(local.keys() | there, reverse=True):  # the newest first
            try:
                if step in local:
                    return local[step], checkpoint.verify(local[step])
            except CheckpointError as error:
                where = "taking that of the store" if step in there else older
                logger.warning("%s; %s", error, where)
            try:
                if step in there:
                    return _downloaded(remote, step, run_dir, prepare)
            except CheckpointError as error:
                logger.warning("%s; %s", error, older)
    except StorageError as error:
        raise _unreadable("--resume auto", error) from None
    number = len(local.keys() | there)
    if number:
        where = f"{run_dir.checkpoints} and {remote.url}"
        problem = f"none of the {number} checkpoints in {where} is whole"
        raise UserError("--resume auto", problem, "start a new run")
    return None


def _was_left(remote: RemoteCheckpoints, step: int, run_dir: RunDir) -> bool:
    """Whether a checkpoint is of a branch that the run has left, unknown to the store yet."""
    try:
        left = read_bytes(run_dir.checkpoints / "abandoned" / checkpoint_name(step) / MARKER)
        return left == remote.marker(step)
    except FileNotFoundError:
        return False


def _downloaded(remote: RemoteCheckpoints, step: int, run_dir: RunDir, prepare: Callable[[], None]) -> Found:
    prepare()  # not before: a run that is refused leaves no directory
    started = time.monotonic()
    path = _asked_again(lambda: remote.download(step, run_dir.checkpoints))
    logger.info("downloaded %s/%s in %.1f s", remote.url, path.name, time.monotonic() - started)
    return path, checkpoint.verify(path)


def _asked_again(request: Callable[[], T]) -> T:
    """The request's result, asked for a few times. Raises StorageError; MissingError: at once."""
    for attempt in range(ATTEMPTS - 1):
        try:
            return request()
        except MissingError:
            raise
        except StorageError as error:
            wait = FIRST_WAIT_SEC * 2.0**attempt * random.uniform(0.5, 1.5)
            logger.warning("%s; trying again in %.1f s", error, wait)
            time.sleep(wait)
    return request()
