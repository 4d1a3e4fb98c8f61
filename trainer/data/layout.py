"""Finding streams on disk: NESTED (`root/<modality>/.../file`) and DIRECT (files, globs, and
directories by `save_to_disk`)."""

from __future__ import annotations

import glob
import itertools
import json
import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path, PurePath
from typing import NoReturn

from trainer.data.documents import damaged
from trainer.data.formats import (
    FORMATS,
    INDEX_SUFFIXES,
    SUFFIXES,
    SUFFIXES_IN_WORDS,
    format_name,
    is_import_path,
    takes_option,
)
from trainer.errors import UserError
from trainer.wording import counted, few, printable

IGNORED = (".", "_")  # hidden files, and what other programs put next to data (`_SUCCESS`)
# Stems of files that explain data, or belong to a tokenizer.
ABOUT_DATA = {"readme", "license", "manifest", "tokenizer", "tokenizer_config"}
ABOUT_DATA |= {"special_tokens_map", "vocab", "state", "dataset_info", "dataset_dict"}
logger = logging.getLogger("trainer.data")


def fixed_part(pattern: str) -> Path:
    """The part of a glob before the first name that has a wildcard."""
    return Path(*itertools.takewhile(lambda part: not glob.has_magic(part), PurePath(pattern).parts))


def find_files(pattern: str) -> list[str]:
    """The files that a glob matches, sorted, but for those that are hidden or in `IGNORED`
    directories behind its first wildcard. Links are followed as by `files_below`, without `**` all
    but those to directories that they lie in."""
    if os.path.isfile(pattern):  # its name may hold what else is a wildcard
        return [os.path.normpath(pattern)]
    fixed, real = fixed_part(pattern), cache(os.path.realpath)
    wanted = PurePath(pattern).parts[len(fixed.parts) :]
    paths: Iterable[str | Path] = glob.iglob(pattern)
    if "**" in wanted:  # for which glob would follow links in circles
        below = files_below(fixed) if fixed.is_dir() else []
        wanted += ("*",) * (wanted[-1] == "**")
        paths = [path for path in below if _fits(path.relative_to(fixed).parts, wanted)]
    above = [*map(str, PurePath(real(fixed)).parents)]

    def is_meant(path: str) -> bool:
        inside = PurePath(os.path.relpath(path, fixed))
        entered = above + [real(fixed / each) for each in inside.parents]
        return _is_file(path) and not _is_ignored(inside) and len({*entered}) == len(entered)

    return sorted(filter(is_meant, {*map(os.path.normpath, map(str, paths))}))


