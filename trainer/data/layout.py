"""Globs whose `**` enters every directory once, so that a link to an ancestor ends.

Files and modalities that no source reads, so that nothing vanishes without a word.

Finding streams on disk: NESTED (`root/<modality>/.../file`) and DIRECT (files and globs).

Options of reading that no file of a source heeds: they would be ignored without a word."""

from __future__ import annotations

import glob
import json
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Literal

from trainer.data.formats import (
    check_format,
    format_name,
    formats_with,
    index_suffixes,
    is_import_path,
    suffixes,
    takes_option,
)
from trainer.errors import UserError
from trainer.files import did_you_mean
from trainer.wording import counted, few, printable


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
        for directory in directories(base):
            yield from _matches(os.path.join(glob.escape(directory), *rest))


def named_directory(path: str) -> str:
    """The directory that a file lies in, or that a glob searches: what comes before its first part with a wildcard."""
    parts = path.split(os.sep)
    is_glob = not os.path.isfile(path)
    fixed = next((i for i, part in enumerate(parts[:-1]) if is_glob and glob.has_magic(part)), len(parts) - 1)
    return os.sep.join(parts[:fixed]) or (os.sep if path.startswith(os.sep) else os.curdir)


def directories(base: str, *, enters_hidden: bool = False) -> Iterator[str]:
    """`base` and all directories below it, each once; directories before links to them."""
    seen: set[tuple[int, int]] = set()
    own: list[str] = [base]
    links: list[str] = []
    while own or links:
        directory = own.pop() if own else links.pop()
        try:
            status = os.stat(directory)
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            with os.scandir(directory) as found:
                entries = sorted(found, key=lambda entry: entry.name, reverse=True)
        except OSError:  # no directory, or one that may not be read: a glob matches nothing there
            continue
        yield directory
        for entry in entries:
            if (enters_hidden or not entry.name.startswith(".")) and entry.is_dir():
                (links if entry.is_symlink() else own).append(entry.path)


def files_below(directory: Path) -> Iterator[Path]:
    """What lies in a directory and in those below it, also behind links, as in a glob: each directory is entered once."""
    for below in directories(str(directory), enters_hidden=True):
        yield from Path(below).iterdir()


IGNORED = (".", "_")  # hidden files, and what other programs put beside data (`_SUCCESS`)
COMPRESSED = (".gz", ".zst", ".xz", ".bz2", ".lz4", ".zip")
BESIDE_DATA = ("manifest.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json")
ABOUT_DATA = ("readme", "license", "licence", "copying", "notice", "authors", "citation", "changelog", "makefile")
NO_DATA = (".pyc", ".toml", ".lock", ".md5", ".sha256")
logger = logging.getLogger("trainer.data")


def is_data_file(path: PurePath, format: str) -> bool:
    """Whether a file is one of documents, but for the beginning of its name."""
    if path.name == "manifest.json" or path.suffix in index_suffixes():
        return False
    return format != "auto" or path.suffix in suffixes()


def is_stream_file(path: PurePath, format: str) -> bool:
    """Whether a layout reads the file."""
    return not path.name.startswith(IGNORED) and is_data_file(path, format)


def is_unread(path: PurePath, format: str) -> bool:
    """Whether a file that no format reads may be meant as data.

    Args:
        path: of the file below its root; what lies in hidden directories is not meant.
    """
    if is_data_file(path, format) or path.suffix in index_suffixes() or path.suffix.lower() in NO_DATA:
        return False
    return not (any(part.startswith(IGNORED) for part in path.parts) or _is_about_data(path))


def _is_about_data(path: PurePath) -> bool:
    return path.name in BESIDE_DATA or path.name.lower().partition(".")[0] in ABOUT_DATA


def unread(names: Sequence[str]) -> str:
    """What to say of files with extensions that are not known; empty if there are none."""
    if not names:
        return ""
    kinds = sorted({PurePath(name).suffix or "no extension" for name in names})
    return f"does not read {counted(len(names), 'file')} ({few(kinds)}): {few(sorted(names))}"


def ignored(names: Sequence[str]) -> str:
    """What to say of files and directories that are left out because of their names; empty if there are none."""
    marked = sorted(name for name in names if os.path.basename(name).startswith("_"))  # hidden files mean nothing here
    return f"skips {len(marked):,} whose names begin with _: {few(marked)}" if marked else ""


def warn(where: object, *, skipped: Sequence[str] = (), unknown: Sequence[str] = ()) -> None:
    """Warn about files that a layout does not read: a line each for those `ignored` and those `unread`."""
    place = printable(str(where))
    if said := ignored(skipped):
        logger.warning("%s: %s; rename those that are data", place, said)
    if said := unread(unknown):
        text = "%s: %s; unpack or convert those that are data, set format, or rename them to a known extension (%s)"
        logger.warning(text, place, said, " ".join(suffixes()))


