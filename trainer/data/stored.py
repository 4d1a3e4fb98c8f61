"""Sources that are URLs: local copies of the files in a store, whole, never changed, within a limit of size.

    CACHE/<key>/entry.json      URL, and size and version of every file; written last, and what makes the copy whole
    CACHE/<key>/files/<name>/   the files; <name> is the last part of the URL
    CACHE/<key>.lock            held shared by every process that uses the copy, exclusively by the one that makes or deletes it

The key is a hash of the URL and of all names, sizes and versions. An object that changes in the store gives another copy, which
shares the unchanged files with the old one (hard links), so that a run that still reads the old one is not disturbed.
Everything after this reads local copies, under the names of the objects. A store that cannot be read, a copy that does not fit
and a directory that cannot be written are UserErrors.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from trainer.data.formats import FORMATS, check_format, index_suffixes
from trainer.data.layout import Discovery, Stream, discover_direct, discover_nested, wanted
from trainer.errors import UserError
from trainer.files import open_plain, read_json, write_json
from trainer.metrics.logger import get_logger
from trainer.storage import MissingError, Storage, StorageError, StoredFile, is_url
from trainer.wording import counted

logger = get_logger(__name__)
ENTRY = "entry.json"
THREADS = 8
POLL_SEC, HEAD_START_SEC = 0.2, 5.0


@dataclass(frozen=True)
class Snapshot:
    """A local copy. It is not deleted while this object, or another process's like it, exists."""

    key: str
    directory: Path
    is_new: bool
    """Whether this process has just made it."""
    lock: BinaryIO


