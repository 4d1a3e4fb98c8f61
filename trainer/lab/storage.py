"""Files of a store that an fsspec URL names (`s3://bucket/prefix`), with one kind of error.

Credentials and endpoints are those that the backend reads from its own environment and files
(AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, ~/.aws for s3): none stand in a config, which is copied into
every run and checkpoint.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trainer.errors import UserError

# Stores that have keys, not directories: nothing is to be made before a file, and none is left.
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "memory"}
FULL = (errno.ENOSPC, errno.EDQUOT)
READ_BYTES = 16_000_000  # of a file that is hashed, per request
# s3fs itself would hold ten parts of 50 MB, and say nothing before one of them has arrived.
S3_PART_BYTES, S3_PARTS_AT_ONCE, S3_MOST_PARTS = 8 * 2**20, 8, 10_000
# What backends call the thing that changes with an object's content, the best first.
VERSIONS = ("ETag", "etag", "md5Hash", "content_hash", "LastModified", "last_modified", "updated", "mtime", "created")


class StorageError(Exception):
    """A store did not do what it was asked; one line with the URL and the reason."""


class MissingError(StorageError):
    """There is no such file or bucket."""


@dataclass(frozen=True)
class StoredFile:
    """A file as a listing shows it."""

    size: int
    version: str  # changes with the content: an ETag, or a time


class Storage:
    """The files below a URL that fsspec knows. Names are relative to it, with `/` between their
    parts. Raises UserError: the URL has a password, its protocol is unknown, or a package is
    missing.

    Every method raises StorageError if the store fails, MissingError if it lacks the file. `key`:
    the config key or option that the URL comes from.
    """

    def __init__(self, url: str, *, key: str) -> None:
        protocol, _, rest = url.partition("://")
        self.url = f"{protocol}://{rest.rstrip('/') or rest[:1]}"
        self._is_object_store, self._is_s3 = protocol in OBJECT_STORES, protocol in ("s3", "s3a")
        self.moved = 0  # bytes that were sent, or read back, so far
        fix = "write it as s3://BUCKET/PREFIX or file:///DIRECTORY"
        try:
            if urlsplit(url).password is not None:
                fix, self.url = "set the credentials in the environment", "a URL with a password in it"
                raise ValueError("every run would copy it into its config")
            if not rest or (self._is_object_store and not rest.strip("/")):
                raise ValueError("it names no bucket or directory")
            core = importlib.import_module("fsspec.core")
            # A cached listing would show what this process itself has seen, not what is there.
            self._fs, root = core.url_to_fs(self.url, use_listings_cache=False)
        except Exception as error:  # noqa: BLE001 - backends raise anything
            if isinstance(error, ImportError):
                fix = "run: pip install fsspec s3fs, or the package that is named"
            problem = f"{self.url} cannot be used as a store: {reason_of(error)}"
            raise UserError(key, problem, fix) from None
        self._root = str(root).rstrip("/")

    def files(self, directory: str = "") -> dict[str, StoredFile]:
        """Every file at any depth below a directory, by its name relative to that; maybe none."""
        path = self._path(directory)
        with self._translating(directory, fresh=True):
            return _below(path, self._fs.find(path, detail=True))

    def info(self, name: str) -> StoredFile:
        with self._translating(name, fresh=True):
            found: dict[str, Any] = self._fs.info(self._path(name))
        if found.get("type") == "directory":
            raise MissingError(f"{self.url}/{name}: is a directory")
        return _stored(found)

    def read(self, name: str) -> bytes:
        with self._translating(name):
            return bytes(self._fs.cat_file(self._path(name)))

    def write(self, name: str, content: bytes) -> None:
        with self._translating(name):
            self._make_parent(name)
            self._fs.pipe_file(self._path(name), content)

    def put(self, local: Path, name: str) -> None:
        before, cut = self.moved, {}

        def hook(size: int | None, value: int, **_: Any) -> None:
            self.moved = before + value

        with self._translating(name):
            if self._is_s3:  # other backends cut as they like
                part = max(S3_PART_BYTES, -(-local.stat().st_size // S3_MOST_PARTS))
                cut = {"chunksize": part, "max_concurrency": S3_PARTS_AT_ONCE}
            self._make_parent(name)
            callback = importlib.import_module("fsspec.callbacks").Callback(hooks={"moved": hook})
            self._fs.put_file(str(local), self._path(name), callback=callback, **cut)

    def get(self, name: str, local: Path) -> None:
        """Download a file; a failure may leave a part. Raises OSError: the local disk is full."""
        with self._translating(name, local=local):
            self._fs.get_file(self._path(name), str(local))

    def sha256(self, name: str, size: int) -> str:
        """The hash of the first `size` bytes, read back."""
        digest, path = hashlib.sha256(), self._path(name)
        for start in range(0, size, READ_BYTES):
            with self._translating(name):
                piece = bytes(self._fs.cat_file(path, start=start, end=min(start + READ_BYTES, size)))
            digest.update(piece)
            self.moved += len(piece)
        return digest.hexdigest()

    def remove(self, names: Sequence[str]) -> None:
        """Delete files; those that are gone already do not matter."""
        for name in names:
            with suppress(MissingError), self._translating(name):
                self._fs.rm_file(self._path(name))

    def remove_directory(self, directory: str) -> None:
        """Delete an empty directory, where the store has directories."""
        if not self._is_object_store:
            with suppress(StorageError), self._translating(directory):
                self._fs.rmdir(self._path(directory))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _make_parent(self, name: str) -> None:
        # s3fs would make a bucket that does not exist.
        if not self._is_object_store:
            self._fs.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)

    @contextmanager
    def _translating(self, name: str, *, fresh: bool = False, local: Path | None = None) -> Iterator[None]:
        """Make one kind of error of whatever a backend raises; `fresh`: others may have written;
        `local`: where the backend writes."""
        try:
            if fresh:
                self._fs.invalidate_cache()
            yield
        except Exception as error:  # noqa: BLE001 - botocore's errors, aiohttp's, OSError
            if local is not None and isinstance(error, OSError) and error.errno in FULL:
                raise OSError(error.errno, error.strerror, str(local)) from None
            kind = MissingError if isinstance(error, FileNotFoundError) else StorageError
            raise kind(f"{self.url}/{name}: {reason_of(error)}".replace("/:", ":")) from None


def reason_of(error: Exception) -> str:
    """An error of a backend in one line."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _below(path: str, found: dict[str, dict[str, Any]]) -> dict[str, StoredFile]:
    """The files below a path, by their names relative to it."""
    files = {}
    for name, info in sorted(found.items()):
        if info.get("type") != "directory" and name.startswith(f"{path}/"):
            files[name.removeprefix(f"{path}/")] = _stored(info)
    return files


def _stored(info: dict[str, Any]) -> StoredFile:
    version = next((str(info[key]).strip('"') for key in VERSIONS if info.get(key)), "")
    return StoredFile(int(info.get("size") or 0), version)
