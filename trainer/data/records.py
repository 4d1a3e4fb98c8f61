"""Formats that hold text: raw text; JSON lines, plain or compressed by gzip or zstandard; Parquet;
and Arrow's stream and file format, also in directories by Hugging Face's `save_to_disk`.

All but raw text have one document per line or row, as `text` or as `tokens` (ids), or as either in
a column that is named. Parquet, Arrow and zstandard need the extra `parquet` (pyarrow). Files are
read from beginning to end, a batch at a time.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import re
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from trainer.arrays import Ints
from trainer.data.documents import (
    FOR_SERIES,
    IdBounds,
    Kind,
    ReadOptions,
    TokenArray,
    TokenTable,
    damaged,
    table_from_pieces,
)
from trainer.data.tokenizer import BytesTokenizer, Tokenizer, encode_all
from trainer.errors import UserError
from trainer.wording import few

BLANK_LINES = re.compile(rb"\n(?:[ \t\r]*\n)+(?:[ \t\r]+\Z)?")  # also without the last newline
BATCH = 1 << 20  # bytes of lines that are tokenized together
BATCH_ROWS = 1024  # likewise
COLUMNS = ("text", "tokens")
Found = tuple[str, str | TokenArray, Any]  # place, document, and which of its tokens are trained
ARROW_FILE, STREAM_END = b"ARROW1", b"\xff\xff\xff\xff\0\0\0\0"
# What `save_to_disk` writes beside its files, and above the directories of splits.
SAVED, SPLITS = "state.json", "dataset_dict.json"


def _bounds(data: TokenArray, text_split: str) -> Ints:
    """Where documents begin, in bytes, and the last ends; a byte-order mark is part of none."""
    starts = [0]
    if data[: len(BOM_UTF8)].tobytes() == BOM_UTF8:
        starts = [len(BOM_UTF8)]
    if text_split == "blank_line":
        view = memoryview(data)  # type: ignore[arg-type]
        first = re.compile(rb"\S").search(view, starts[0])  # blank lines before it separate nothing
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
    """The text of a line or its ids, and which are trained by its `loss_mask`."""
    column, mask = options.column, None
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # also where it is not UTF-8
        raise damaged(where, f"is not JSON in UTF-8 ({error})", "write one JSON object per line") from error
    found = []
    if isinstance(record, dict):
        found = [(name, record[name]) for name in _columns(column) if name in record]
        if options.loss_mask is not None:
            options.loss_mask.refuse_absent(where, record)
            mask = record[options.loss_mask.field]
    match found:
        case [(name, str() as text)] if name in (column, "text"):
            return text, mask
        case [(name, list() as ids)] if name in (column, "tokens") and all(type(id) is int for id in ids):
            return ids, mask
    fix = "name the field of the documents: column"
    problem = f"is not an object with {column or 'either text or tokens'}, a string or a list of integers"
    if [value for _, value in found] == [None]:
        problem, fix = f"has null as {found[0][0]}", "remove such lines, or name another column"
    elif isinstance(record, dict):
        problem += f" (it has {few(list(record)) or 'nothing'})"
    raise damaged(where, problem, fix)


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


def find_column(path: Path, schema: Any, pyarrow: Any, options: ReadOptions) -> tuple[str, Kind]:
    """The column of documents."""
    column = options.column
    if options.loss_mask is not None:
        options.loss_mask.refuse_absent(path, schema.names)
    found = [name for name in schema.names if name in _columns(column)]
    if len(found) == 1:
        name, kind = found[0], schema.field(found[0]).type
        values = getattr(kind, "value_type", None)
        if pyarrow.types.is_dictionary(kind):  # of strings, each written once
            kind, values = values, None
        if str(kind) in ("string", "large_string", "string_view") and name in (column, "text"):
            return name, "text"
        if values is not None and pyarrow.types.is_integer(values) and name in (column, "tokens"):
            return name, "ids"
    columns = ", ".join(f"{field.name}: {field.type}" for field in schema) or "none"
    problem = f"needs one column {column or 'text or tokens'}, of strings or lists of integers (its columns: {columns})"
    raise damaged(path, problem, f"name the one of the documents: column; {FOR_SERIES}")


def _tokens(where: str, array: Any, tokenizer: Tokenizer) -> list[TokenArray]:
    from pyarrow.compute import list_value_length  # of any list: a cast of views loses values

    values = array.flatten()
    if values.null_count:
        raise damaged(where, "have a null token", "write an id for every token")
    ids = values.to_numpy(zero_copy_only=False)
    IdBounds.of(where, tokenizer).check(ids, 0)
    ends = np.cumsum(list_value_length(array).to_numpy(zero_copy_only=False))
    return list(np.split(ids, ends[:-1]))


def parquet_pieces(path: Path, options: ReadOptions) -> Iterator[TokenArray]:
    """The ids of each document, tokenized while row groups are read."""
    with pyarrow_for(path, "Parquet") as pyarrow, pyarrow.parquet.ParquetFile(path) as file:
        name, kind = find_column(path, file.schema_arrow, pyarrow, options)
        names = [name]
        if options.loss_mask is not None:
            names.append(options.loss_mask.field)
        batches = file.iter_batches(BATCH_ROWS, columns=names)
        yield from pieces_of_rows(path, batches, name, kind, options)


def pieces_of_rows(
    path: Path, batches: Iterable[Any], name: str, kind: Kind, options: ReadOptions
) -> Iterator[TokenArray]:
    """The same of pyarrow's batches of rows, from the column `name`."""
    row = 0
    for batch in batches:
        array = batch.column(name)
        if kind == "text":  # strings of any kind, or a dictionary
            array = array.cast("large_string")
        where = f"{path}: rows {row} to {row + len(array) - 1}"
        if array.null_count:
            raise damaged(where, f"{name} is null in one", "remove such rows")
        contents: Any = array.to_pylist() if kind == "text" else _tokens(where, array, options.tokenizer)
        masks = [None] * len(array)
        if options.loss_mask is not None:
            batch.column(options.loss_mask.field).validate(full=True)
            masks = batch.column(options.loss_mask.field).to_pylist()
        places = [f"{path}: row {number}" for number in range(row, row + len(array))]
        yield from _encoded(list(zip(places, contents, masks, strict=True)), options)
        row += len(array)


