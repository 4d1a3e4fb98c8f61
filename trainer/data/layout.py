"""Finding streams on disk: NESTED (`root/<modality>/.../file`) and DIRECT (files and globs), and what neither reads.

Globs are ours: their `**` enters every directory once, so that a link to an ancestor ends.
"""

from __future__ import annotations

import glob
import json
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path, PurePath
from typing import Literal

from trainer.data.formats import (
    FORMATS,
    check_format,
    format_name,
    index_suffixes,
    is_import_path,
    suffixes,
    takes_option,
)
from trainer.errors import UserError
from trainer.files import did_you_mean
from trainer.wording import counted, few, printable

IGNORED = (".", "_")  # hidden files, and what other programs put next to data (`_SUCCESS`)
COMPRESSED = (".gz", ".zst", ".xz", ".bz2", ".lz4", ".zip")
BESIDE_DATA = ("manifest.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json")
ABOUT_DATA = ("readme", "license", "licence", "copying", "notice", "authors", "citation", "changelog", "makefile")
NO_DATA = (".pyc", ".toml", ".lock", ".md5", ".sha256")
logger = logging.getLogger("trainer.data")


def find_files(pattern: str) -> list[str]:
    """The files that a glob matches, sorted; `**` as a whole path component crosses directories, hidden ones excepted.

    `glob.glob` follows a link to an ancestor again and again until the path is too long. Here a directory that is
    reached by several ways is entered once, by a link only if there is no other way.
    """
    return sorted({path.removeprefix(f".{os.sep}") for path in _matches(pattern) if os.path.isfile(path)})


def _matches(pattern: str) -> Iterator[str]:
    parts = pattern.split(os.sep)
    if "**" not in parts:
        yield from glob.iglob(pattern)
        return
    at = parts.index("**")
    rest = [part for part in parts[at + 1 :] if part] or ["*"]
    head = os.sep.join(parts[:at]) or (os.sep if at else os.curdir)
    for base in glob.iglob(head):
        for directory in _directories(base):
            yield from _matches(os.path.join(glob.escape(directory), *rest))


def named_directory(path: str) -> str:
    """The directory that a file lies in, or that a glob searches: what comes before its first part with a wildcard."""
    parts = path.split(os.sep)
    is_glob = not os.path.isfile(path)
    fixed = next((i for i, part in enumerate(parts[:-1]) if is_glob and glob.has_magic(part)), len(parts) - 1)
    return os.sep.join(parts[:fixed]) or (os.sep if path.startswith(os.sep) else os.curdir)


def _directories(base: str, *, enters_hidden: bool = False) -> Iterator[str]:
    """`base` and all directories below it, each once; no links to what is below it anyway."""
    root, seen = os.path.join(os.path.realpath(base), ""), set()
    for directory, names, _ in os.walk(base, followlinks=True):
        real = os.path.realpath(directory)
        if real in seen or (os.path.islink(directory) and directory != base and f"{real}/".startswith(root)):
            names.clear()
            continue
        seen.add(real)
        names[:] = sorted(name for name in names if enters_hidden or not name.startswith("."))
        yield directory


def _files_below(directory: Path) -> list[Path]:
    """The files in a directory and in those below it, also behind links: each directory is entered once."""
    below = _directories(str(directory), enters_hidden=True)
    return [path for each in below for path in Path(each).iterdir() if path.is_file()]


Sort = Literal["data", "unread", "other"]


def sort_of(path: PurePath, format: str) -> Sort:
    """What a layout makes of a file, by its name below the root; `unread` may be meant as data, and is not read."""
    is_index, is_hidden = path.suffix in index_suffixes(), path.name.startswith(".")
    if path.name != "manifest.json" and not is_index and (format != "auto" or path.suffix in suffixes()):
        return "other" if is_hidden else "unread" if path.name.startswith("_") else "data"
    is_known = is_index or path.suffix.lower() in NO_DATA or any(part.startswith(IGNORED) for part in path.parts)
    return "other" if is_known or _is_about_data(path) else "unread"


def _is_about_data(path: PurePath) -> bool:
    return path.name in BESIDE_DATA or path.name.lower().partition(".")[0] in ABOUT_DATA


def _not_read(unread: Iterable[str]) -> str:
    """What to say of files that a layout leaves out; empty if there are none."""
    names = sorted(unread)
    kinds = sorted(
        {"_*" if PurePath(name).name.startswith("_") else PurePath(name).suffix or "no extension" for name in names}
    )
    return f"does not read {counted(len(names), 'file')} ({few(kinds)}): {few(names)}" if names else ""


