"""Files and modalities that no source reads, so that nothing vanishes without a word."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from trainer.data.formats.registry import index_suffixes, suffixes
from trainer.data.streams.globs import files_below
from trainer.wording import counted, few, printable

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
