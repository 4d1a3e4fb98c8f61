"""Which run a remote directory belongs to: two runs that share one by mistake would delete each other's checkpoints."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from trainer.errors import UserError
from trainer.extensions.mirror.checkpoints import KEY, Owner, RemoteCheckpoints
from trainer.files import read_json, write_json
from trainer.storage import StorageError
from trainer.training.run_dir import ID_FILE


class Claimed(NamedTuple):
    """A run's store at its start."""

    remote: RemoteCheckpoints
    owner: Owner | None
    """None: the store did not answer, and the run resumes from its own directory."""
    claim: Callable[[], Owner]
    """Claims it later."""


def claim(remote: RemoteCheckpoints, run_dir: Path, name: str, *, resumes: bool, may_adopt: bool) -> Owner:
    """Make the directory that of this run and of this process, or find that it already is. Writes RUN.json alone.

    A directory without a checkpoint can be claimed by any run: there is nothing to lose.

    Args:
        name: of the run.
        resumes: it continues from a checkpoint.
        may_adopt: it has no checkpoint of its own, and may take over those that a run of its name has left.

    Raises:
        UserError: it holds the checkpoints of another run, or of one that is not to be resumed.
        StorageError: the store cannot be read or written.
    """
    found, own = remote.owner(), saved_id(run_dir)
    holds_any = any(remote.complete())
    if holds_any and (not resumes or found is None or found.id != own):
        adopts = resumes and may_adopt and own is None and (found is None or found.name == name)
        if not adopts:
            whose = "a run" if found is None else f"another run ({found.name})"
            problem = f"{remote.url} holds the checkpoints of {whose}"
            raise UserError(KEY, problem, "name a prefix of its own, or continue that run with --resume auto")
        own = found.id if found is not None else None
    owner = Owner(own or uuid.uuid4().hex, name, uuid.uuid4().hex)
    remote.set_owner(owner)
    if remote.owner() != owner:
        raise StorageError(f"{remote.url}: does not give back what was just written")
    return owner


def saved_id(run_dir: Path) -> str | None:
    """The id in the run directory; None without one."""
    try:
        return str(read_json(run_dir / ID_FILE)["id"])
    except (OSError, ValueError, KeyError):
        return None


def save_id(run_dir: Path, owner: Owner, url: str) -> None:
    """Keep the id in the run directory.

    Raises:
        OSError: it cannot be written.
    """
    write_json(run_dir / ID_FILE, {"id": owner.id, "url": url})