def warn_unread(where: object, unread: Iterable[str]) -> None:
    """Warn of files that a layout leaves out, if there are any."""
    if said := _not_read(unread):
        text = "%s: %s; if they are data, rename them (known extensions: %s), unpack or convert them, or set format"
        logger.warning(text, printable(str(where)), said, " ".join(suffixes()))


def _nothing_found(where: object, unread: Iterable[str], fix: str = "") -> UserError:
    """The error for a root, modality or glob without streams."""
    said = _not_read(unread)
    problem = "has no stream files" + (f" (it {said})" if said else "")
    return UserError(str(where), problem, fix or f"known extensions: {' '.join(suffixes())}")


def loose_files(root: Path, format: str) -> list[str]:
    """Names of files in the root itself that may be meant as data, which NESTED does not read."""
    return sorted(path.name for path in root.iterdir() if path.is_file() and _may_be_data(Path(path.name), format))


def _may_be_data(path: PurePath, format: str) -> bool:
    sort = sort_of(path, format)
    return sort == "unread" or (sort == "data" and not _is_about_data(path))


def unread_parts(root: Path, read: Collection[str] | None, format: str) -> tuple[list[str], list[str]]:
    """The other modalities of a root besides those that are read (None: all), and the files in no modality's directory."""
    others = {} if read is None else {printable(path.name): path for path in sorted(root.iterdir()) if path.is_dir()}
    modalities = [
        name
        for name, path in others.items()
        if not name.startswith(IGNORED)
        and name not in (read or ())
        and any(_may_be_data(file.relative_to(path), format) for file in _files_below(path))
    ]
    return modalities, loose_files(root, format)


@dataclass(frozen=True)
class Stream:
    """One file of documents.

    Args:
        stream_id: its index in the sorted list.
        path: the file, absolute.
        relative_path: its permanent name (part of group ids): relative to the root under NESTED, to the working
            directory under DIRECT (see `_permanent`).
        modality: its label, printable: metric keys and tables hold it.
        root: the directory it was looked for in: under DIRECT, the one that its path or glob names.
        tokens: its documents, tokenized already, as `NAME.bin` with `NAME.idx`; empty if there are none.
    """

    stream_id: int
    path: str
    relative_path: str
    modality: str
    root: str = ""
    tokens: str = ""


def refuse_empty_files(empty: Sequence[str], num_files: int) -> None:
    """Refuse the empty ones of so many files. A run that opened them only to read them would end hours later."""
    if empty:
        is_or_are = "is" if len(empty) == 1 else "are"
        problem = f"{len(empty):,} of {num_files:,} files {is_or_are} empty, which a run refuses"
        fix = "remove them, or copy the others with train data build text, which skips them"
        raise UserError(few(empty), problem, fix)


def _permanent(directory: str, here: str) -> str:
    """What the names of the files in a directory begin with under DIRECT, however it is spelled: its path from the working
    directory, `here`; outside of that the absolute one, which is the same wherever a run starts."""
    absolute, inside = os.path.normpath(os.path.join(here, directory)), os.path.join(here, "")
    if not f"{absolute}/".startswith(inside):  # the working directory may have another name, by a link
        real = os.path.realpath(absolute)
        absolute = real if f"{real}/".startswith(inside) else absolute
    return f"{absolute}/".removeprefix(inside)


def renamed(streams: Sequence[Stream], names: Mapping[str, str]) -> list[Stream]:
    """Streams of files that had other names: name -> the permanent one. Their modality is that of the directory it names."""
    found = []
    for stream in streams:
        name = names.get(stream.relative_path, stream.relative_path)
        folder = os.path.basename(os.path.dirname(name))
        label = printable(folder) if folder and name != stream.relative_path else stream.modality
        found.append(replace(stream, relative_path=name, modality=label))
    ordered = sorted(found, key=lambda stream: stream.relative_path)
    return [replace(stream, stream_id=number) for number, stream in enumerate(ordered)]


def _numbered(found: Iterable[tuple[str, str, str, str]]) -> list[Stream]:
    """Streams from (relative path, path, modality, root), sorted by relative path, in the same order on every machine."""
    here = os.getcwd()  # which the user's code may leave before a stream is opened
    return [
        Stream(i, os.path.join(here, path), relative, modality, os.path.join(here, root))
        for i, (relative, path, modality, root) in enumerate(sorted(found))
    ]


