"""Files of a store that an fsspec URL names (`s3://bucket/prefix`), with one kind of error.

Credentials and endpoints are those that the backend reads from its own environment and files
(AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, ~/.aws for s3): none stand in a config, which is copied into
every run and checkpoint.

Sources that are URLs have local copies, which the ranks of a node share:

    CACHE/<key>/entry.json      what it is a copy of; written last
    CACHE/<key>/files/          the files
    CACHE/<key>.lock            held by the process that makes it

Of a copy, entry.json has the URL, and size and version of every file, and the files lie in
files/<name>/, where <name> is the last part of the URL. The key is a hash of the URL and of all
names, sizes and versions. An object that changes in the store gives another copy, so that a run
that still reads the old one is not disturbed. Everything after this reads local copies, under the
names of the objects. A store that cannot be read, a copy that does not fit and a directory that
cannot be written are UserErrors. It could go if data were copied before a run.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import importlib
import itertools
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import urlsplit

from trainer.config.data_tables import DataTable, SourceTable
from trainer.data.formats import FORMATS, check_format, index_suffixes
from trainer.data.layout import Discovery, Stream, discover_direct, discover_nested, sort_of, warn_unread
from trainer.errors import UserError
from trainer.files import is_url, open_plain, write_json
from trainer.metrics.logger import get_logger
from trainer.wording import counted

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


class CacheError(UserError):
    """A copy cannot be made where `data.cache_dir` says."""


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

    def match(self, pattern: str) -> dict[str, StoredFile]:
        with self._translating(pattern, fresh=True):
            return _below(self._root, self._fs.glob(self._path(pattern), detail=True))

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


logger = get_logger(__name__)
THREADS = 8
ENTRY = "entry.json"
POLL_SEC, HEAD_START_SEC = 0.2, 5.0


class Snapshot(NamedTuple):
    """A local copy."""

    key: str
    directory: Path
    is_new: bool  # whether this process has just made it


class Cache:
    """The copies below the directory that `[data] cache_dir` names (None: the user's own)."""

    def __init__(self, directory: str | Path | None) -> None:
        own = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "trainer", "data")
        try:
            self.directory = Path(os.path.realpath(Path(directory or own).expanduser()))
        except RuntimeError:
            raise UserError("data.cache_dir", f"{directory or own} is in nobody's home", "name another one") from None

    def hold(
        self,
        key: str,
        *,
        is_whole: Callable[[], bool],
        make: Callable[[], None],
        waiting: str,  # what to say when it is waited for
        is_first: bool = True,  # False: leave it to another process to begin, for some seconds
        on_wait: Callable[[], None] = lambda: None,  # called now and then
    ) -> bool:
        """Make the copy under a key, unless another process has or does. Returns whether."""
        others_until = time.monotonic()
        if not is_first:
            others_until += HEAD_START_SEC
        is_new = has_said = False
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with open_plain(self.directory / f"{key}.lock", "ab") as lock:
                while not is_whole():
                    if time.monotonic() >= others_until and _try(lock):
                        if not is_whole():
                            make()
                            is_new = True
                        continue
                    if not has_said:
                        logger.info("%s", waiting)
                    has_said = True
                    on_wait()
                    time.sleep(POLL_SEC * random.uniform(0.5, 1.5))
        except OSError as error:
            where, problem = str(error.filename or self.directory), f"cannot be used: {error.strerror}"
            fix = f"name another data.cache_dir; if it is full, delete copies that no run reads in {self.directory}"
            raise CacheError(where, problem, fix) from None
        return is_new

    def need(self, url: str, num_bytes: int) -> None:
        """Refuse what does not fit. Raises CacheError."""
        free = shutil.disk_usage(self.directory).free
        if free < num_bytes:
            room = f"{free / 1e9:.3g} GB are free in {self.directory}"
            problem = f"takes {num_bytes / 1e9:.3g} GB more as a local copy; {room}"
            raise CacheError(url, problem, "delete copies that no run reads there, or name another data.cache_dir")


