"""The table of formats, of which each is one row, and custom formats, functions by import path."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from trainer.data import documents
from trainer.data.documents import IdBounds, Kind, ReadOptions, TokenArray, TokenTable, damaged, table_from_pieces
from trainer.data.text_formats import (
    is_mapped,
    jsonl_kind,
    jsonl_pieces,
    load_text,
    parquet_kind,
    parquet_pieces,
    text_pieces,
)
from trainer.data.tokenizer import Tokenizer
from trainer.errors import UserError
from trainer.import_path import resolve_target, users_code


def is_import_path(format: str) -> bool:
    return ":" in format


def load_own(format: str, path: Path, options: ReadOptions) -> TokenTable:
    """Read a file with the user's function, and check the result before it is trained on."""
    where = f"{path} (read by {format})"
    with users_code(where):
        table = resolve_target(format, "format")(path, options)
    if not isinstance(table, TokenTable):
        fix = "see trainer.data.TokenTable: (path, options) -> TokenTable"
        raise damaged(where, f"returned a {type(table).__name__}", fix)
    tokens, starts, lengths = (np.asarray(each) for each in (table.tokens, table.starts, table.lengths))
    if {tokens.dtype.kind, starts.dtype.kind, lengths.dtype.kind} - {"i", "u"} or tokens.ndim != 1:
        raise damaged(where, "tokens, starts and lengths must be integers", "return arrays [N], [D] and [D]")
    starts, lengths = starts.astype(np.int64), lengths.astype(np.int64)
    if ((starts < 0) | (lengths < 0) | (starts + lengths > len(tokens))).any():
        problem = f"a document does not lie within its {len(tokens):,} tokens"
        raise damaged(where, problem, "return where each begins, and its length")
    # The user's function need not have checked the ids.
    bounds = table.bounds or IdBounds.of(path, options.tokenizer).check_sample(tokens)
    return replace(table, tokens=tokens, starts=starts, lengths=lengths, bounds=bounds)


@dataclass(frozen=True)
class Format:
    suffixes: tuple[str, ...]  # file extensions that select the format
    load: Callable[[Path, ReadOptions], TokenTable] | None  # None: tokenizes its `pieces`
    # Text or token ids; a function of the path (and column) where it depends on the file.
    kind: Kind | Callable[[Path, str | None], Kind]
    # The keys that the user may set for such files.
    options: tuple[Literal["dtype", "eod", "text_split", "column"], ...] = ()
    # Extension of a second file that must be there too, and is not a stream of its own.
    beside: str | None = None
    # Of a format that can hold text: the ids of each document.
    pieces: Callable[[Path, ReadOptions], Iterator[TokenArray]] | None = None


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "text": Format((".txt", ".md", ".py"), load_text, "text", ("text_split",), pieces=text_pieces),
        "jsonl": Format((".jsonl",), None, jsonl_kind, ("column",), pieces=jsonl_pieces),
        "npy": Format((".npy",), documents.load_npy, kind="ids", options=("eod",)),
        "megatron": Format((".bin",), documents.load_megatron, kind="ids", beside=".idx"),
        "bin": Format((".bin",), documents.load_bin, kind="ids", options=("dtype", "eod")),
        "parquet": Format((".parquet",), None, parquet_kind, ("column",), pieces=parquet_pieces),
    }
)


def suffixes() -> tuple[str, ...]:
    return tuple(dict.fromkeys(suffix for each in FORMATS.values() for suffix in each.suffixes))


def index_suffixes() -> tuple[str, ...]:
    """Extensions of files that only index another file."""
    return tuple(each.beside for each in FORMATS.values() if each.beside is not None)


def file_kind(path: Path, name: str, column: str | None = None) -> Kind:
    """The kind of a file of the format `name`; `text` for formats by import path."""
    if is_import_path(name):
        return "text"
    kind = FORMATS[name].kind
    return kind(path, column) if callable(kind) else kind


def is_read_whole(path: Path | str, options: ReadOptions) -> bool:
    """Whether opening a file reads all of it, not just an index."""
    name = format_name(Path(path), options.format)
    if name == "text":
        return not is_mapped(options)
    return is_import_path(name) or FORMATS[name].load is None


def takes_option(name: str, option: str) -> bool:
    """Whether the option changes how files of the format `name` are read."""
    return name in FORMATS and option in FORMATS[name].options


def check_format(name: str) -> None:
    """Reject a name that is not `auto`, a row, or an import path, which is not imported yet."""
    if not is_import_path(name) and name != "auto" and name not in FORMATS:
        names = f"{', '.join(FORMATS)}, or an import path package.module:function"
        problem = f"must be one of auto, {names}; got {name!r}"
        raise UserError("format", problem, "use one of these, or write a format of your own")


def format_name(path: Path, name: str = "auto") -> str:
    """The format a file is read as: the given one, or, with `auto`, the first row that matches.
    UserError: there is none."""
    check_format(name)
    if name != "auto":
        return name
    for found, each in FORMATS.items():
        if path.suffix in each.suffixes and (each.beside is None or path.with_suffix(each.beside).exists()):
            return found
    raise damaged(path, f"no format is known for {path.suffix!r}", f"name the format: {', '.join(FORMATS)}")


def files_of(path: Path, format: str) -> list[Path]:
    """The files that a stream's documents depend on: its own, and the index of its format."""
    row = FORMATS.get(format_name(path, format))
    if row is None or row.beside is None:
        return [path]
    return [path, path.with_suffix(row.beside)]


def load_documents(path: str | Path, options: ReadOptions) -> TokenTable:
    path = Path(path)
    name = format_name(path, options.format)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise damaged(path, "is not a regular file", "remove it; of a directory, name the files in it")
        if not status.st_size:
            raise damaged(path, "the file is empty", "remove it")
        path.open("rb").close()  # a file that cannot be opened at all is no matter of its format
        if is_import_path(name):
            return load_own(name, path, options)
        row = FORMATS[name]
        if row.load is not None:
            return row.load(path, options)
        assert row.pieces is not None
        pieces = row.pieces(path, options)
        table = table_from_pieces(pieces, options.tokenizer.vocab_size, where=str(path))
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error}"
        if error.filename and str(error.filename) != str(path):
            problem += f": {error.filename}"
        raise damaged(path, f"{problem})", "check the path and its mode") from error
    if not table.num_documents:
        raise damaged(path, "has no documents", "remove the file")
    return table


def open_documents(path: str | Path, *, tokenizer: Tokenizer, **options: Any) -> TokenTable:
    """The documents of a file, mapped where the format allows. `options`: of `ReadOptions`."""
    return load_documents(path, ReadOptions(tokenizer, **options))