class Cache:
    """The copies below a directory.

    Args:
        directory: absolute.
        limit: bytes of all copies together; 0: none.
    """

    def __init__(self, directory: Path, limit: int) -> None:
        self.directory = directory
        self.limit = limit

    @classmethod
    def of(cls, directory: str | None, limit_gb: float) -> Cache:
        """The cache that `[data] cache_dir` and `cache_gb` name."""
        place = Path(directory or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "trainer", "data"))
        with suppress(OSError, RuntimeError):  # a name that is too long, a circle of links, no such user's home
            place = place.expanduser().resolve()
            if place.is_dir() or not place.exists():
                return cls(place, round(limit_gb * 1e9))
        raise UserError("data.cache_dir", f"{place} cannot be a directory", "name another one")

    def copy(self, storage: Storage, files: Mapping[str, StoredFile]) -> Snapshot:
        """The copy of these files, made unless there is one: one process makes it, others wait for that."""
        if odd := [name for name in files if {"", ".", ".."}.intersection(name.split("/"))]:
            raise UserError(storage.url, f"has the key {odd[0]!r}, which cannot be a file", "rename it")
        listing = {name: [file.size, file.version] for name, file in sorted(files.items())}
        key = hashlib.sha256(json.dumps([storage.url, listing]).encode()).hexdigest()[:24]
        last = storage.url.rpartition("/")[2]
        target = self.directory / key / "files" / (last if last not in ("", ".", "..") else "root")

        def is_whole() -> bool:
            """It is finished, and no file of it was cut or removed since."""
            made = _read(self.directory / key / ENTRY).get("files") == listing
            return made and all(_has_size(target / name, file.size) for name, file in files.items())

        make = partial(self._make, storage, files, listing, self.directory / key, target)
        waiting = f"waiting for another process that downloads {storage.url}"
        return self.hold(key, target, is_whole=is_whole, make=make, waiting=waiting)

    def hold(
        self,
        key: str,
        target: Path,
        *,
        is_whole: Callable[[], bool],
        make: Callable[[], None],
        waiting: str,
        is_first: bool = True,
        on_wait: Callable[[], None] = lambda: None,
    ) -> Snapshot:
        """What lies under a key, made unless it is whole: one process makes it, others wait for that.

        Args:
            target: the directory, below that of the key.
            waiting: what to say when it is waited for.
            is_first: False: leave it to another process to begin, for some seconds.
            on_wait: called now and then.
        """
        place = self.directory / key
        others_until = time.monotonic() + (0.0 if is_first else HEAD_START_SEC)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            lock = open_plain(self.directory / f"{key}.lock", "ab")
            is_new = has_said = False
            # Shared by those that use the copy, alone by the one that makes it; a lock that is changed may be lost in between.
            while not (_try(lock, fcntl.LOCK_SH) and is_whole()):
                if time.monotonic() >= others_until and _try(lock, fcntl.LOCK_EX):
                    if not is_whole():
                        make()
                        is_new = True
                    continue
                fcntl.flock(lock, fcntl.LOCK_UN)  # two that both have it shared would wait for each other
                if not has_said:
                    logger.info("%s", waiting)
                has_said = True
                on_wait()
                time.sleep(POLL_SEC * random.uniform(0.5, 1.5))
            os.utime(place / ENTRY)
        except OSError as error:
            where, problem = str(error.filename or self.directory), f"cannot be used: {error.strerror}"
            raise UserError(where, problem, "name another directory: data.cache_dir") from None
        return Snapshot(key, target, is_new, lock)

    def _make(
        self, storage: Storage, files: Mapping[str, StoredFile], listing: Mapping[str, Any], place: Path, target: Path
    ) -> None:
        """Download what is not there yet; the lock is held."""
        parts, size = place / ".parts", sum(file.size for file in files.values())
        (place / ENTRY).unlink(missing_ok=True)
        shutil.rmtree(parts, ignore_errors=True)
        parts.mkdir(parents=True)
        with self.alone():
            write_json(place / "plan.json", {"url": storage.url, "bytes": size})
            missing = self._link_unchanged(storage.url, listing, target)
            num_bytes = sum(files[name].size for name in missing)
            self.make_room(storage.url, size, num_bytes, place)
        started = time.monotonic()
        if missing:
            logger.info("downloading %s of %s (%.1f MB)", counted(len(missing), "file"), storage.url, num_bytes / 1e6)

        def fetch(numbered: tuple[int, str]) -> None:
            number, name = numbered
            part = parts / str(number)
            storage.get(name, part)
            if not _has_size(part, files[name].size):
                raise StorageError(f"{name} has not the {files[name].size:,} bytes of the listing")
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            part.replace(target / name)

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(fetch, enumerate(missing)))
        shutil.rmtree(parts)
        write_json(place / ENTRY, {"url": storage.url, "files": listing})
        if missing:
            logger.info("downloaded %s in %.1f s", storage.url, time.monotonic() - started)

    def _link_unchanged(self, url: str, listing: Mapping[str, Any], target: Path) -> list[str]:
        """Take files from other copies of the URL; returns the names that are still missing."""
        missing = {name for name, (size, _) in listing.items() if not _has_size(target / name, size)}
        for place in self._others(target.parents[1]):
            entry = _read(place / ENTRY)
            if entry.get("url") != url:
                continue
            for name in [n for n in missing if listing[n][1] and entry.get("files", {}).get(n) == listing[n]]:
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                with suppress(OSError):  # a file system without links: it is downloaded
                    (target / name).unlink(missing_ok=True)
                    os.link(place / "files" / target.name / name, target / name)
                    missing.discard(name)
        return sorted(missing)

    def make_room(self, url: str, size: int, to_download: int, place: Path) -> None:
        """Delete the least recently used copies that nobody uses, as far as needed."""
        others = {other: int(_read(other / "plan.json").get("bytes", 0)) for other in self._others(place)}
        used = sum(others.values())

        def lack() -> str:
            if self.limit and used + size > self.limit:
                return f"data.cache_gb = {self.limit / 1e9:g}, of which {used / 1e9:.3g} GB are in use"
            free = shutil.disk_usage(self.directory).free
            return "" if free >= to_download else f"{free / 1e9:.3g} GB are free in {self.directory}"

        for other, num_bytes in others.items():
            # Nothing is deleted for what can never fit.
            if not lack() or 0 < self.limit < size:
                break
            if self._delete(other):
                used -= num_bytes
        if problem := lack():
            shutil.rmtree(place)
            fix = "raise data.cache_gb, name another data.cache_dir, or read fewer modalities"
            raise UserError(url, f"takes {size / 1e9:.3g} GB as a local copy; {problem}", fix)

    def _others(self, place: Path) -> list[Path]:
        """The other copies, the least recently used first."""
        others = [path.parent for path in self.directory.glob("*/plan.json") if path.parent != place]

        def used_at(path: Path) -> float:
            with suppress(OSError):
                return (path / ENTRY).stat().st_mtime
            return 0.0

        return sorted(others, key=used_at)

    def _delete(self, place: Path) -> bool:
        """Delete a copy, unless a process uses it."""
        with open_plain(self.directory / f"{place.name}.lock", "ab") as lock:
            if not _try(lock, fcntl.LOCK_EX):
                return False
            url = _read(place / "plan.json").get("url")
            (place / ENTRY).unlink(missing_ok=True)
            shutil.rmtree(place)
        logger.info("deleted the local copy of %s to make room", url)
        return True

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Held while room is counted and made."""
        with open_plain(self.directory / "room.lock", "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _try(lock: BinaryIO, kind: int) -> bool:
    """Take a lock, unless another process has one that it excludes."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}


BESIDE = {suffix: each.beside for each in FORMATS.values() if each.beside for suffix in each.suffixes}
Listing = Callable[[bool], dict[str, StoredFile]]
"""What a source reads of a store; the argument: whether to warn of what it does not read."""