def _try(lock: BinaryIO) -> bool:
    """Take a lock, unless another process has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def copy(cache: Cache, storage: Storage, files: Mapping[str, StoredFile]) -> Snapshot:
    """The copy of these files, made by one process unless it is there."""
    for name in files:
        if {"", ".", ".."}.intersection(name.split("/")):
            raise UserError(storage.url, f"has the key {name!r}, which cannot be a file", "rename it")
    listing = {name: [file.size, file.version] for name, file in sorted(files.items())}
    # Another copy if a file changes.
    key = hashlib.sha256(json.dumps([storage.url, listing]).encode()).hexdigest()[:24]
    place, last = cache.directory / key, storage.url.rpartition("/")[2]
    target = place / "files" / (last if last not in ("", ".", "..") else "root")

    def missing() -> list[str]:
        return [name for name, file in files.items() if not has_size(target / name, file.size)]

    def make() -> None:
        """Download what is not there yet; the lock is held."""
        parts, names = place / ".parts", missing()
        shutil.rmtree(parts, ignore_errors=True)
        num_bytes = sum(files[name].size for name in names)
        cache.need(storage.url, num_bytes)
        parts.mkdir(parents=True)
        started, number = time.monotonic(), counted(len(names), "file")
        logger.info("downloading %s of %s (%.1f MB)", number, storage.url, num_bytes / 1e6)

        def fetch(number: int, name: str) -> None:
            part, size = parts / str(number), files[name].size
            storage.get(name, part)
            if not has_size(part, size):
                raise StorageError(f"{name} has not the {size:,} bytes of the listing")
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            part.replace(target / name)  # a file that exists is whole

        try:
            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(fetch, itertools.count(), names))
        finally:
            shutil.rmtree(parts, ignore_errors=True)
        write_json(place / ENTRY, {"url": storage.url, "files": listing})
        logger.info("downloaded %s in %.1f s", storage.url, time.monotonic() - started)

    def is_whole() -> bool:
        return (place / ENTRY).exists() and not missing()  # none was cut or removed since

    waiting = f"waiting for another process that downloads {storage.url}"
    return Snapshot(key, target, cache.hold(key, is_whole=is_whole, make=make, waiting=waiting))


def has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


BESIDE = {suffix: each.beside for each in FORMATS.values() if each.beside for suffix in each.suffixes}
# The files that a source reads of a store; the argument: whether to warn of others.
Listing = Callable[[bool], dict[str, StoredFile]]


def streams_of(table: SourceTable, data: DataTable) -> tuple[list[Stream], tuple[Snapshot, ...]]:
    """The streams of a source with URLs, and its local copies in the cache of `[data]`."""
    cache = Cache(data.cache_dir)
    if table.root is not None:
        streams, copy = stored_nested(table.root, table.modalities, format=table.format, cache=cache)
        return streams, (copy,)
    return stored_direct(table.paths or [], format=table.format, cache=cache)


def stored_nested(
    url: str, modalities: Sequence[str] | None, *, format: str, cache: Cache
) -> tuple[list[Stream], Snapshot]:
    """As `discover_nested`, for the objects below `url/<modality>/`, with names of a copy."""
    check_format(format)
    storage = Storage(url, key="root")

    def listing(warns: bool) -> dict[str, StoredFile]:
        files = {name: each for name, each in storage.files().items() if "/" in name}
        if modalities is not None:
            files = {name: each for name, each in files.items() if name.partition("/")[0] in modalities}
        return _wanted(files, format, where=url, warns=warns)

    _, copy = _copied(storage, listing, cache)
    try:
        return discover_nested(copy.directory, modalities, format=format), copy
    except UserError as error:
        said = (error.key, error.problem, error.fix)
        raise UserError(*(text.replace(str(copy.directory), storage.url) for text in said)) from None


def stored_direct(paths: Sequence[str], *, format: str, cache: Cache) -> tuple[list[Stream], tuple[Snapshot, ...]]:
    """As `discover_direct`, where paths may be URLs or globs over them, which are the names."""
    check_format(format)
    urls: dict[str, str] = {}
    local: list[str] = []
    copies: list[Snapshot] = []
    for given in paths:
        if not is_url(given):
            local.append(given)
            continue
        named, copy = _matching(given, format, cache)
        copies.append(copy)
        urls |= named
        local += named
    found = discover_direct(local, format=format)
    streams = [replace(each, relative_path=urls.get(os.path.abspath(each.path), each.relative_path)) for each in found]
    streams.sort(key=lambda stream: stream.relative_path)
    return [replace(stream, stream_id=i) for i, stream in enumerate(streams)], tuple(copies)


def discover_stored(paths: Sequence[str], *, format: str, cache: Cache) -> Discovery:
    """As `discover`, for paths some of which are URLs."""
    if len(paths) == 1 and not glob.has_magic(paths[0]):
        root = paths[0].rstrip("/")
        try:
            return Discovery("nested", stored_nested(paths[0], None, format=format, cache=cache)[0], root=root)
        except CacheError:
            raise
        except UserError:  # it is not nested
            paths = [f"{root}/*"]
    return Discovery("direct", stored_direct(paths, format=format, cache=cache)[0], paths=tuple(paths))


def _wanted(files: Mapping[str, StoredFile], format: str, *, where: str, warns: bool) -> dict[str, StoredFile]:
    """The files that a layout reads, with their indices. Warns of others that look like data."""
    sorts = {name: sort_of(PurePath(name), format) for name in files}
    if warns:
        warn_unread(where, [name for name, sort in sorts.items() if sort == "unread"])
    suffixes = index_suffixes()
    names = [name for name, sort in sorts.items() if sort == "data" or PurePath(name).suffix in suffixes]
    return {name: files[name] for name in names}


def _matching(url: str, format: str, cache: Cache) -> tuple[dict[str, str], Snapshot]:
    """(path in the copy -> URL, copy) of the objects that a URL names."""
    protocol, _, rest = url.partition("://")
    parts = rest.split("/")
    # The fixed directories, and after them the object or the glob.
    fixed = next((i for i, part in enumerate(parts[:-1]) if glob.has_magic(part)), len(parts) - 1)
    base, pattern = f"{protocol}://{'/'.join(parts[:fixed])}", "/".join(parts[fixed:])
    storage = Storage(base, key="paths")
    is_glob = glob.has_magic(pattern)

    def listing(warns: bool) -> dict[str, StoredFile]:
        if is_glob:
            found = _wanted(storage.match(pattern), format, where=url, warns=warns)
        else:
            found = {pattern: storage.info(pattern)}
        for path in [Path(name) for name in found if Path(name).suffix in BESIDE]:
            beside = str(path.with_suffix(BESIDE[path.suffix]))  # of a pair such as .bin and .idx
            if beside not in found:
                with suppress(MissingError):  # the format says what it needs
                    found[beside] = storage.info(beside)
        return found

    files, made = _copied(storage, listing, cache)
    indices = index_suffixes()
    names = [name for name in files if name == pattern or (is_glob and Path(name).suffix not in indices)]
    return {os.path.abspath(made.directory / name): f"{base}/{name}" for name in names}, made


def _copied(storage: Storage, listing: Listing, cache: Cache) -> tuple[dict[str, StoredFile], Snapshot]:
    """The files of the listing, and a local copy of them."""
    url = storage.url
    try:
        files = listing(True)
        if not files:
            raise UserError(url, "no such directory, or nothing in it that a source reads", "check the URL")
        made = copy(cache, storage, files)
        # An old copy is whole whatever happens there now.
        if made.is_new and listing(False) != files:
            raise UserError(url, "changed while it was read", "start again, once nobody writes there")
    except StorageError as error:
        fix = "check the URL, the endpoint and the credentials"
        raise UserError(url, f"cannot be read: {error}", fix) from None
    return files, made