def _fits(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether the parts of a path are those of a glob, in which `**` is any number of them."""
    ends = {0}  # how many parts the names so far may be
    for name in wanted:
        if name == "**":
            ends = {later for end in ends for later in range(end, len(parts) + 1)}
        else:
            ends = {end + 1 for end in ends - {len(parts)} if fnmatchcase(parts[end], name)}
    return len(parts) in ends


def _is_file(path: str) -> bool:
    """Whether it is a file; also a link to nothing, which `_stream` refuses."""
    return os.path.isfile(path) or not os.path.exists(path)


def _is_ignored(path: PurePath) -> bool:
    """Whether it is hidden, or in an `IGNORED` directory."""
    return path.name.startswith(".") or any(part.startswith(IGNORED) and part != ".." for part in path.parts[:-1])


def files_below(directory: Path) -> list[Path]:
    """The files in a directory and in those below it, each entered once, `IGNORED` ones not at all.

    A link to a directory that it lies in, or to what is found anyway, is not followed. Raises
    UserError: a directory cannot be read.
    """
    root, found, seen = os.path.realpath(directory), [], set()
    for folder, names, files in os.walk(directory, followlinks=True, onerror=_refuse):
        real = os.path.realpath(folder)
        is_link = os.path.islink(folder) and folder != str(directory)
        inside = PurePath(os.path.relpath(real, root), "_")
        is_own = os.path.commonpath([real, root]) in (real, root) and not _is_ignored(inside)
        if real in seen or (is_link and is_own):
            names.clear()
            continue
        seen.add(real)
        names[:] = sorted(name for name in names if not name.startswith(IGNORED))
        found += [Path(folder, name) for name in files if _is_file(os.path.join(folder, name))]
    return found


def _refuse(error: OSError) -> NoReturn:
    raise damaged(error.filename, f"cannot be read: {error.strerror}", "make it readable, or remove it")


def is_data(path: PurePath, format: str) -> bool:
    """Whether a layout reads a file, by its name below the root."""
    is_known = format != "auto" or path.name.lower().endswith(SUFFIXES)
    is_other = path.suffix in INDEX_SUFFIXES or path.name == "manifest.json"
    return is_known and not is_other and not path.name.startswith(IGNORED)


def _may_be_meant(path: PurePath) -> bool:
    """Whether a file that is not read may be meant as data, by its name below the root."""
    is_other = path.suffix in INDEX_SUFFIXES or path.name.lower().partition(".")[0] in ABOUT_DATA
    if path.name.startswith("_"):  # such as _SUCCESS
        is_other = not path.name.lower().endswith(SUFFIXES)
    return not is_other and not _is_ignored(path)


def _sort_out(files: Mapping[str, PurePath], format: str) -> tuple[list[str], list[str]]:
    """The files that a layout reads, and others that may be data, by names below the root."""
    read = [path for path, name in files.items() if is_data(name, format)]
    return read, [path for path in files.keys() - {*read} if _may_be_meant(files[path])]


def warn_unread(where: object, unread: Collection[str]) -> None:
    if unread:
        text = "%s: does not read %s: %s; if they are text, train data build text does, whatever their place and name"
        files = counted(len(unread), "file"), few(sorted(unread))
        logger.warning(text, printable(str(where)), *files)


class NothingFound(UserError):
    """There are no streams."""


def _nothing_found(where: object, unread: Collection[str], fix: str = "") -> NothingFound:
    """The error for a root, modality or glob without streams."""
    problem = "has no stream files"
    if unread:
        problem += f" (it does not read {counted(len(unread), 'file')}: {few(sorted(unread))})"
    return NothingFound(str(where), problem, fix or f"known extensions: {SUFFIXES_IN_WORDS}")


def modalities_of(root: Path) -> dict[str, Path]:
    """The directories in a root, but for `IGNORED` ones, by printable name, which must differ."""
    paths = [path for path in sorted(root.iterdir()) if path.is_dir() and not path.name.startswith(IGNORED)]
    found = {printable(path.name): path for path in paths}
    if len(found) < len(paths):
        raise damaged(root, "has two directories of one printable name", "rename one of them")
    return found


@dataclass(frozen=True)
class Stream:
    stream_id: int  # its index in the sorted list
    path: str  # absolute
    # Its permanent name, part of group ids: relative to the root under NESTED, to the working
    # directory under DIRECT (see `_permanent`).
    relative_path: str
    modality: str  # its label, printable: metric keys and tables hold it
    tokens: str = ""  # `NAME.bin` with its documents, tokenized already; empty if there is none


def refuse_empty_files(empty: Sequence[str], num_files: int) -> None:
    if empty:  # a run that opens them only to read them would end hours later
        problem = f"{counted(len(empty), 'empty file')} of {num_files:,}, which is refused"
        fix = "remove what is empty, or copy the others with train data build text, which skips it"
        raise UserError(few(empty), problem, fix)


def _permanent(directory: str, here: str) -> str:
    """The directory's part of a permanent name under DIRECT, however it is spelled: its path from
    the working directory, `here`; outside of that the absolute one."""
    # Normalized, `//a` stays, and `///a` is `/a`.
    absolute, inside = f"{os.path.normpath('//' + os.path.join(here, directory))}/", os.path.join(here, "")
    if not absolute.startswith(inside):
        real = f"{os.path.realpath(absolute)}/"
        if real.startswith(inside):  # the working directory has another name, by a link
            absolute = real
    return absolute.removeprefix(inside)


def _stream(path: str, relative_path: str, modality: str) -> Stream:
    if not os.path.exists(path):
        raise damaged(path, "cannot be reached", "mount what it links to, or remove it")
    # Absolute: the user's code may leave the working directory before a stream is opened.
    return Stream(0, os.path.join(os.getcwd(), path), relative_path, modality)


def numbered(streams: Collection[Stream], named: Set[str] = frozenset()) -> list[Stream]:
    """The streams by relative path, alike everywhere; of unlisted files those `named` alone."""
    for row in FORMATS.values():
        own = [each.path for each in streams if row.listed and each.path.endswith(row.suffixes)]
        if row.listed is not None and own:
            left_out = {*own} - {*row.listed(own)} - named
            streams = [each for each in streams if each.path not in left_out]
    ordered = sorted(streams, key=lambda stream: stream.relative_path)
    return [replace(stream, stream_id=number) for number, stream in enumerate(ordered)]


def discover_nested(root: str | Path, modalities: Sequence[str] | None = None, *, format: str = "auto") -> list[Stream]:
    """The streams below `root/<modality>/`, sorted by relative path.

    `modalities`: use only these; None: all. `format`: `auto` takes the files with a known
    extension, any other all that `is_data` does not leave out. Raises UserError: there are none, or
    one cannot be reached.
    """
    base = Path(root)
    try:
        directories = modalities_of(base)
    except NotADirectoryError:
        raise UserError(str(root), "is no directory", f'set paths = ["{root}"] instead of root') from None
    except FileNotFoundError:
        fix = f"make it (train data build pytext --out {root}, or build text), or set root"
        raise UserError(str(root), "no such directory", fix) from None
    except OSError as error:
        _refuse(error)
    streams: list[Stream] = []
    unread: list[str] = []
    if modalities is None:  # files in the root itself are of no modality
        names = [path.relative_to(base) for path in base.iterdir() if path.is_file()]
        unread = [str(name) for name in names if _may_be_meant(name)]
    for modality in directories if modalities is None else sorted(set(modalities)):
        if modality not in directories:
            fix = f"it has: {', '.join(directories) or 'none'}"
            raise UserError(str(root), f"has no modality {modality!r}", fix)
        names = [path.relative_to(base) for path in files_below(directories[modality])]
        read, others = _sort_out({name.as_posix(): name for name in names}, format)
        if not read and modalities is not None:
            raise _nothing_found(base / modality, others)
        streams += [_stream(str(base / name), name, modality) for name in read]
        unread += others
    if not streams:
        fix = f"put files into {base}/<modality>/ ({SUFFIXES_IN_WORDS})"
        fix += f', or set paths = ["{base}/*"] instead of root'
        raise _nothing_found(base, unread, fix)
    warn_unread(root, unread)
    return numbered(streams)


def discover_direct(paths: Sequence[str | Path], *, format: str = "auto") -> list[Stream]:
    """The streams of files, of globs, and of directories that hold a format's `marks`, sorted by
    name; the parent directory's name is the modality.

    A file that is named explicitly is used whatever its extension; one that matches a glob must
    have a known extension, unless `format` is set. Warns of files that it leaves out. Raises
    UserError: one of `paths` has nothing to read.
    """
    found: dict[str, Stream] = {}
    unread, named = set[str](), set[str]()
    start = cache(partial(_permanent, here=os.getcwd()))

    def name_of(path: str) -> str:
        return start(os.path.dirname(path)) + os.path.basename(path)

    for given in paths:
        text = os.path.normpath(str(given))
        names: dict[str, PurePath] = {path: PurePath(os.path.basename(path)) for path in find_files(text)}
        for row in FORMATS.values():
            if any(os.path.isfile(os.path.join(text, mark)) for mark in row.marks):
                names = {str(path): path for path in files_below(Path(text)) if path.name.endswith(row.suffixes)}
        read, others = _sort_out(names, format)
        if os.path.isfile(text):
            read, others = [text], []
        if not read:
            if os.path.isdir(text):
                fix = f"write '{glob.escape(text)}/**/*' for its files, or give it alone, as root"
                raise UserError(str(given), "is a directory, not a file or a glob", fix)
            if not glob.has_magic(text) and not os.path.exists(text):
                raise UserError(str(given), "no such file or directory", "check the path")
            raise _nothing_found(given, others)
        unread.update(others)
        for path in read:
            label = printable(os.path.basename(os.path.dirname(os.path.abspath(path)))) or "root"
            name = name_of(path)
            stream = found.setdefault(name, _stream(path, name, label))
            if os.path.isfile(text):
                named.add(stream.path)
    if not found:
        raise UserError("paths", "is empty", "name at least one file or glob")
    warn_unread("paths", {path for path in unread if name_of(path) not in found})
    return numbered(found.values(), named)


def refuse_unheeded(streams: Sequence[Stream], format: str, given: Mapping[str, object], *, source: str = "") -> None:
    """Refuse options that no stream's format takes, such as `eod` for Parquet.

    `given`: option -> its value; None, and `file` as `text_split`, are not given. `source`: how
    messages name it; empty: they do not.
    """
    if is_import_path(format):  # a custom format may take any of them
        return
    names = {format_name(Path(stream.path), format) for stream in streams}
    for option, value in given.items():
        is_given = value is not None and (option, value) != ("text_split", "file")
        if is_given and not any(takes_option(name, option) for name in names):
            takers = [name for name in FORMATS if takes_option(name, option)]
            problem = f"is {json.dumps(value)}, but there are no {' or '.join(takers)} files"
            raise UserError(": ".join(filter(None, [source, option])), problem, "remove it")