def stored_nested(
    url: str, modalities: Sequence[str] | None, *, format: str, cache: Cache
) -> tuple[list[Stream], Snapshot]:
    """As `discover_nested`, for the objects below `url/<modality>/`; names are those of a local copy of the corpus."""
    check_format(format)
    storage = Storage(url, key="root")

    def listing(warns: bool) -> dict[str, StoredFile]:
        files = storage.files()
        chosen = [n for n in files if "/" in n and (modalities is None or n.partition("/")[0] in modalities)]
        return {name: files[name] for name in wanted(chosen, format, where=url if warns else None)}

    _, copy = _copied(storage, listing, cache)
    try:
        return discover_nested(copy.directory, modalities, format=format), copy
    except UserError as error:
        key, problem = (text.replace(str(copy.directory), storage.url) for text in (error.key, error.problem))
        raise UserError(key, problem, error.fix.replace(str(copy.directory), storage.url)) from None


def stored_direct(paths: Sequence[str], *, format: str, cache: Cache) -> tuple[list[Stream], tuple[Snapshot, ...]]:
    """As `discover_direct`, where some of the paths are URLs of objects or globs over them; their names are the URLs."""
    check_format(format)
    urls: dict[str, str] = {}
    local: list[str] = []
    copies: list[Snapshot] = []
    for given in paths:
        if not is_url(given):
            local.append(given)
            continue
        names, copy = _matching(given, format, cache)
        copies.append(copy)
        for name, url in names.items():
            path = (copy.directory / name).as_posix()
            urls[os.path.abspath(path)] = url
            local.append(path)
    streams = [
        replace(stream, relative_path=urls.get(os.path.abspath(stream.path), stream.relative_path))
        for stream in discover_direct(local, format=format)
    ]
    ordered = sorted(streams, key=lambda stream: stream.relative_path)
    return [replace(stream, stream_id=i) for i, stream in enumerate(ordered)], tuple(copies)


def discover_stored(paths: Sequence[str], *, format: str, cache: Cache) -> Discovery:
    """As `discover`, for paths some of which are URLs."""
    if len(paths) == 1 and not glob.has_magic(paths[0]):
        try:
            streams, copy = stored_nested(paths[0], None, format=format, cache=cache)
            return Discovery("nested", streams, root=paths[0].rstrip("/"), copies=(copy,))
        except UserError:
            paths = [f"{paths[0].rstrip('/')}/*"]
    streams, copies = stored_direct(paths, format=format, cache=cache)
    return Discovery("direct", streams, paths=tuple(paths), copies=copies)


def _matching(url: str, format: str, cache: Cache) -> tuple[dict[str, str], Snapshot]:
    """(name in the copy -> URL, copy) of the objects that a URL names."""
    protocol, _, rest = url.partition("://")
    parts = rest.split("/")
    # The fixed directories, and after them the object or the glob.
    fixed = next((i for i, part in enumerate(parts[:-1]) if glob.has_magic(part)), len(parts) - 1)
    base, pattern = f"{protocol}://{'/'.join(parts[:fixed])}", "/".join(parts[fixed:])
    storage = Storage(base, key="paths")
    is_glob = glob.has_magic(pattern)

    def listing(warns: bool) -> dict[str, StoredFile]:
        if is_glob:
            found = storage.match(pattern)
            found = {name: found[name] for name in wanted(found, format, where=url if warns else None)}
        else:
            found = {pattern: storage.info(pattern)}
        for name in list(found):
            suffix = BESIDE.get(Path(name).suffix)
            if suffix is not None and (beside := str(Path(name).with_suffix(suffix))) not in found:
                with suppress(MissingError):  # the format says what it needs
                    found[beside] = storage.info(beside)
        return found

    files, copy = _copied(storage, listing, cache)
    names = [name for name in files if name == pattern or (is_glob and Path(name).suffix not in index_suffixes())]
    return {name: f"{base}/{name}" for name in names}, copy


def _copied(storage: Storage, listing: Listing, cache: Cache) -> tuple[dict[str, StoredFile], Snapshot]:
    """What the listing gives, and a local copy of it."""
    try:
        files = listing(True)
        if not files:
            raise UserError(storage.url, "no such directory, or nothing in it that a source reads", "check the URL")
        copy = cache.copy(storage, files)
        if copy.is_new and listing(False) != files:
            raise UserError(storage.url, "changed while it was read", "start again, once nobody writes there")
    except StorageError as error:
        fix = "check the URL, the endpoint and the credentials"
        raise UserError(storage.url, f"cannot be read: {error}", fix) from None
    return files, copy
