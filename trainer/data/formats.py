"""The table of formats, of which each is one row, and custom formats, functions by import path.

Damaged files are a UserError with the path and the place.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np

from trainer.data import documents, records
from trainer.data.documents import IdBounds, ReadOptions, TokenArray, TokenTable, damaged, table_from_pieces
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
        parts = [*map(np.asarray, (table.tokens, table.starts, table.lengths))]  # of lists or tensors, too
    tokens, starts, lengths = (each if each.size else each.astype(np.int64) for each in parts)
    shapes_fit = tokens.ndim == starts.ndim == 1 and starts.shape == lengths.shape
    if {tokens.dtype.kind, starts.dtype.kind, lengths.dtype.kind} - {"i", "u"} or not shapes_fit:
        raise damaged(where, "tokens, starts and lengths must be integers of shapes [N], [D] and [D]", "return these")
    starts, lengths = starts.astype(np.int64), lengths.astype(np.int64)
    tokens = tokens.astype(tokens.dtype.newbyteorder("="), copy=False)
    if ((starts < 0) | (lengths < 0) | (lengths > len(tokens) - starts)).any():
        problem = f"a document does not lie within its {len(tokens):,} tokens"
        raise damaged(where, problem, "return where each begins, and its length")
    IdBounds.of(path, options.tokenizer).check_sample(tokens)
    return TokenTable(tokens, starts, lengths)


# Of prose and of programs; not of tables, settings and records, such as .csv and .json.
TEXT_SUFFIXES = tuple(
    """
    .txt .text .md .markdown .rst .adoc .org .tex .html .htm .css .scss .vue .py .pyi .pyx .c .h .cc .cpp .cxx .hh
    .hpp .cu .cuh .m .mm .f90 .s .java .kt .scala .go .rs .swift .cs .fs .js .mjs .jsx .ts .tsx .php .rb .pl .pm
    .lua .r .jl .hs .ml .clj .ex .exs .erl .el .lisp .sh .sql .proto
    """.split()  # noqa: SIM905 - easier to read
)


@dataclass(frozen=True)
class Format:
    suffixes: tuple[str, ...]  # ends of file names that select the format
    # The keys that the user may set for such files.
    options: tuple[Literal["dtype", "eod", "text_split", "column", "loss_mask"], ...] = ()
    load: Callable[[Path, ReadOptions], TokenTable] | None = None  # None: tokenizes its `pieces`
    # Extension of a second file that must be there too, and is not a stream of its own.
    beside: str | None = None
    # Of a format that can hold text: the ids of each document.
    pieces: Callable[[Path, ReadOptions], Iterator[TokenArray]] | None = None
    cannot_be_mapped: bool = False  # so that a copy of its tokens is worth its space
    marks: tuple[str, ...] = ()  # files by which a directory is known as one of the format
    # Those of its files that are data; a UserError if they are not meant to be read together.
    listed: Callable[[Sequence[str]], Collection[str]] | None = None


OF_RECORDS: Final = ("column", "loss_mask")
FORMATS: Mapping[str, Format] = {
    "text": Format(TEXT_SUFFIXES, ("text_split",), records.load_text, pieces=records.text_pieces),
    "jsonl": Format((".jsonl",), OF_RECORDS, pieces=records.jsonl_pieces),
    "npy": Format((".npy",), ("eod",), documents.load_npy),
    "megatron": Format((".bin",), (), documents.load_megatron, beside=".idx"),
    "bin": Format((".bin",), ("dtype", "eod"), documents.load_bin),
    "parquet": Format((".parquet",), OF_RECORDS, pieces=records.parquet_pieces),
    "jsonl_compressed": Format(
        (".jsonl.gz", ".jsonl.zst"), OF_RECORDS, pieces=records.compressed_pieces, cannot_be_mapped=True
    ),
    "arrow": Format(
        (".arrow",),
        OF_RECORDS,
        pieces=records.arrow_pieces,
        cannot_be_mapped=True,
        marks=(records.SAVED, records.SPLITS),
        listed=records.files_of_data_sets,
    ),
}


SUFFIXES = tuple(dict.fromkeys(suffix for each in FORMATS.values() for suffix in each.suffixes))
SUFFIXES_IN_WORDS = f".txt and others of text, {', '.join(SUFFIXES[len(TEXT_SUFFIXES) :])}"
# Of files that only index another file.
INDEX_SUFFIXES = tuple(each.beside for each in FORMATS.values() if each.beside is not None)


def is_read_whole(path: Path | str, options: ReadOptions) -> bool:
    """Whether opening a file makes a copy of its tokens, rather than mapping them."""
    name = format_name(Path(path), options.format)
    if name == "text":
        return not records.is_mapped(options)
    return is_import_path(name) or FORMATS[name].load is None


def is_copied(path: str, format: str, tokenizer: Tokenizer) -> bool:
    """Whether the tokens of a file are worth a copy: tokenizing is slow, or it cannot be mapped."""
    row = FORMATS.get(format_name(Path(path), format))
    return row is not None and row.pieces is not None and (row.cannot_be_mapped or tokenizer.is_slow)


def takes_option(name: str, option: str) -> bool:
    """Whether the option changes how files of the format `name` are read."""
    return name in FORMATS and option in FORMATS[name].options


def format_name(path: Path, name: str = "auto") -> str:
    """The format a file is read as: the given one, or, with `auto`, the first row that matches.
    UserError: there is none. An import path is not imported yet."""
    if not is_import_path(name) and name != "auto" and name not in FORMATS:
        names = f"{', '.join(FORMATS)}, or an import path package.module:function"
        problem = f"must be one of auto, {names}; got {name!r}"
        raise UserError("format", problem, "use one of these, or write a format of your own")
    if name != "auto":
        return name
    for found, each in FORMATS.items():
        fits = path.name.lower().endswith(each.suffixes)
        if fits and (each.beside is None or path.with_suffix(each.beside).exists()):
            return found
    raise damaged(path, f"no format is known for {path.suffix!r}", f"name the format: {', '.join(FORMATS)}")


def files_of(path: Path, format: str) -> list[Path]:
    """The files that a stream's documents depend on: its own, and the index of its format."""
    row = FORMATS.get(format_name(path, format))
    if row is None or row.beside is None:
        return [path]
    return [path, path.with_suffix(row.beside)]


def load_documents(path: str | Path, options: ReadOptions) -> TokenTable:
    """The documents of a file. Raises UserError: it has none, is damaged, or cannot be read."""
    path = Path(path)
    name = format_name(path, options.format)
    row = FORMATS.get(name)  # None: an import path
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise damaged(path, "is not a regular file", "remove it; of a directory, name the files in it")
        if not status.st_size:
            raise damaged(path, "the file is empty", "remove it")
        path.open("rb").close()  # a file that cannot be opened at all is no matter of its format
        if options.reader is not None:
            table = options.reader.load(path, name, options)
        elif row is None:
            table = load_own(name, path, options)
        elif row.load is not None:
            table = row.load(path, options)
        else:
            assert row.pieces is not None
            table = table_from_pieces(row.pieces(path, options), options.tokenizer.vocab_size, where=str(path))
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error}"
        if error.filename and str(error.filename) != str(path):
            problem += f": {error.filename}"
        raise damaged(path, f"{problem})", "check the path, its mode, and the room in TMPDIR") from error
    if not table.num_documents:
        raise damaged(path, "has no documents", "remove the file")
    return table
