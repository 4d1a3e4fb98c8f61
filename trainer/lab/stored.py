"""Sources that are URLs: local copies of a store's files, within a limit of size.

Of such a copy (see `trainer.lab.cache`) entry.json has the URL, and size and version of every file,
and the files lie in files/<name>/, where <name> is the last part of the URL. The key is a hash of
the URL and of all names, sizes and versions. An object that changes in the store gives another
copy, which shares the unchanged files with the old one (hard links), so that a run that still reads
the old one is not disturbed. Everything after this reads local copies, under the names of the
objects. A store that cannot be read, a copy that does not fit and a directory that cannot be
written are UserErrors. It could go if data were copied before a run.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from trainer.config.data_tables import DataTable, SourceTable
from trainer.data.formats import FORMATS, check_format, index_suffixes
from trainer.data.layout import Discovery, Stream, discover_direct, discover_nested, sort_of, warn_unread
from trainer.errors import UserError
from trainer.files import is_url, write_json
from trainer.lab.cache import ENTRY, Cache, Snapshot, read_entry
from trainer.lab.storage import MissingError, Storage, StorageError, StoredFile
from trainer.metrics.logger import get_logger
from trainer.wording import counted

logger = get_logger(__name__)
THREADS = 8


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

    def is_whole() -> bool:
        """It is finished, and no file of it was cut or removed since."""
        made = read_entry(place / ENTRY).get("files") == listing
        return made and all(_has_size(target / name, file.size) for name, file in files.items())

    make = partial(_make, cache, storage, files, listing, place, target)
    waiting = f"waiting for another process that downloads {storage.url}"
    return cache.hold(key, target, is_whole=is_whole, make=make, waiting=waiting)


def _make(
    cache: Cache,
    storage: Storage,
    files: Mapping[str, StoredFile],
    listing: Mapping[str, Any],
    place: Path,
    target: Path,
) -> None:
    """Download what is not there yet; the lock is held."""
    parts, size = place / ".parts", sum(file.size for file in files.values())
    (place / ENTRY).unlink(missing_ok=True)  # until it is written again, the copy is not whole
    shutil.rmtree(parts, ignore_errors=True)
    parts.mkdir(parents=True)
    with cache.alone():
        write_json(place / "plan.json", {"url": storage.url, "bytes": size})
        missing = _link_unchanged(cache, storage.url, listing, target)
        num_bytes = sum(files[name].size for name in missing)
        cache.make_room(storage.url, size, num_bytes, place)
    started = time.monotonic()
    if missing:
        number = counted(len(missing), "file")
        logger.info("downloading %s of %s (%.1f MB)", number, storage.url, num_bytes / 1e6)

    def fetch(number: int, name: str) -> None:
        part, size = parts / str(number), files[name].size
        storage.get(name, part)
        if not _has_size(part, size):
            raise StorageError(f"{name} has not the {size:,} bytes of the listing")
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        part.replace(target / name)  # a file that exists is whole

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(fetch, itertools.count(), missing))
    shutil.rmtree(parts)
    write_json(place / ENTRY, {"url": storage.url, "files": listing})
    if missing:
        logger.info("downloaded %s in %.1f s", storage.url, time.monotonic() - started)


def _link_unchanged(cache: Cache, url: str, listing: Mapping[str, Any], target: Path) -> list[str]:
    """Take files from other copies of the URL; returns the names that are still missing."""
    missing = {name for name, (size, _) in listing.items() if not _has_size(target / name, size)}
    for place in cache.others(target.parents[1]):
        entry = read_entry(place / ENTRY)
        if entry.get("url") != url:
            continue
        theirs = entry.get("files", {})
        for name in [n for n in missing if listing[n][1] and theirs.get(n) == listing[n]]:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            with suppress(OSError):  # a file system without links: it is downloaded
                (target / name).unlink(missing_ok=True)
                os.link(place / "files" / target.name / name, target / name)
                missing.discard(name)
    return sorted(missing)


def _has_size(path: Path, size: int) -> bool:
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
        names, copy = _matching(given, format, cache)
        copies.append(copy)
        for name, url in names.items():
            path = (copy.directory / name).as_posix()
            urls[os.path.abspath(path)] = url
            local.append(path)
    streams = []
    for stream in discover_direct(local, format=format):
        name = urls.get(os.path.abspath(stream.path), stream.relative_path)
        streams.append(replace(stream, relative_path=name))
    streams.sort(key=lambda stream: stream.relative_path)
    return [replace(stream, stream_id=i) for i, stream in enumerate(streams)], tuple(copies)


def discover_stored(paths: Sequence[str], *, format: str, cache: Cache) -> Discovery:
    """As `discover`, for paths some of which are URLs."""
    if len(paths) == 1 and not glob.has_magic(paths[0]):
        root = paths[0].rstrip("/")
        try:
            streams, copy = stored_nested(paths[0], None, format=format, cache=cache)
            return Discovery("nested", streams, root=root, copies=(copy,))
        except UserError:
            paths = [f"{root}/*"]
    streams, copies = stored_direct(paths, format=format, cache=cache)
    return Discovery("direct", streams, paths=tuple(paths), copies=copies)


def _wanted(files: Mapping[str, StoredFile], format: str, *, where: str, warns: bool) -> dict[str, StoredFile]:
    """The files that a layout reads, with their indices. Warns of others that look like data."""
    sorts = {name: sort_of(PurePath(name), format) for name in files}
    if warns:
        warn_unread(where, [name for name, sort in sorts.items() if sort == "unread"])
    suffixes = index_suffixes()
    names = [name for name, sort in sorts.items() if sort == "data" or PurePath(name).suffix in suffixes]
    return {name: files[name] for name in names}


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
    return {name: f"{base}/{name}" for name in names}, made


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