def loose_files(root: Path, format: str) -> list[str]:
    """Names of files in the root itself that may be meant as data, which NESTED does not read."""
    names = (path.name for path in root.iterdir() if path.is_file())
    return sorted(name for name in names if _may_be_data(PurePath(name), format))


def _may_be_data(path: PurePath, format: str) -> bool:
    return (is_stream_file(path, format) and not _is_about_data(path)) or is_unread(path, format)


@dataclass(frozen=True)
class UnreadParts:
    """What some sources leave of a root: modalities, and files in no modality's directory."""

    modalities: list[str]
    files: list[str]


def unread_parts(root: Path, read: Collection[str] | None, format: str) -> UnreadParts:
    """What is in a root beside the modalities that are read.

    Args:
        read: names of modalities; None: all of them.
    """
    modalities = []
    for path in sorted(root.iterdir()) if read is not None else ():
        name = printable(path.name)
        if path.is_dir() and not name.startswith(IGNORED) and name not in (read or ()):
            inner = (file.relative_to(path) for file in files_below(path) if file.is_file())
            if any(_may_be_data(file, format) for file in inner):
                modalities.append(name)
    return UnreadParts(modalities, loose_files(root, format))


@dataclass(frozen=True)
class Stream:
    """One file of documents.

    Args:
        stream_id: its index in the sorted list.
        path: the file, absolute.
        relative_path: its permanent name (part of group ids): relative to the root under NESTED, the path as given under
            DIRECT.
        modality: its label, printable: metric keys and tables hold it.
        root: the directory it was looked for in: under DIRECT, the one that its path or glob names.
        tokens: its documents, tokenized already, as `NAME.bin` with `NAME.idx` beside it; empty if there are none.
    """

    stream_id: int
    path: str
    relative_path: str
    modality: str
    root: str = ""
    tokens: str = ""


def wanted(names: Iterable[str], format: str, *, where: str | None) -> list[str]:
    """Of names below a root, those that a layout reads and the index files beside them.

    Args:
        where: warns of others that are named like data there; None: does not.
    """
    listed = [(name, Path(name)) for name in names]
    if where is not None:
        warn(where, unknown=[name for name, path in listed if is_unread(path, format)])
    return [n for n, path in listed if is_stream_file(path, format) or path.suffix in index_suffixes()]


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


def _none(problem: str, skipped: Sequence[str], unknown: Sequence[str]) -> str:
    said = ", and ".join(part for part in (ignored(skipped), unread(unknown)) if part)
    return f"{problem} (it {said})" if said else problem


def _numbered(found: list[tuple[str, str, str, str]]) -> list[Stream]:
    """Streams from (relative path, path, modality, root), sorted by relative path, in the same order on every machine."""
    here = os.getcwd()  # which the user's code may leave before a stream is opened
    return [
        Stream(i, os.path.join(here, path), relative, modality, os.path.join(here, root))
        for i, (relative, path, modality, root) in enumerate(sorted(found))
    ]


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
    skipped = [name for name in modality_paths if modalities is None and name not in present]
    found: list[tuple[str, str, str, str]] = []
    unknown: list[str] = []
    for modality in present if modalities is None else sorted(set(modalities)):
        if modality not in present:
            problem = f"ignores {modality!r}" if modality in modality_paths else f"has no modality {modality!r}"
            raise UserError(str(root), problem, f"it has: {', '.join(present) or 'none'}")
        all_files = [path for path in files_below(modality_paths[modality]) if path.is_file()]
        files = [path for path in all_files if is_data_file(path, format)]
        unknown_here = [below for path in all_files if is_unread(below := path.relative_to(base), format)]
        marked = [path.relative_to(base).as_posix() for path in files if path.name.startswith(IGNORED)]
        unknown += [path.as_posix() for path in unknown_here]
        if len(files) == len(marked) and modalities is not None:
            problem = _none("has no stream files", marked, [path.as_posix() for path in unknown_here])
            raise UserError(str(base / modality), problem, f"known extensions: {' '.join(suffixes())}")
        skipped += marked
        kept = [path for path in files if not path.name.startswith(IGNORED)]
        found += [(path.relative_to(base).as_posix(), str(path), modality, str(base)) for path in kept]
    if not found:
        raise _no_stream(base, format, skipped, unknown)
    warn(root, skipped=skipped, unknown=unknown)
    return _numbered(found)


