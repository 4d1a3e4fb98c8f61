"""Sources that are URLs: local copies of the files in a store, whole, never changed, within a limit of size.

Of such a copy (see `trainer.lab.cache`) entry.json has the URL, and size and version of every file, and the files lie in
files/<name>/, where <name> is the last part of the URL. The key is a hash of the URL and of all names, sizes and versions. An
object that changes in the store gives another copy, which shares the unchanged files with the old one (hard links), so that a
run that still reads the old one is not disturbed. Everything after this reads local copies, under the names of the objects. A
store that cannot be read, a copy that does not fit and a directory that cannot be written are UserErrors.
It could go if data were copied before a run.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """The copy of these files, made unless there is one: one process makes it, others wait for that."""
    if odd := [name for name in files if {"", ".", ".."}.intersection(name.split("/"))]:
        raise UserError(storage.url, f"has the key {odd[0]!r}, which cannot be a file", "rename it")
    listing = {name: [file.size, file.version] for name, file in sorted(files.items())}
    key = hashlib.sha256(json.dumps([storage.url, listing]).encode()).hexdigest()[:24]  # another copy if a file changes
    last = storage.url.rpartition("/")[2]
    target = cache.directory / key / "files" / (last if last not in ("", ".", "..") else "root")

    def is_whole() -> bool:
        """It is finished, and no file of it was cut or removed since."""
        made = read_entry(cache.directory / key / ENTRY).get("files") == listing
        return made and all(_has_size(target / name, file.size) for name, file in files.items())

    make = partial(_make, cache, storage, files, listing, cache.directory / key, target)
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
        logger.info("downloading %s of %s (%.1f MB)", counted(len(missing), "file"), storage.url, num_bytes / 1e6)

    def fetch(numbered: tuple[int, str]) -> None:
        number, name = numbered
        part = parts / str(number)
        storage.get(name, part)
        if not _has_size(part, files[name].size):
            raise StorageError(f"{name} has not the {files[name].size:,} bytes of the listing")
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        part.replace(target / name)  # a file that exists is whole

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(fetch, enumerate(missing)))
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
        for name in [n for n in missing if listing[n][1] and entry.get("files", {}).get(n) == listing[n]]:
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
Listing = Callable[[bool], dict[str, StoredFile]]
"""The files that a source reads of a store; the argument: whether to warn of others."""


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
    """As `discover_nested`, for the objects below `url/<modality>/`; names are those of a local copy of the corpus."""
    check_format(format)
    storage = Storage(url, key="root")

    def listing(warns: bool) -> dict[str, StoredFile]:
        files = storage.files()
        chosen = [n for n in files if "/" in n and (modalities is None or n.partition("/")[0] in modalities)]
        names = _wanted(chosen, format, where=url if warns else None)
        return {name: files[name] for name in names}

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


def _wanted(names: Iterable[str], format: str, *, where: str | None) -> list[str]:
    """Of names below a root, those that a layout reads and the index files next to them.

    Args:
        where: warns of others that are named like data there; None: does not.
    """
    sorts = {name: sort_of(PurePath(name), format) for name in names}
    if where is not None:
        warn_unread(where, [name for name, sort in sorts.items() if sort == "unread"])
    return [name for name, sort in sorts.items() if sort == "data" or PurePath(name).suffix in index_suffixes()]


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
            matching = storage.match(pattern)
            names = _wanted(matching, format, where=url if warns else None)
            found = {name: matching[name] for name in names}
        else:
            found = {pattern: storage.info(pattern)}
        for name in list(found):  # of a pair such as .bin and .idx, both
            suffix = BESIDE.get(Path(name).suffix)
            if suffix is not None and (beside := str(Path(name).with_suffix(suffix))) not in found:
                with suppress(MissingError):  # the format says what it needs
                    found[beside] = storage.info(beside)
        return found

    files, made = _copied(storage, listing, cache)
    names = [name for name in files if name == pattern or (is_glob and Path(name).suffix not in index_suffixes())]
    return {name: f"{base}/{name}" for name in names}, made


def _copied(storage: Storage, listing: Listing, cache: Cache) -> tuple[dict[str, StoredFile], Snapshot]:
    """The files of the listing, and a local copy of them."""
    try:
        files = listing(True)
        if not files:
            raise UserError(storage.url, "no such directory, or nothing in it that a source reads", "check the URL")
        made = copy(cache, storage, files)
        if made.is_new and listing(False) != files:  # an old copy is whole whatever happens there now
            raise UserError(storage.url, "changed while it was read", "start again, once nobody writes there")
    except StorageError as error:
        fix = "check the URL, the endpoint and the credentials"
        raise UserError(storage.url, f"cannot be read: {error}", fix) from None
    return files, made