def compressed_pieces(path: Path, options: ReadOptions) -> Iterator[TokenArray]:
    """The ids of each document of JSON lines, tokenized while they are decompressed."""
    if path.suffix.lower() == ".gz":
        try:
            with gzip.open(path) as lines:
                yield from pieces_of_lines(path, lines, options)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise damaged(path, f"is not a whole gzip file ({error})") from error
    else:  # the package zstandard takes a file that was cut for a whole one
        with pyarrow_for(path, "zstandard") as pyarrow, pyarrow.input_stream(str(path), "zstd") as stream:
            yield from pieces_of_lines(path, io.BufferedReader(stream), options)


def arrow_pieces(path: Path, options: ReadOptions) -> Iterator[TokenArray]:
    """The ids of each document, tokenized while batches are read from the mapped file."""
    with pyarrow_for(path, "Arrow") as pyarrow, pyarrow.memory_map(str(path)) as mapped:
        if mapped.read(len(ARROW_FILE)) == ARROW_FILE:
            file = pyarrow.ipc.open_file(mapped)
            schema, batches = file.schema, map(file.get_batch, range(file.num_record_batches))
        else:
            mapped.seek(mapped.size() - len(STREAM_END))
            if mapped.read() != STREAM_END:  # pyarrow does not see a cut between two batches
                raise damaged(path, "has no end of an Arrow stream", "copy or write it again")
            mapped.seek(0)
            batches = pyarrow.ipc.open_stream(mapped)
            schema = batches.schema
        name, kind = find_column(path, schema, pyarrow, options)
        yield from pieces_of_rows(path, _parts(batches, name), name, kind, options)


def _parts(batches: Any, name: str) -> Iterator[Any]:
    """The batches, in parts of little text."""
    for batch in batches:
        batch.column(name).validate(full=True)  # damaged offsets would be read beyond the file
        rows = max(1, min(BATCH_ROWS, BATCH * len(batch) // max(batch.nbytes, 1)))
        yield from (batch.slice(at, rows) for at in range(0, len(batch), rows))


def files_of_data_sets(paths: Sequence[str]) -> list[str]:
    """Arrow files without those that a list in their directory does not name: they are caches.

    Raises UserError: a list is damaged or names what is not there, or they are of several splits.
    """
    found = {*paths}
    folders = sorted({Path(path).parent for path in paths})
    for folder in folders:
        if (folder.parent / SPLITS).is_file():
            splits = [each.name for each in folders if each.parent == folder.parent]
            example = min(splits, key="train".__ne__)
            if len(splits) > 1:
                fix = f'name one: paths = ["{folder.parent}/{example}"]'
                raise damaged(folder.parent, f"is a data set of splits: {few(splits)}", fix)
        if (folder / SAVED).is_file():
            try:
                names = {str(each["filename"]) for each in json.loads((folder / SAVED).read_bytes())["_data_files"]}
            except (OSError, ValueError, TypeError, KeyError) as error:
                raise damaged(folder / SAVED, f"does not list the files of a data set ({error!r})") from error
            lost = sorted(name for name in names if not (folder / name).is_file())
            if lost:
                raise damaged(folder, f"lacks {few(lost)}, which its {SAVED} lists", "copy it")
            found -= {str(path) for path in map(Path, paths) if path.parent == folder and path.name not in names}
    return [*found]