def _no_stream(base: Path, format: str, skipped: Sequence[str], unknown: Sequence[str]) -> UserError:
    """What to say of a root without streams: files may lie in it directly, or have other extensions."""
    loose = loose_files(base, format)
    read = [name for name in loose if is_stream_file(Path(name), format)]
    problem = _none("has no stream files", skipped, [*unknown, *(name for name in loose if name not in read)])
    fix = f"put files into {base}/<modality>/ ({' '.join(suffixes())})"
    if read:
        pattern = os.path.join(glob.escape(str(base)), "*")
        fix += f', or read those that lie in it ({few(read)}) with paths = ["{pattern}"] instead of root'
    return UserError(str(base), problem, fix)


def discover_direct(paths: Sequence[str | Path], *, format: str = "auto") -> list[Stream]:
    """The streams of a list of files and globs, sorted by path; the modality is the name of the parent directory.

    A file that is named explicitly is used whatever its extension; one that matches a glob must have a known extension,
    unless `format` is set.

    Raises:
        UserError: no such format; a path or glob that matches nothing.
    """
    check_format(format)
    found: dict[str, tuple[str, str, str, str]] = {}
    skipped: list[str] = []
    unknown: list[str] = []
    for given in paths:
        text = os.path.normpath(str(given))
        if os.path.isfile(text):
            matches = [text]
        else:
            named = find_files(text)
            data = [m for m in named if is_data_file(Path(m), format)]
            others = [m for m in named if is_unread(Path(os.path.basename(m)), format)]
            matches = [m for m in data if not os.path.basename(m).startswith(IGNORED)]
            skipped += [m for m in data if os.path.basename(m).startswith(IGNORED)]
            unknown += others
        if not matches:
            raise _nothing_named(str(given), text, skipped, unknown)
        for match in matches:
            label = printable(os.path.basename(os.path.dirname(os.path.abspath(match))))
            found.setdefault(match, (Path(match).as_posix(), match, label, named_directory(text)))
    if not found:
        raise UserError("paths", "is empty", "name at least one file or glob")
    left_out, not_read = ([name for name in names if name not in found] for names in (skipped, unknown))
    warn("paths", skipped=left_out, unknown=not_read)
    return _numbered(list(found.values()))


def _nothing_named(given: str, text: str, skipped: Sequence[str], unknown: Sequence[str]) -> UserError:
    """What to say of a path or glob that names no stream file."""
    if os.path.isdir(text):
        fix = f"write '{text}/**/*' for the files below it, or name it alone (in a config: as root of a source of its own)"
        return UserError(given, "is a directory, and only files and globs can be listed", fix)
    if not glob.has_magic(text) and not os.path.exists(text):
        return UserError(given, "no such file or directory", did_you_mean(text) or "check the path")
    problem = _none("names no stream file", skipped, unknown)
    return UserError(given, problem, f"known extensions: {' '.join(suffixes())}")


@dataclass(frozen=True)
class Discovery:
    """The streams at a user's paths, and how a config's source names them: `root` (nested) or `paths` (direct)."""

    layout: Literal["nested", "direct"]
    streams: list[Stream]
    root: str | None = None
    paths: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    """Files in the root itself, which NESTED does not read."""
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
    try:
        streams = discover_nested(directory, format=format)
        return Discovery("nested", streams, root=paths[0], left_out=tuple(loose_files(directory, format)))
    except UserError:
        if not any(path.is_file() and is_stream_file(path, format) for path in directory.iterdir()):
            raise
        pattern = os.path.join(glob.escape(paths[0]), "*")
        return Discovery("direct", discover_direct([pattern], format=format), paths=(pattern,))


def refuse_unheeded(streams: Sequence[Stream], format: str, given: Mapping[str, object], *, source: str = "") -> None:
    """Refuse `dtype`, `eod` and `text_split` where no stream is of a format that takes them.

    Args:
        streams, format: of the source.
        given: option -> its value; None, and `file` as `text_split`, are not given.
        source: how messages name it; empty: they do not.

    Raises:
        UserError: an option changes nothing.
    """
    if is_import_path(format):  # a format of the user's own may take any of them
        return
    for option, value in given.items():
        if value is None or (option, value) == ("text_split", "file"):
            continue
        names = [format_name(Path(stream.path), format) for stream in streams]
        if any(takes_option(name, option) for name in names):
            continue
        kinds = " or ".join("raw text" if name == "text" else name for name in formats_with(option))
        has = "the source has" if source else "there are"
        problem = f"is {json.dumps(value)}, but {has} no {kinds} files"
        fix = "remove it" + (": the index beside a .bin file defines it" if "megatron" in names else "")
        raise UserError(f"{source}: {option}" if source else option, problem, fix)
