"""The checkpoints of one run in a store: `URL/step_00000100/` with the files of the local directory, and `URL/RUN.json`.

As on disk, the marker `COMPLETE` is what makes a checkpoint exist. It is written when every other file has been read back and
has the hash that the marker lists, and deleted before any of them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from trainer.files import open_plain, parse_json, read_bytes, remove_tree, sync_directory, write_file
from trainer.storage import MissingError, Storage, StorageError, StoredFile
from trainer.training.checkpointing.checkpoint import MARKER, CheckpointError, checkpoint_name, parse_marker, step_of

KEY = "checkpoint.remote"
OWNER_FILE = "RUN.json"
ABANDONED = "ABANDONED"
"""The marker's name in a checkpoint of a branch that the run has left."""


class Owner(NamedTuple):
    """Which run a remote directory belongs to, and which process of it writes there."""

    id: str
    name: str
    writer: str


class RemoteCheckpoints:
    """The checkpoints below a URL.

    Raises:
        UserError: as `Storage`.
    """

    def __init__(self, url: str, *, key: str = KEY) -> None:
        self.storage = Storage(url, key=key)
        self.url = self.storage.url

    def files(self) -> dict[int, dict[str, StoredFile]]:
        """Step -> the files of its directory, complete or not.

        Raises:
            StorageError: the store cannot be read.
        """
        steps: dict[int, dict[str, StoredFile]] = {}
        for name, file in self.storage.files().items():
            directory, _, rest = name.partition("/")
            if rest and (step := step_of(Path(directory))) >= 0 and directory == checkpoint_name(step):
                steps.setdefault(step, {})[rest] = file
        return steps

    def complete(self) -> list[int]:
        """The steps of the complete checkpoints, newest first.

        Raises:
            StorageError: the store cannot be read.
        """
        return sorted((step for step, files in self.files().items() if MARKER in files), reverse=True)

    def marker(self, step: int) -> bytes:
        """The content of a checkpoint's marker.

        Raises:
            StorageError: it cannot be read; MissingError: there is none.
        """
        return self.storage.read(f"{checkpoint_name(step)}/{MARKER}")

    def owner(self) -> Owner | None:
        """What RUN.json says; None without one.

        Raises:
            StorageError: it cannot be read, or is damaged.
        """
        try:
            found = parse_json(self.storage.read(OWNER_FILE))
            return Owner(str(found["id"]), str(found["name"]), str(found["writer"]))
        except MissingError:
            return None
        except (ValueError, KeyError, TypeError):
            raise StorageError(f"{self.url}/{OWNER_FILE}: is damaged") from None

    def set_owner(self, owner: Owner) -> None:
        """Write RUN.json.

        Raises:
            StorageError: it cannot be written.
        """
        self.storage.write(OWNER_FILE, (json.dumps(owner._asdict(), indent=1) + "\n").encode())

    def upload(self, local: Path, verified: set[str], report: Callable[[int], None]) -> int:
        """Upload a complete checkpoint, the marker last; returns its bytes.

        Args:
            verified: names of the files that are in the store already, as an earlier attempt found; others are added.
            report: called with the bytes of each piece that was sent or read back.

        Raises:
            StorageError: a request failed, or a file does not read back as the marker says.
            OSError, CheckpointError: the local marker is gone or damaged.
        """
        name, marker = local.name, read_bytes(local / MARKER)
        listed = parse_marker(marker, local / MARKER)
        there = self.storage.files(name)
        if MARKER in there:  # of another content: from now on there is no checkpoint here
            self.storage.remove([f"{name}/{MARKER}"])
        self.storage.remove([f"{name}/{file}" for file in there.keys() - listed.keys() - {MARKER}])
        for file, expected in listed.items():
            if file in verified:
                continue
            self.storage.put(local / file, f"{name}/{file}", report=report)
            self._check(f"{name}/{file}", expected, report)
            verified.add(file)
        self.storage.write(f"{name}/{MARKER}", marker)
        if self.storage.read(f"{name}/{MARKER}") != marker:
            self.storage.remove([f"{name}/{MARKER}"])
            raise StorageError(f"{self.url}/{name}/{MARKER}: is not what was uploaded")
        return sum(int(expected["bytes"]) for expected in listed.values())

    def _check(self, name: str, expected: Mapping[str, Any], report: Callable[[int], None]) -> None:
        """Compare a file in the store with what the marker says of it.

        Raises:
            StorageError: it cannot be read, or differs.
        """
        size = self.storage.info(name).size
        if size != expected["bytes"]:
            raise StorageError(f"{self.url}/{name}: has {size} bytes, not {expected['bytes']}")
        if self.storage.sha256(name, size, report=report) != expected["sha256"]:
            raise StorageError(f"{self.url}/{name}: is damaged (its hash is not what {MARKER} says)")

    def verify(self, step: int) -> int:
        """Read every file of a complete checkpoint and compare it with the marker; returns their bytes.

        Raises:
            CheckpointError: a file is missing or differs.
            StorageError: the store cannot be read.
        """
        name = checkpoint_name(step)
        listed = parse_marker(self.marker(step), f"{self.url}/{name}/{MARKER}")
        there = self.storage.files(name)
        for file, expected in listed.items():
            where = f"{self.url}/{name}/{file}"
            if file not in there:
                raise CheckpointError(f"{where}: is missing")
            if there[file].size != expected["bytes"]:
                raise CheckpointError(f"{where}: has {there[file].size} bytes, not {expected['bytes']}")
            if self.storage.sha256(f"{name}/{file}", expected["bytes"]) != expected["sha256"]:
                raise CheckpointError(f"{where}: is damaged (its hash is not what {MARKER} says)")
        return sum(int(expected["bytes"]) for expected in listed.values())

    def download(self, step: int, checkpoints: Path) -> Path:
        """Make the checkpoint a local one, in place of a local one of its name: staged, hashed, the marker last.

        Raises:
            CheckpointError: a file is missing, truncated or changed; nothing is left of it here.
            StorageError: the store cannot be read.
            OSError: it cannot be written.
        """
        name = checkpoint_name(step)
        try:
            marker = self.marker(step)
        except MissingError as error:
            raise CheckpointError(str(error)) from None
        listed = parse_marker(marker, f"{self.url}/{name}/{MARKER}")
        staging, target = checkpoints / f".tmp_{name}.remote", checkpoints / name
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        try:
            for file, expected in listed.items():
                # What arrives damaged may have been damaged on the way: the store is asked once more.
                if not any(self._arrives(f"{name}/{file}", staging / file, expected) for _ in range(2)):
                    where = f"{self.url}/{name}/{file}"
                    raise CheckpointError(f"{where}: is damaged (its size or hash is not what {MARKER} says)")
            if target.exists():
                remove_tree(target)
            staging.rename(target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        write_file(target / MARKER, marker)
        sync_directory(checkpoints)
        return target

    def _arrives(self, name: str, local: Path, expected: Mapping[str, Any]) -> bool:
        """Download a file; whether it is what the marker says.

        Raises:
            CheckpointError: there is none.
            StorageError, OSError: see `download`.
        """
        try:
            self.storage.get(name, local)
        except MissingError as error:
            raise CheckpointError(str(error)) from None
        with open_plain(local) as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        return bool(local.stat().st_size == expected["bytes"] and digest == expected["sha256"])

    def remove(self, step: int) -> None:
        """Delete a checkpoint, the marker first.

        Raises:
            StorageError: a request failed; what is left is no checkpoint, and `clean` deletes it.
        """
        name = checkpoint_name(step)
        self.storage.remove([f"{name}/{MARKER}"])
        self.storage.remove([f"{name}/{file}" for file in self.storage.files(name)])
        self.storage.remove_directory(name)

    def clean(self) -> list[int]:
        """Delete what interrupted uploads and deletions have left; returns their steps.

        Raises:
            StorageError: a request failed.
        """
        left = [step for step, files in self.files().items() if not files.keys() & {MARKER, ABANDONED}]
        for step in left:
            self.remove(step)
        with suppress(StorageError):  # a right of its own, which not everybody has who may write
            self.storage.abort_uploads()
        return left

    def set_aside_after(self, step: int) -> list[int]:
        """Mark the checkpoints of later steps as those of an abandoned branch, which nobody resumes from; returns them.

        Their files stay, as in the local directory `abandoned`, until the run has a checkpoint of that step again.

        Raises:
            StorageError: a request failed.
        """
        later = [each for each in self.complete() if each > step]
        for each in later:
            name = checkpoint_name(each)
            self.storage.write(f"{name}/{ABANDONED}", self.marker(each))
            self.storage.remove([f"{name}/{MARKER}"])
        return later


def kept(steps: Collection[int], *, keep_last: int, keep_every: int) -> set[int]:
    """The steps that retention keeps: the newest `keep_last`, and the multiples of `keep_every` (0: none)."""
    newest = sorted(steps, reverse=True)[:keep_last]
    return {*newest, *(step for step in steps if keep_every and step % keep_every == 0)}
