"""The table of formats, of which each is one row, and custom formats, functions by import path.

Those that hold text are read here: raw text files, JSON lines, and Parquet (extra `parquet`,
pyarrow). JSON lines and Parquet hold one document per line or row, as `text` or as `tokens` (ids),
or as either in a column that is named. Damaged files are a UserError with the path and the place.
"""

from __future__ import annotations

import itertools
import json
import re
import stat
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from trainer.arrays import Ints
from trainer.data import documents
from trainer.data.documents import (
    IdBounds,
    Kind,
    ReadOptions,
    TokenArray,
    TokenTable,
    damaged,
    reader_of,
    table_from_pieces,
)
from trainer.data.tokenizer import BytesTokenizer, Tokenizer, encode_all
from trainer.errors import UserError
from trainer.import_path import resolve_target, users_code

NO_SPACE = re.compile(rb"[^\s]")
BLANK_LINES = re.compile(rb"\n(?:[ \t\r]*\n)+")
BATCH = 1 << 20  # bytes of lines that are tokenized together
BATCH_ROWS = 1024  # likewise
COLUMNS = ("text", "tokens")
Found = tuple[str, str | TokenArray, Any]  # its place, a document, and which of its tokens are trained


def _bounds(data: TokenArray, text_split: str) -> Ints:
    """Where documents begin, in bytes, and the last ends; a byte-order mark is part of none."""
    starts = [0]
    if data[: len(BOM_UTF8)].tobytes() == BOM_UTF8:
        starts = [len(BOM_UTF8)]
    if text_split == "blank_line":
        view = memoryview(data)  # type: ignore[arg-type]
        first = NO_SPACE.search(view, starts[0])  # blank lines before it separate nothing
        if first is not None:
            ends = (match.end() for match in BLANK_LINES.finditer(view, first.start()))
            starts += [end for end in ends if end < len(data)]
    return np.array([*starts, len(data)], dtype=np.int64)


def text_pieces(path: Path, options: ReadOptions) -> Iterator[TokenArray]:
    """The ids of each document, tokenized while they are read."""
    data = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    for start, stop in itertools.pairwise(_bounds(data, options.text_split).tolist()):
        ids: TokenArray = data[start:stop]
        if not isinstance(options.tokenizer, BytesTokenizer):  # for which any bytes will do
            try:
                text = ids.tobytes().decode("utf-8")
            except UnicodeDecodeError as error:
                problem = f"is not UTF-8 text (byte offset {start + error.start})"
                raise damaged(path, problem, "convert the file to UTF-8, or use the bytes tokenizer") from error
            ids = options.tokenizer.encode(text)
        yield from _ended([ids], options)


def _ended(texts: Sequence[TokenArray], options: ReadOptions) -> list[TokenArray]:
    """The ids of texts, each but an empty one with the id that ends documents, if there is one."""
    found, eod = list(texts), options.text_eod
    if eod is not None:
        for number, ids in enumerate(found):
            if len(ids) and ids[-1] != eod:
                found[number] = np.append(ids.astype(np.int64, copy=False), eod)
    return found


def is_mapped(options: ReadOptions) -> bool:
    """Whether text files themselves are mapped: with the bytes tokenizer, and no id at the ends."""
    return isinstance(options.tokenizer, BytesTokenizer) and options.text_eod is None


def load_text(path: Path, options: ReadOptions) -> TokenTable:
    """The documents of a text file."""
    if is_mapped(options):
        mapped = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
        bounds = _bounds(mapped, options.text_split)
        return TokenTable(mapped, bounds[:-1], np.diff(bounds))
    return table_from_pieces(text_pieces(path, options), options.tokenizer.vocab_size, where=str(path))


def document_of(line: bytes, where: str, options: ReadOptions) -> tuple[str | list[int], Any]:
    """The text of a line, or its ids, and which are trained, as the record says; see `ReadOptions`."""
    column, mask = options.column, None
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # also where it is not UTF-8
        raise damaged(where, f"is not JSON in UTF-8 ({error})", "write one JSON object per line") from error
    found = []
    if isinstance(record, dict):
        found = [(name, record[name]) for name in _columns(column) if name in record]
        mask = record.get(getattr(options.loss_mask, "field", None))
    match found:
        case [(name, str() as text)] if name in (column, "text"):
            return text, mask
        case [(name, list() as ids)] if name in (column, "tokens") and all(type(id) is int for id in ids):
            return ids, mask
    problem = f"is not an object with {column or 'either text or tokens'}, a string or a list of integers"
    raise damaged(where, problem, "name the field of the documents: column")


def _columns(column: str | None) -> tuple[str, ...]:
    """Where documents may be."""
    return COLUMNS if column is None else (column,)


