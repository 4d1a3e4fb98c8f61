"""Finding streams on the disk: NESTED (`root/<modality>/.../file`) and DIRECT (files and globs)."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainer.data.formats.registry import check_format, index_suffixes, suffixes
from trainer.errors import UserError


@dataclass(frozen=True)
class Stream:
    """One file of documents.

    Args:
        stream_id: its index in the sorted list.
        path: where it lies.
        relative_path: what names it for ever (group ids are made of it): below the root under NESTED, the path as
            it was given under DIRECT.
        modality: its label.
    """

    stream_id: int
    path: str
    relative_path: str
    modality: str


def _is_stream_file(path: Path, format: str) -> bool:
    if path.name.startswith((".", "_")) or path.name == "manifest.json":
        return False
    if path.suffix in index_suffixes():
        return False
    return format != "auto" or path.suffix in suffixes()


def _numbered(found: list[tuple[str, str, str]]) -> list[Stream]:
    """(relative path, path, modality) to streams, in the order of the relative paths' bytes on every machine."""
    return [Stream(i, path, relative, modality) for i, (relative, path, modality) in enumerate(sorted(found))]


def discover_nested(
    root: str | Path,
    modalities: Sequence[str] | None = None,
    *,
    format: str = "auto",
) -> list[Stream]:
    """The streams below `root/<modality>/`, sorted by relative path.

    Args:
        root: the directory with one directory a modality.
        modalities: take these only; None: all.
        format: `auto` takes the files whose ending a format is told by; a named format takes every file.

    Raises:
        UserError: no such format, directory or modality, or no stream in one that was asked for.
    """
    check_format(format)
    base = Path(root)
    if not base.is_dir():
        raise UserError(str(root), "no such directory", "set root to a directory with one directory a modality")
    present = sorted(d.name for d in base.iterdir() if d.is_dir() and not d.name.startswith((".", "_")))
    found: list[tuple[str, str, str]] = []
    for modality in present if modalities is None else sorted(set(modalities)):
        if modality not in present:
            raise UserError(str(root), f"has no modality {modality!r}", f"it has: {', '.join(present) or 'none'}")
        files = [path for path in (base / modality).rglob("*") if path.is_file() and _is_stream_file(path, format)]
        if not files and modalities is not None:
            raise UserError(str(base / modality), "has no stream files", f"endings looked for: {' '.join(suffixes())}")
        found += [(path.relative_to(base).as_posix(), str(path), modality) for path in files]
    if not found:
        raise UserError(str(root), "has no stream files", f"put files into {base}/<modality>/ ({' '.join(suffixes())})")
    return _numbered(found)


def discover_direct(paths: Sequence[str | Path], *, format: str = "auto") -> list[Stream]:
    """The streams that a list of files and globs names, sorted by path; the modality is the parent directory's name.

    A file that is named outright is taken whatever its ending; one that only a glob names must have a known ending,
    unless `format` is set.

    Raises:
        UserError: no such format; a path or glob that names nothing.
    """
    check_format(format)
    found: dict[str, tuple[str, str, str]] = {}
    for given in paths:
        text = os.path.normpath(str(given))
        if os.path.isfile(text):
            matches = [text]
        else:
            matches = [m for m in glob.glob(text, recursive=True) if os.path.isfile(m)]
            matches = [m for m in matches if _is_stream_file(Path(m), format)]
        if not matches and not glob.has_magic(text) and not os.path.exists(text):
            raise UserError(str(given), "no such file or directory", "check the path")
        if not matches:
            raise UserError(str(given), "names no stream file", f"endings looked for: {' '.join(suffixes())}")
        for match in matches:
            found[match] = (Path(match).as_posix(), match, os.path.basename(os.path.dirname(os.path.abspath(match))))
    if not found:
        raise UserError("paths", "is empty", "name at least one file or glob")
    return _numbered(list(found.values()))


@dataclass(frozen=True)
class Discovery:
    """The streams that a user's paths mean, and how a source of a config says it: `root` (nested) or `paths` (direct)."""

    layout: Literal["nested", "direct"]
    streams: list[Stream]
    root: str | None = None
    paths: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    """Files of a known ending that lie in the root itself, where NESTED does not look."""


def discover(paths: Sequence[str], *, format: str = "auto") -> Discovery:
    """A single directory with a directory a modality is NESTED; files, globs and any other directory are DIRECT.

    Raises:
        UserError: nothing is there.
    """
    directory = Path(paths[0])
    if len(paths) > 1 or not directory.is_dir():
        return Discovery("direct", discover_direct(paths, format=format), paths=tuple(paths))
    own = tuple(sorted(p.name for p in directory.iterdir() if p.is_file() and _is_stream_file(p, format)))
    try:
        return Discovery("nested", discover_nested(directory, format=format), root=paths[0], left_out=own)
    except UserError:
        if not own:
            raise
        pattern = os.path.join(glob.escape(paths[0]), "*")
        return Discovery("direct", discover_direct([pattern], format=format), paths=(pattern,))
