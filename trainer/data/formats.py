"""The table of formats, and formats of the user's own, functions `(path, options) -> TokenTable` named by import path.

A new format is one row of the table: everything else about formats derives from the row.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from trainer.data.documents import (
    IdBounds,
    Kind,
    ReadOptions,
    Span,
    TokenArray,
    TokenTable,
    damaged,
    load_bin,
    load_megatron,
    load_npy,
    table_from_pieces,
)
from trainer.data.text_formats import (
    jsonl_kind,
    jsonl_pieces,
    jsonl_spans,
    load_text,
    parquet_kind,
    parquet_pieces,
    parquet_spans,
    text_pieces,
    text_spans,
)
from trainer.data.tokenizer import Tokenizer
from trainer.errors import UserError
from trainer.import_path import resolve_target, users_code

SIGNATURE = "see trainer.data.TokenTable: (path, options) -> TokenTable"


def is_import_path(format: str) -> bool:
    """Whether a format's name is `package.module:function`."""
    return ":" in format


def load_own(format: str, path: Path, options: ReadOptions) -> TokenTable:
    """Read a file with the user's function, and check the result before anything is trained on it.

    Ids are checked against the vocabulary here too: a user's function need not have done so.
    """
    where = f"{path} (read by {format})"
    with users_code(where):
        table = resolve_target(format, "format")(path, options)
    if not isinstance(table, TokenTable):
        raise damaged(where, f"returned a {type(table).__name__}", SIGNATURE)
    tokens, starts, lengths = (np.asarray(each) for each in (table.tokens, table.starts, table.lengths))
    arrays = (tokens, starts, lengths)
    if any(each.ndim != 1 or each.dtype.kind not in "iu" for each in arrays) or len(starts) != len(lengths):
        parts = ", ".join(f"{each.dtype} {list(each.shape)}" for each in arrays)
        raise damaged(where, f"tokens, starts and lengths are {parts}", "return integers [N], [D] and [D]")
    starts, lengths = starts.astype(np.int64), lengths.astype(np.int64)
    outside = np.flatnonzero((starts < 0) | (lengths < 0) | (starts + lengths > len(tokens)))
    if outside.size:
        at = int(outside[0])
        problem = f"document {at} is [{starts[at]}, {starts[at] + lengths[at]}) of {len(tokens)} tokens"
        raise damaged(where, problem, "documents must lie within the tokens")
    bounds = table.bounds or IdBounds.of(path, options.tokenizer).check_sample(tokens)
    return replace(table, tokens=tokens, starts=starts, lengths=lengths, bounds=bounds)


@dataclass(frozen=True)
class Format:
    """One row of the table.

    Args:
        suffixes: file extensions that select the format.
        load: reads a file; None: tokenizes its `pieces`.
        kind: text or token ids; a function of the path where it depends on the file.
        options: what the user may set for such files: `dtype`, `eod`, `text_split`, `column`.
        beside: extension of a second file that must be there too, and is not a stream of its own.
        pieces: of a format that can hold text: the documents' ids, tokenized one after the other; in a span alone if one is
            given.
        spans: of such a format: parts of about so many bytes that can be tokenized apart.
    """

    suffixes: tuple[str, ...]
    load: Callable[[Path, ReadOptions], TokenTable] | None
    kind: Kind | Callable[[Path, str | None], Kind]
    options: tuple[Literal["dtype", "eod", "text_split", "column"], ...] = ()
    beside: str | None = None
    pieces: Callable[[Path, ReadOptions, Span | None], Iterator[TokenArray]] | None = None
    spans: Callable[[Path, int], list[Span]] | None = None


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "text": Format((".txt", ".md", ".py"), load_text, "text", ("text_split",), None, text_pieces, text_spans),
        "jsonl": Format((".jsonl",), None, jsonl_kind, ("column",), pieces=jsonl_pieces, spans=jsonl_spans),
        "npy": Format((".npy",), load_npy, kind="ids", options=("eod",)),
        "megatron": Format((".bin",), load_megatron, kind="ids", beside=".idx"),
        "bin": Format((".bin",), load_bin, kind="ids", options=("dtype", "eod")),
        "parquet": Format((".parquet",), None, parquet_kind, ("column",), pieces=parquet_pieces, spans=parquet_spans),
    }
)


def suffixes() -> tuple[str, ...]:
    """All file extensions that select a format."""
    return tuple(dict.fromkeys(suffix for each in FORMATS.values() for suffix in each.suffixes))


def index_suffixes() -> tuple[str, ...]:
    """Extensions of files that only index the file beside them."""
    return tuple(each.beside for each in FORMATS.values() if each.beside is not None)


def file_kind(path: Path, name: str, column: str | None = None) -> Kind:
    """Whether a file of the format `name` holds text or token ids; `text` for formats by import path."""
    kind = "text" if is_import_path(name) else FORMATS[name].kind
    return kind(path, column) if callable(kind) else kind


def takes_option(name: str, option: str) -> bool:
    """Whether the option changes how files of the format `name` are read."""
    return name in FORMATS and option in FORMATS[name].options


def check_format(name: str) -> None:
    """Reject a name that is not `auto`, a row of the table, or an import path, which is not imported yet."""
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
    raise damaged(path, f"no format is known for {path.suffix!r}", f"name the format: {', '.join(FORMATS)}")


def files_of(path: Path, format: str) -> list[Path]:
    """The files that a stream's documents depend on: its own, and the one beside it that its format needs."""
    name = format_name(path, format)
    beside = None if is_import_path(name) else FORMATS[name].beside
    return [path] if beside is None else [path, path.with_suffix(beside)]


def load_documents(path: str | Path, options: ReadOptions) -> TokenTable:
    """The documents of a file; see `open_documents`."""
    path = Path(path)
    name = format_name(path, options.format)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or not status.st_size:
            problem = "the file is empty" if stat.S_ISREG(status.st_mode) else "is not a regular file"
            raise damaged(path, problem, "remove it; of a directory, name the files in it")
        path.open("rb").close()  # a file that cannot be opened at all is no matter of its format
        if is_import_path(name):
            return load_own(name, path, options)
        row = FORMATS[name]
        if row.load is not None:
            return row.load(path, options)
        assert row.pieces is not None
        table = table_from_pieces(row.pieces(path, options, None), options.tokenizer.vocab_size, where=str(path))
        if not table.num_documents:
            raise damaged(path, "has no documents", "remove the file")
        return table
    except OSError as error:
        other = f": {error.filename}" if error.filename and str(error.filename) != str(path) else ""
        problem = f"cannot be read ({error.strerror or error}{other})"
        raise damaged(path, problem, "check the path and its mode") from error


def open_documents(path: str | Path, *, tokenizer: Tokenizer, **options: Any) -> TokenTable:
    """The documents of a file: mapped where the format allows, otherwise read into memory. `options`: of `ReadOptions`."""
    return load_documents(path, ReadOptions(tokenizer, **options))
