"""The table of formats. A new format is one row here: everything else about formats derives from the row."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from trainer.data.formats.documents import Kind, ReadOptions, Span, TokenArray, TokenTable
from trainer.data.formats.jsonl import jsonl_kind, jsonl_pieces, jsonl_spans, load_jsonl
from trainer.data.formats.megatron import load_megatron
from trainer.data.formats.own_format import is_import_path, load_own
from trainer.data.formats.parquet import load_parquet, parquet_kind, parquet_pieces, parquet_spans
from trainer.data.formats.text import load_text, text_pieces, text_spans
from trainer.data.formats.token_arrays import load_bin, load_npy
from trainer.data.tokenizer import Tokenizer
from trainer.errors import UserError


@dataclass(frozen=True)
class Format:
    """One row of the table.

    Args:
        suffixes: file extensions that select the format.
        load: reads a file.
        kind: text or token ids; a function of the path where it depends on the file.
        options: what the user may set for such files: `dtype`, `eod`, `text_split`.
        beside: extension of a second file that must be there too, and is not a stream of its own.
        pieces: of a format that can hold text: the documents' ids, tokenized one after the other; in a span alone if one is
            given.
        spans: of such a format: parts of about so many bytes that can be tokenized apart.
    """

    suffixes: tuple[str, ...]
    load: Callable[[Path, ReadOptions], TokenTable]
    kind: Kind | Callable[[Path], Kind]
    options: tuple[Literal["dtype", "eod", "text_split"], ...] = ()
    beside: str | None = None
    pieces: Callable[[Path, ReadOptions, Span | None], Iterator[TokenArray]] | None = None
    spans: Callable[[Path, int], list[Span]] | None = None


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "text": Format(
            (".txt", ".md", ".py"),
            load_text,
            kind="text",
            options=("text_split",),
            pieces=text_pieces,
            spans=text_spans,
        ),
        "jsonl": Format((".jsonl",), load_jsonl, kind=jsonl_kind, pieces=jsonl_pieces, spans=jsonl_spans),
        "npy": Format((".npy",), load_npy, kind="ids", options=("eod",)),
        "megatron": Format((".bin",), load_megatron, kind="ids", beside=".idx"),
        "bin": Format((".bin",), load_bin, kind="ids", options=("dtype", "eod")),
        "parquet": Format((".parquet",), load_parquet, kind=parquet_kind, pieces=parquet_pieces, spans=parquet_spans),
    }
)


def suffixes() -> tuple[str, ...]:
    """All file extensions that select a format."""
    return tuple(dict.fromkeys(suffix for each in FORMATS.values() for suffix in each.suffixes))


def index_suffixes() -> tuple[str, ...]:
    """Extensions of files that only index the file beside them."""
    return tuple(each.beside for each in FORMATS.values() if each.beside is not None)


def file_kind(path: Path, name: str) -> Kind:
    """Whether a file of the format `name` holds text or token ids; `text` for formats by import path."""
    kind = "text" if is_import_path(name) else FORMATS[name].kind
    return kind(path) if callable(kind) else kind


def takes_option(name: str, option: str) -> bool:
    """Whether the option changes how files of the format `name` are read."""
    return name in FORMATS and option in FORMATS[name].options


def formats_with(option: str) -> list[str]:
    """The formats that take an option."""
    return [name for name in FORMATS if takes_option(name, option)]


def check_format(name: str) -> None:
    """Reject a name that is not `auto`, a row of the table, or an import path, which is not imported yet.

    Raises:
        UserError: with the names that exist.
    """
    if not is_import_path(name) and name != "auto" and name not in FORMATS:
        problem = f"must be one of auto, {', '.join(FORMATS)}, or an import path package.module:function; got {name!r}"
        raise UserError("format", problem, "use one of these, or write a format of your own")


def format_name(path: Path, name: str = "auto") -> str:
    """The format a file is read as: the given one, or, with `auto`, the first row that matches.

    Raises:
        UserError: no such format, or none matches the file's name.
    """
    check_format(name)
    if name != "auto":
        return name
    for found, each in FORMATS.items():
        if path.suffix in each.suffixes and (each.beside is None or path.with_suffix(each.beside).exists()):
            return found
    raise UserError(str(path), f"no format is known for {path.suffix!r}", f"name the format: {', '.join(FORMATS)}")


def files_of(path: Path, format: str) -> list[Path]:
    """The files that a stream's documents depend on: its own, and the one beside it that its format needs."""
    name = format_name(path, format)
    beside = None if is_import_path(name) else FORMATS[name].beside
    return [path] if beside is None else [path, path.with_suffix(beside)]


def load_documents(path: str | Path, format: str, options: ReadOptions) -> TokenTable:
    """The documents of a file; see `open_documents`."""
    path = Path(path)
    name = format_name(path, format)
    load = partial(load_own, name) if is_import_path(name) else FORMATS[name].load
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "a device or a pipe"
            raise UserError(str(path), f"is {kind}, not a file", "name the files in it, or remove it")
        if status.st_size == 0:
            raise UserError(str(path), "the file is empty", "remove it")
        with path.open("rb"):  # a file that cannot be opened at all is no matter of its format
            pass
        return load(path, options)
    except OSError as error:
        other = f": {error.filename}" if error.filename and str(error.filename) != str(path) else ""
        problem = f"cannot be read ({error.strerror or error}{other})"
        raise UserError(str(path), problem, "check the path and its mode") from error
    except ValueError as error:
        if "null byte" not in str(error):
            raise
        raise UserError(repr(str(path)), "is not a path: it has a NUL character", "correct the path") from error


def open_documents(
    path: str | Path,
    *,
    format: str = "auto",
    tokenizer: Tokenizer,
    dtype: str | None = None,
    eod: int | None = None,
    text_split: str = "file",
) -> TokenTable:
    """The documents of a file: mapped where the format allows, otherwise read into memory.

    Args:
        path: the file.
        format: `auto` (by file extension), a key of `FORMATS`, or an import path `package.module:function` (see
            `own_format`).
        tokenizer, dtype, eod, text_split: see `ReadOptions`.

    Raises:
        UserError: an unknown format, or an unreadable or damaged file, with path, position and fix.
    """
    options = ReadOptions(tokenizer=tokenizer, dtype=dtype, eod=eod, text_split=text_split)
    return load_documents(path, format, options)
