"""Finding streams on disk: NESTED (`root/<modality>/.../file`) and DIRECT (files and globs)."""

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
        path: the file.
        relative_path: its permanent name (part of group ids): relative to the root under NESTED, the path as given under
            DIRECT.
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
    """Streams from (relative path, path, modality), sorted by relative path, in the same order on every machine."""
    return [Stream(i, path, relative, modality) for i, (relative, path, modality) in enumerate(sorted(found))]


def discover_nested(
    root: str | Path,
    modalities: Sequence[str] | None = None,
    *,
    format: str = "auto",
) -> list[Stream]:
    """The streams below `root/<modality>/`, sorted by relative path.

    Args:
        root: the directory with one directory per modality.
        modalities: use only these; None: all.
        format: `auto` takes the files with a known extension; a named format takes every file.

    Raises:
        UserError: no such format, directory or modality, or a requested modality without streams.
    """
    check_format(format)
    base = Path(root)
    if not base.is_dir():
        raise UserError(str(root), "no such directory", "set root to a directory with one directory per modality")
    present = sorted(d.name for d in base.iterdir() if d.is_dir() and not d.name.startswith((".", "_")))
    found: list[tuple[str, str, str]] = []
    for modality in present if modalities is None else sorted(set(modalities)):
        if modality not in present:
            raise UserError(str(root), f"has no modality {modality!r}", f"it has: {', '.join(present) or 'none'}")
        files = [path for path in (base / modality).rglob("*") if path.is_file() and _is_stream_file(path, format)]
        if not files and modalities is not None:
            raise UserError(str(base / modality), "has no stream files", f"known extensions: {' '.join(suffixes())}")
        found += [(path.relative_to(base).as_posix(), str(path), modality) for path in files]
    if not found:
        raise UserError(str(root), "has no stream files", f"put files into {base}/<modality>/ ({' '.join(suffixes())})")
    return _numbered(found)


def discover_direct(paths: Sequence[str | Path], *, format: str = "auto") -> list[Stream]:
    """The streams of a list of files and globs, sorted by path; the modality is the name of the parent directory.

    A file that is named explicitly is used whatever its extension; one that matches a glob must have a known extension,
    unless `format` is set.

    Raises:
        UserError: no such format; a path or glob that matches nothing.
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
            raise UserError(str(given), "names no stream file", f"known extensions: {' '.join(suffixes())}")
        for match in matches:
            found[match] = (Path(match).as_posix(), match, os.path.basename(os.path.dirname(os.path.abspath(match))))
    if not found:
        raise UserError("paths", "is empty", "name at least one file or glob")
    return _numbered(list(found.values()))


@dataclass(frozen=True)
class Discovery:
    """The streams at a user's paths, and how a config's source names them: `root` (nested) or `paths` (direct)."""

    layout: Literal["nested", "direct"]
    streams: list[Stream]
    root: str | None = None
    paths: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    """Files with a known extension in the root itself, which NESTED does not read."""


def discover(paths: Sequence[str], *, format: str = "auto") -> Discovery:
    """A single directory with one directory per modality is NESTED; anything else is DIRECT.

    Raises:
        UserError: no stream is found.
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
