"""Finding streams on disk: NESTED (`root/<modality>/.../file`) and DIRECT (files and globs)."""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainer.data.formats.registry import check_format, index_suffixes, suffixes
from trainer.data.streams.globs import directories, find_files
from trainer.errors import UserError
from trainer.files import did_you_mean
from trainer.wording import counted, few, printable

IGNORED = (".", "_")  # hidden files, and what other programs put beside data (`_SUCCESS`)
COMPRESSED = (".gz", ".zst", ".xz", ".bz2", ".lz4", ".zip")
logger = logging.getLogger("trainer.data")


@dataclass(frozen=True)
class Stream:
    """One file of documents.

    Args:
        stream_id: its index in the sorted list.
        path: the file.
        relative_path: its permanent name (part of group ids): relative to the root under NESTED, the path as given under
            DIRECT.
        modality: its label, printable: metric keys and tables hold it.
    """

    stream_id: int
    path: str
    relative_path: str
    modality: str


def _is_stream_file(path: Path, format: str) -> bool:
    return not path.name.startswith(IGNORED) and _is_data_file(path, format)


def _is_data_file(path: Path, format: str) -> bool:
    """Whether a file is one of documents, but for the beginning of its name."""
    if path.name == "manifest.json" or path.suffix in index_suffixes():
        return False
    return format != "auto" or path.suffix in suffixes()


def wanted(names: Iterable[str], format: str, *, where: str | None) -> list[str]:
    """Of names below a root, those that a layout reads and the index files beside them.

    Args:
        where: warns of others that are named like data there; None: does not.
    """
    listed = [(name, Path(name)) for name in names]
    if where is not None:
        _warn_unread(where, [name for name, path in listed if _looks_like_data(path, format)])
    return [n for n, path in listed if _is_stream_file(path, format) or path.suffix in index_suffixes()]


def refuse_empty(streams: Sequence[Stream]) -> None:
    """Refuse streams of empty files, all of them at once.

    Raises:
        UserError: there are some.
    """
    empty = [stream.path for stream in streams if os.path.isfile(stream.path) and not os.path.getsize(stream.path)]
    refuse_empty_files(empty, len(streams))


def refuse_empty_files(empty: Sequence[str], num_files: int) -> None:
    """Refuse the empty ones of so many files. A run that opened them only to read them would end hours later.

    Raises:
        UserError: there are some.
    """
    if not empty:
        return
    problem = f"{len(empty):,} of {num_files:,} files {'is' if len(empty) == 1 else 'are'} empty, which a run refuses"
    fix = "remove them, or copy the others with train data build text, which skips them"
    raise UserError(few(empty), problem, fix)


def _ignored(names: Sequence[str]) -> str:
    """What to say of files and directories that are left out because of their names; empty if there are none."""
    marked = sorted(name for name in names if os.path.basename(name).startswith("_"))  # hidden files mean nothing here
    return f"skips {len(marked):,} whose names begin with _: {few(marked)}" if marked else ""


def _warn_ignored(where: object, names: Sequence[str]) -> None:
    if ignored := _ignored(names):
        logger.warning("%s: %s; rename those that are data", printable(str(where)), ignored)


def _looks_like_data(path: Path, format: str) -> bool:
    """Whether a file that is not read has documents, as far as its name says: a compressed one, or a suffix in capitals."""
    inner = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    is_known = inner.suffix.lower() in suffixes() and path.suffix not in suffixes()
    return format == "auto" and is_known and not path.name.startswith(IGNORED)


def _warn_unread(where: object, names: Sequence[str]) -> None:
    if names:
        text = "%s: does not read %s named like data: %s; unpack them, or rename them to a known extension (%s)"
        known = " ".join(suffixes())
        logger.warning(text, printable(str(where)), counted(len(names), "file"), few(sorted(names)), known)


def _none(problem: str, names: Sequence[str]) -> str:
    ignored = _ignored(names)
    return f"{problem} (it {ignored})" if ignored else problem


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
        fix = did_you_mean(root) or "set root to a directory with one directory per modality"
        raise UserError(str(root), "no such directory", fix)
    modality_paths = {printable(d.name): d for d in sorted(base.iterdir()) if d.is_dir()}
    present = [name for name in modality_paths if not name.startswith(IGNORED)]
    left_out = [name for name in modality_paths if modalities is None and name not in present]
    found: list[tuple[str, str, str]] = []
    unread: list[str] = []
    for modality in present if modalities is None else sorted(set(modalities)):
        if modality not in present:
            problem = f"ignores {modality!r}" if modality in modality_paths else f"has no modality {modality!r}"
            raise UserError(str(root), problem, f"it has: {', '.join(present) or 'none'}")
        all_files = [path for path in _files_below(modality_paths[modality]) if path.is_file()]
        files = [path for path in all_files if _is_data_file(path, format)]
        unread += [path.relative_to(base).as_posix() for path in all_files if _looks_like_data(path, format)]
        ignored = [path.relative_to(base).as_posix() for path in files if path.name.startswith(IGNORED)]
        if len(files) == len(ignored) and modalities is not None:
            problem = _none("has no stream files", ignored)
            raise UserError(str(base / modality), problem, f"known extensions: {' '.join(suffixes())}")
        left_out += ignored
        kept = [path for path in files if not path.name.startswith(IGNORED)]
        found += [(path.relative_to(base).as_posix(), str(path), modality) for path in kept]
    if not found:
        fix = f"put files into {base}/<modality>/ ({' '.join(suffixes())})"
        raise UserError(str(root), _none("has no stream files", left_out), fix)
    _warn_ignored(root, left_out)
    _warn_unread(root, unread)
    return _numbered(found)


def _files_below(directory: Path) -> Iterator[Path]:
    """What lies in a directory and in those below it, also behind links, as in a glob: each directory is entered once."""
    for below in directories(str(directory), enters_hidden=True):
        yield from Path(below).iterdir()


def discover_direct(paths: Sequence[str | Path], *, format: str = "auto") -> list[Stream]:
    """The streams of a list of files and globs, sorted by path; the modality is the name of the parent directory.

    A file that is named explicitly is used whatever its extension; one that matches a glob must have a known extension,
    unless `format` is set.

    Raises:
        UserError: no such format; a path or glob that matches nothing.
    """
    check_format(format)
    found: dict[str, tuple[str, str, str]] = {}
    left_out: list[str] = []
    unread: list[str] = []
    for given in paths:
        text = os.path.normpath(str(given))
        if os.path.isfile(text):
            matches = [text]
        else:
            named = find_files(text)
            data = [m for m in named if _is_data_file(Path(m), format)]
            unread += [m for m in named if _looks_like_data(Path(m), format)]
            matches = [m for m in data if not os.path.basename(m).startswith(IGNORED)]
            left_out += [m for m in data if os.path.basename(m).startswith(IGNORED)]
        if not matches and not glob.has_magic(text) and not os.path.exists(text):
            raise UserError(str(given), "no such file or directory", did_you_mean(text) or "check the path")
        if not matches:
            problem = _none("names no stream file", left_out)
            raise UserError(str(given), problem, f"known extensions: {' '.join(suffixes())}")
        for match in matches:
            label = printable(os.path.basename(os.path.dirname(os.path.abspath(match))))
            found[match] = (Path(match).as_posix(), match, label)
    if not found:
        raise UserError("paths", "is empty", "name at least one file or glob")
    _warn_ignored("paths", [name for name in left_out if name not in found])
    _warn_unread("paths", [name for name in unread if name not in found])
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
    copies: tuple[object, ...] = ()
    """Local copies of what URLs name; they stay while this exists."""


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
