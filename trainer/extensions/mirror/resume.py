"""Which checkpoint a run resumes from when it has a store beside its directory: the newest complete one of both."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from trainer.config.schema import RunConfig
from trainer.errors import UserError
from trainer.extensions.mirror.checkpoints import Owner, RemoteCheckpoints
from trainer.extensions.mirror.claim import Claimed, claim
from trainer.files import read_bytes
from trainer.metrics.logger import get_logger
from trainer.storage import MissingError, StorageError, is_url
from trainer.training.checkpointing import checkpoint
from trainer.training.checkpointing.checkpoint import MARKER, CheckpointError, checkpoint_name, step_of
from trainer.training.run_dir import RunDir

Found = tuple[Path, dict[str, Any]]
T = TypeVar("T")
logger = get_logger(__name__)
ATTEMPTS, FIRST_WAIT_SEC = 5, 1.0


def find_checkpoint(
    config: RunConfig, run_dir: RunDir, resume: str, prepare: Callable[[], None]
) -> tuple[Found | None, Claimed | None]:
    """The checkpoint to continue from, made a local one, and the store that the run mirrors to (rank 0).

    Args:
        resume: `off`, `auto`, or a checkpoint's path or URL.
        prepare: makes and locks the run directory, before something is downloaded into it.

    Raises:
        UserError: a package is missing; the URL cannot be used; the store holds another run's checkpoints, or cannot be read
            where nothing else has a checkpoint; or as `checkpoint.find`.
    """
    url, name = config.checkpoint.remote, config.run.name
    remote = RemoteCheckpoints(url) if url is not None else None
    own_steps = checkpoint.complete_checkpoints(run_dir.checkpoints)
    if remote is None:
        return _named_or_local(run_dir, resume, prepare), None
    is_own_url = resume.startswith(f"{remote.url}/")
    may_adopt = not own_steps and (resume == "auto" or is_own_url)

    def claim_it() -> Owner:
        return claim(remote, run_dir.path, name, resumes=resume != "off", may_adopt=may_adopt)

    try:
        owner = claim_it()
    except StorageError as error:
        if own_steps if resume == "auto" else resume != "off" and not is_url(resume):
            logger.warning("%s; resuming without the store, and mirroring is tried again during the run", error)
            return checkpoint.find(run_dir.checkpoints, resume), Claimed(remote, None, claim_it)
        fix = "check the URL, the endpoint and the credentials, or leave checkpoint.remote out"
        raise UserError("checkpoint.remote", f"cannot be used: {error}", fix) from None
    if resume == "auto":
        found = _newest(remote, run_dir, prepare)
    else:
        found = _named_or_local(run_dir, resume, prepare)
    return found, Claimed(remote, owner, claim_it)


def _named_or_local(run_dir: RunDir, resume: str, prepare: Callable[[], None]) -> Found | None:
    if not is_url(resume):
        return checkpoint.find(run_dir.checkpoints, resume)
    parent, _, name = resume.rstrip("/").rpartition("/")
    step = step_of(Path(name))
    if step < 0 or name != checkpoint_name(step):
        raise UserError("--resume", f"{resume} is no checkpoint", "name one, such as s3://BUCKET/PREFIX/step_00000100")
    remote = RemoteCheckpoints(parent, key="--resume")
    try:
        marker = _asked_again(lambda: remote.marker(step))
        local = run_dir.checkpoints / name
        if (local / MARKER).exists():
            if read_bytes(local / MARKER) != marker:
                problem = f"{run_dir.path} has another {name} than {resume}"
                raise UserError("--resume", problem, "name a new directory with --run-dir")
            return local, checkpoint.verify(local)
        return _downloaded(remote, step, run_dir, prepare)
    except MissingError:
        raise UserError(
            "--resume", f"{resume} is not there, or is not complete", "see: train checkpoint list URL"
        ) from None
    except CheckpointError as error:
        raise UserError("--resume", str(error), "name a whole checkpoint, or use auto") from None
    except StorageError as error:
        raise UserError("--resume", f"cannot be read: {error}", "check the URL and the credentials") from None


def _newest(remote: RemoteCheckpoints, run_dir: RunDir, prepare: Callable[[], None]) -> Found | None:
    """The newest checkpoint that is whole, of the directory and the store; of the same step the local one.

    Raises:
        UserError: there are some, and none is whole; or the store cannot be read.
    """
    local = {step_of(p): p for p in run_dir.checkpoints.glob("step_*") if step_of(p) >= 0}
    try:
        there = [step for step in _asked_again(remote.complete) if not _was_left(remote, step, run_dir)]
        for step in sorted(local.keys() | set(there), reverse=True):
            try:
                if step in local:
                    return local[step], checkpoint.verify(local[step])
            except CheckpointError as error:
                where = "taking that of the store" if step in there else "falling back to the checkpoint before it"
                logger.warning("%s; %s", error, where)
            try:
                if step in there:
                    newest = max(local, default=None)
                    before = "no checkpoint" if newest is None else f"{checkpoint_name(newest)} as its newest"
                    logger.info("%s has %s; taking %s of %s", run_dir.path, before, checkpoint_name(step), remote.url)
                    return _downloaded(remote, step, run_dir, prepare)
            except CheckpointError as error:
                logger.warning("%s; falling back to the checkpoint before it", error)
    except StorageError as error:
        fix = "try again, or name a local checkpoint"
        raise UserError("--resume auto", f"the store cannot be read: {error}", fix) from None
    if local or there:
        number = len(local.keys() | set(there))
        problem = f"none of the {number} checkpoints in {run_dir.checkpoints} and {remote.url} is whole"
        raise UserError("--resume auto", problem, "start a new run")
    return None


def _was_left(remote: RemoteCheckpoints, step: int, run_dir: RunDir) -> bool:
    """Whether a checkpoint of the store is of a branch that the run has left, which the store has not been told yet."""
    try:
        left = read_bytes(run_dir.checkpoints / "abandoned" / checkpoint_name(step) / MARKER)
        return left == remote.marker(step)
    except FileNotFoundError:
        return False


def _downloaded(remote: RemoteCheckpoints, step: int, run_dir: RunDir, prepare: Callable[[], None]) -> Found:
    prepare()
    started = time.monotonic()
    path = _asked_again(lambda: remote.download(step, run_dir.checkpoints))
    logger.info("downloaded %s/%s in %.1f s", remote.url, path.name, time.monotonic() - started)
    return path, checkpoint.verify(path)


def _asked_again(request: Callable[[], T]) -> T:
    """The request's result; a store that fails is asked a few times before the run gives up.

    Raises:
        StorageError: it failed every time; MissingError: at once.
    """
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
