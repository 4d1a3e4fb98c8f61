"""The streams of sources that are URLs: everything after this reads local copies, under the names of the objects."""

from __future__ import annotations

import glob
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from trainer.data.formats.registry import FORMATS, check_format, index_suffixes
from trainer.data.stored.cache import Cache, Snapshot
from trainer.data.streams.layout import Discovery, Stream, discover_direct, discover_nested, wanted
from trainer.errors import UserError
from trainer.storage import MissingError, Storage, StorageError, StoredFile, is_url

BESIDE = {suffix: each.beside for each in FORMATS.values() if each.beside for suffix in each.suffixes}
Listing = Callable[[bool], dict[str, StoredFile]]
"""What a source reads of a store; the argument: whether to warn of what it does not read."""


def stored_nested(
    url: str, modalities: Sequence[str] | None, *, format: str, cache: Cache
) -> tuple[list[Stream], Snapshot]:
    """As `discover_nested`, for the objects below `url/<modality>/`; names are those of a local copy of the corpus.

    Raises:
        UserError: as `discover_nested` and `Cache.copy`; or the store cannot be read.
    """
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
    """As `discover_direct`, where some of the paths are URLs of objects or globs over them; their names are the URLs.

    Raises:
        UserError: as `discover_direct` and `Cache.copy`; or the store cannot be read.
    """
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
            urls[path] = url
            local.append(path)
    streams = [
        replace(stream, relative_path=urls.get(stream.relative_path, stream.relative_path))
        for stream in discover_direct(local, format=format)
    ]
    ordered = sorted(streams, key=lambda stream: stream.relative_path)
    return [replace(stream, stream_id=i) for i, stream in enumerate(ordered)], tuple(copies)


def discover_stored(paths: Sequence[str], *, format: str, cache: Cache) -> Discovery:
    """As `discover`, for paths some of which are URLs.

    Raises:
        UserError: no stream is found, or the store cannot be read.
    """
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
    """What the listing gives, and a local copy of it.

    Raises:
        UserError: it gives nothing; the store cannot be read; objects changed meanwhile; as `Cache.copy`.
    """
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