def discover_nested(root: str | Path, modalities: Sequence[str] | None = None, *, format: str = "auto") -> list[Stream]:
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
    directories = {printable(path.name): path for path in sorted(base.iterdir()) if path.is_dir()}
    present = [name for name in directories if not name.startswith(IGNORED)]
    unread = [name for name in directories if modalities is None and name.startswith("_")]
    streams: list[tuple[str, str, str, str]] = []
    for modality in present if modalities is None else sorted(set(modalities)):
        if modality not in present:
            raise UserError(str(root), f"has no modality {modality!r}", f"it has: {', '.join(present) or 'none'}")
        sorts = [(path, sort_of(path.relative_to(base), format)) for path in _files_below(directories[modality])]
        found = [
            (path.relative_to(base).as_posix(), str(path), modality, str(base))
            for path, sort in sorts
            if sort == "data"
        ]
        others = [path.relative_to(base).as_posix() for path, sort in sorts if sort == "unread"]
        if not found and modalities is not None:
            raise _nothing_found(base / modality, others)
        streams += found
        unread += others
    if not streams:
        loose = loose_files(base, format)
        read = [name for name in loose if sort_of(PurePath(name), format) == "data"]
        fix = f"put files into {base}/<modality>/ ({' '.join(suffixes())})"
        if read:
            pattern = os.path.join(glob.escape(str(base)), "*")
            fix += f', or read those that lie in it ({few(read)}) with paths = ["{pattern}"] instead of root'
        raise _nothing_found(base, [*unread, *(name for name in loose if name not in read)], fix)
    warn_unread(root, unread)
    return _numbered(streams)


def discover_direct(paths: Sequence[str | Path], *, format: str = "auto") -> list[Stream]:
    """The streams of a list of files and globs, sorted by name; the modality is the name of the parent directory.

    A file that is named explicitly is used whatever its extension; one that matches a glob must have a known extension,
    unless `format` is set.

    Raises:
        UserError: no such format; a path or glob that matches nothing.
    """
    check_format(format)
    found: dict[str, tuple[str, str, str, str]] = {}
    unread: set[str] = set()
    start = cache(partial(_permanent, here=os.getcwd()))

    def name_of(path: str) -> str:
        return start(os.path.dirname(path)) + os.path.basename(path)

    for given in paths:
        text = os.path.normpath(str(given))
        is_file = os.path.isfile(text)
        matched = [text] if is_file else find_files(text)
        read = [path for path in matched if is_file or sort_of(PurePath(os.path.basename(path)), format) == "data"]
        others = {path for path in matched if sort_of(PurePath(os.path.basename(path)), format) == "unread"}
        if not read:
            if os.path.isdir(text):
                fix = f"write '{text}/**/*' for the files below it, or name it alone (in a config: as root of a source)"
                raise UserError(str(given), "is a directory, and only files and globs can be listed", fix)
            if not glob.has_magic(text) and not os.path.exists(text):
                raise UserError(str(given), "no such file or directory", did_you_mean(text) or "check the path")
            raise _nothing_found(given, others)
        unread |= others
        for path in read:
            label = printable(os.path.basename(os.path.dirname(os.path.abspath(path))))
            name = name_of(path)
            found.setdefault(name, (name, path, label, named_directory(text)))
    if not found:
        raise UserError("paths", "is empty", "name at least one file or glob")
    warn_unread("paths", {path for path in unread if name_of(path) not in found})
    return _numbered(found.values())


@dataclass(frozen=True)
class Discovery:
    """The streams at a user's paths, and how a config's source names them: `root` (nested) or `paths` (direct)."""

    layout: Literal["nested", "direct"]
    streams: list[Stream]
    root: str | None = None
    paths: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()  # files in the root itself, which NESTED does not read
    copies: tuple[object, ...] = ()  # local copies of what URLs name; they stay while this exists


def refuse_unheeded(streams: Sequence[Stream], format: str, given: Mapping[str, object], *, source: str = "") -> None:
    """Refuse `dtype`, `eod`, `text_split` and `column` where no stream is of a format that takes them.

    Args:
        streams, format: of the source.
        given: option -> its value; None, and `file` as `text_split`, are not given.
        source: how messages name it; empty: they do not.
    """
    if is_import_path(format):  # a custom format may take any of them
        return
    names = {format_name(Path(stream.path), format) for stream in streams}
    for option, value in given.items():
        is_given = value is not None and (option, value) != ("text_split", "file")
        if is_given and not any(takes_option(name, option) for name in names):
            takers = [name for name in FORMATS if takes_option(name, option)]
            problem = f"is {json.dumps(value)}, but there are no {' or '.join(takers)} files"
            fix = "remove it" + (": the index of a .bin file defines it" if "megatron" in names else "")
            raise UserError(f"{source}: {option}" if source else option, problem, fix)