def jsonl_pieces(path: Path, options: ReadOptions) -> Iterator[TokenArray]:
    """The ids of each document, tokenized while they are read; blank lines are skipped."""
    with path.open("rb") as lines:
        yield from pieces_of_lines(path, lines, options)


def pieces_of_lines(path: Path, lines: Iterable[bytes], options: ReadOptions) -> Iterator[TokenArray]:
    """The same of the lines of a file."""
    batch: list[Found] = []
    size = 0
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path}: line {number}"
            document, mask = document_of(line, where, options)
            content = document if isinstance(document, str) else _checked(document, options.tokenizer, where)
            batch.append((where, content, mask))
        size += len(line)
        if size >= BATCH:
            yield from _encoded(batch, options)
            batch, size = [], 0
    yield from _encoded(batch, options)


def _checked(ids: list[int], tokenizer: Tokenizer, where: str) -> TokenArray:
    bounds = IdBounds.of(where, tokenizer)
    for id in ids:  # as Python's integers: one may exceed 64 bits
        if not 0 <= id < bounds.num_ids:
            raise bounds.refusal(id)
    return np.array(ids, dtype=np.int64)


def _encoded(batch: Sequence[Found], options: ReadOptions) -> Iterator[TokenArray]:
    """The ids of documents: texts are tokenized together, where none has a mask."""
    if options.loss_mask is not None:
        yield from (options.loss_mask.coded(*each, options) for each in batch)
        return
    texts = {where: document for where, document, _ in batch if isinstance(document, str)}
    try:
        encoded = iter(_ended(encode_all(options.tokenizer, list(texts.values())), options))
    except UnicodeEncodeError as error:
        where = next(place for place, text in texts.items() if text == error.object)
        raise damaged(where, "text has an unpaired surrogate", "write the text as UTF-8") from error
    for _, document, _ in batch:
        yield next(encoded) if isinstance(document, str) else document


@contextmanager
def pyarrow_for(path: Path, kind: str) -> Iterator[Any]:
    """The package. Raises UserError: it is not installed, or the file is damaged."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        fix = "run: pip install pyarrow (extra parquet)"
        raise damaged(path, "needs the package pyarrow, which is not installed", fix) from error
    try:
        yield pyarrow
    except (UserError, MemoryError):
        raise
    except Exception as error:  # pyarrow raises many types for a damaged file
        raise damaged(path, f"is not a readable {kind} file ({error})") from error


class Column(NamedTuple):
    name: str
    kind: Kind
    plain: Any  # the one type of strings or lists to read it as


def find_column(path: Path, schema: Any, pyarrow: Any, column: str | None) -> Column:
    """The column of documents."""
    found = [name for name in _columns(column) if name in schema.names]
    if len(found) == 1:
        name, kind = found[0], schema.field(found[0]).type
        values = getattr(kind, "value_type", None)
        if pyarrow.types.is_dictionary(kind):  # of strings, each written once
            kind, values = values, None
        if str(kind) in ("string", "large_string", "string_view") and name in (column, "text"):
            return Column(name, "text", pyarrow.large_string())
        if values is not None and pyarrow.types.is_integer(values) and name in (column, "tokens"):
            return Column(name, "ids", pyarrow.large_list(values))
    columns = ", ".join(f"{field.name}: {field.type}" for field in schema) or "none"
    problem = f"needs one column {column or 'text or tokens'}, of strings or lists of integers (its columns: {columns})"
    raise damaged(path, problem, f"name the one of the documents: column; {documents.FOR_SERIES}")


def _tokens(where: str, array: Any, tokenizer: Tokenizer) -> list[TokenArray]:
    values = array.flatten()
    if values.null_count:
        raise damaged(where, "have a null token", "write an id for every token")
    ids = values.to_numpy(zero_copy_only=False)
    IdBounds.of(where, tokenizer).check(ids, 0)
    ends = np.cumsum(array.value_lengths().to_numpy(zero_copy_only=False))
    pieces: list[TokenArray] = np.split(ids, ends[:-1])
    return pieces


def parquet_pieces(path: Path, options: ReadOptions) -> Iterator[TokenArray]:
    """The ids of each document, tokenized while row groups are read."""
    with pyarrow_for(path, "Parquet") as pyarrow, pyarrow.parquet.ParquetFile(path) as file:
        column = find_column(path, file.schema_arrow, pyarrow, options.column)
        names = [column.name]
        if options.loss_mask is not None:
            names.append(options.loss_mask.field)
        batches = file.iter_batches(BATCH_ROWS, columns=names)
        yield from pieces_of_rows(path, batches, column, options)


def pieces_of_rows(path: Path, batches: Iterable[Any], column: Column, options: ReadOptions) -> Iterator[TokenArray]:
    """The same of pyarrow's batches of rows."""
    row = 0
    for batch in batches:
        array = batch.column(column.name).cast(column.plain)
        where = f"{path}: rows {row} to {row + len(array) - 1}"
        if array.null_count:
            raise damaged(where, f"{column.name} is null in one", "remove such rows")
        contents: Any = array.to_pylist() if column.kind == "text" else _tokens(where, array, options.tokenizer)
        masks = [None] * len(array)
        if options.loss_mask is not None:
            batch.column(options.loss_mask.field).validate(full=True)
            masks = batch.column(options.loss_mask.field).to_pylist()
        places = [f"{path}: row {number}" for number in range(row, row + len(array))]
        yield from _encoded(list(zip(places, contents, masks, strict=True)), options)
        row += len(array)


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
    load: Callable[[Path, ReadOptions], TokenTable] | None  # None: tokenizes its `pieces`
    # The keys that the user may set for such files.
    options: tuple[Literal["dtype", "eod", "text_split", "column", "loss_mask"], ...] = ()
    # Extension of a second file that must be there too, and is not a stream of its own.
    beside: str | None = None
    # Of a format that can hold text: the ids of each document.
    pieces: Callable[[Path, ReadOptions], Iterator[TokenArray]] | None = None
    cannot_be_mapped: bool = False  # so that a copy of its tokens is worth its space
    marks: tuple[str, ...] = ()  # files by which a directory is known as one of the format
    # Those of its files that are data; a UserError if they are not meant to be read together.
    listed: Callable[[Sequence[str]], Collection[str]] | None = None


def _record(name: str, *arguments: Any) -> Any:
    """Call a function of `records`, which imports this module."""
    return getattr(import_module("trainer.data.records"), name)(*arguments)


_RECORDS: Any = {"load": None, "options": ("column", "loss_mask"), "cannot_be_mapped": True}
FORMATS: Mapping[str, Format] = {
    "text": Format(TEXT_SUFFIXES, load_text, ("text_split",), pieces=text_pieces),
    "jsonl": Format((".jsonl",), None, ("column", "loss_mask"), pieces=jsonl_pieces),
    "npy": Format((".npy",), documents.load_npy, ("eod",)),
    "megatron": Format((".bin",), documents.load_megatron, beside=".idx"),
    "bin": Format((".bin",), documents.load_bin, ("dtype", "eod")),
    "parquet": Format((".parquet",), None, ("column", "loss_mask"), pieces=parquet_pieces),
    "jsonl_compressed": Format((".jsonl.gz", ".jsonl.zst"), pieces=partial(_record, "compressed_pieces"), **_RECORDS),
    "arrow": Format(
        (".arrow",),
        pieces=partial(_record, "arrow_pieces"),
        marks=("state.json", "dataset_dict.json"),
        listed=partial(_record, "files_of_data_sets"),
        **_RECORDS,
    ),
}


def suffixes() -> tuple[str, ...]:
    return tuple(dict.fromkeys(suffix for each in FORMATS.values() for suffix in each.suffixes))


def known_suffixes() -> str:
    """The extensions in words."""
    others = [suffix for suffix in suffixes() if suffix not in TEXT_SUFFIXES]
    return f".txt and others of text, {', '.join(dict.fromkeys(others))}"


def index_suffixes() -> tuple[str, ...]:
    """Extensions of files that only index another file."""
    return tuple(each.beside for each in FORMATS.values() if each.beside is not None)


def is_read_whole(path: Path | str, options: ReadOptions) -> bool:
    """Whether opening a file reads all of it, not just an index."""
    name = format_name(Path(path), options.format)
    if name == "text":
        return not is_mapped(options)
    return is_import_path(name) or FORMATS[name].load is None


def is_copied(path: str, format: str, tokenizer: Tokenizer) -> bool:
    """Whether the tokens of a file are worth a copy: tokenizing is slow, or it cannot be mapped."""
    row = FORMATS.get(format_name(Path(path), format))
    if row is None or row.pieces is None:
        return False
    return row.cannot_be_mapped or tokenizer.is_slow


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
    path = Path(path)
    name = format_name(path, options.format)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise damaged(path, "is not a regular file", "remove it; of a directory, name the files in it")
        if not status.st_size:
            raise damaged(path, "the file is empty", "remove it")
        path.open("rb").close()  # a file that cannot be opened at all is no matter of its format
        reader = reader_of(options.tokenizer, options.loss_mask)
        if reader is not None:
            return reader.load(path, name, options)
        if is_import_path(name):
            return load_own(name, path, options)
        row = FORMATS[name]
        if row.load is not None:
            return row.load(path, options)
        assert row.pieces is not None
        table = table_from_pieces(row.pieces(path, options), options.tokenizer.vocab_size, where=str(path))
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error}"
        if error.filename and str(error.filename) != str(path):
            problem += f": {error.filename}"
        raise damaged(path, f"{problem})", "check the path and its mode") from error
    if not table.num_documents:
        raise damaged(path, "has no documents", "remove the file")
    return table
