"""Formats that hold text: raw text files, JSON lines, and Parquet (extra `parquet`, pyarrow).

JSON lines and Parquet hold one document per line or row, as `text` (tokenized here) or as `tokens` (ids), or as either in a
column that is named. What is damaged is a UserError with the path and the place.
"""

from __future__ import annotations

import itertools
import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.arrays import Ints
from trainer.data.documents import IdBounds, Kind, ReadOptions, Span, TokenArray, TokenTable, damaged, table_from_pieces
from trainer.data.tokenizer import BytesTokenizer, Tokenizer, encode_all
from trainer.errors import UserError

NO_SPACE = re.compile(rb"[^\s]")
BLANK_LINES = re.compile(rb"\n(?:[ \t\r]*\n)+")
BATCH = 1 << 20  # bytes of lines that are tokenized together
BATCH_ROWS = 1024  # likewise
COLUMNS = ("text", "tokens")


def _bounds(data: TokenArray, text_split: str) -> Ints:
    """Where documents begin, in bytes, and the end of the last; a byte-order mark is part of none."""
    begin = len(BOM_UTF8) if data[: len(BOM_UTF8)].tobytes() == BOM_UTF8 else 0
    starts = [begin]
    if text_split == "blank_line":
        view = memoryview(data)  # type: ignore[arg-type]
        first = NO_SPACE.search(view, begin)
        ends = (match.end() for match in BLANK_LINES.finditer(view))
        starts += [end for end in ends if end < len(data) and first is not None and end > first.start()]
    return np.array([*starts, len(data)], dtype=np.int64)


def text_pieces(path: Path, options: ReadOptions, span: Span | None = None) -> Iterator[TokenArray]:
    """The ids of each document, tokenized while they are read. A span is all of the file."""
    data = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    for start, stop in itertools.pairwise(_bounds(data, options.text_split).tolist()):
        if isinstance(options.tokenizer, BytesTokenizer):  # any bytes will do
            yield from _ended([data[start:stop]], options)
            continue
        try:
            text = data[start:stop].tobytes().decode("utf-8")
        except UnicodeDecodeError as error:
            problem = f"is not UTF-8 text (byte offset {start + error.start})"
            raise damaged(path, problem, "convert the file to UTF-8, or use the bytes tokenizer") from error
        yield from _ended([options.tokenizer.encode(text)], options)


def _ended(texts: Sequence[TokenArray], options: ReadOptions) -> list[TokenArray]:
    """The ids of texts, each but an empty one with the id that ends documents, if there is one."""
    if (eod := options.text_eod) is None:
        return [*texts]
    return [np.append(ids.astype(np.int64, copy=False), eod) if len(ids) and ids[-1] != eod else ids for ids in texts]


def text_spans(path: Path, size: int) -> list[Span]:
    """One: documents may be as long as the file."""
    return [(0, path.stat().st_size)]


def load_text(path: Path, options: ReadOptions) -> TokenTable:
    """The documents of a text file. With the bytes tokenizer the file itself is mapped, whatever its bytes."""
    if isinstance(options.tokenizer, BytesTokenizer) and options.text_eod is None:
        mapped = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
        bounds = _bounds(mapped, options.text_split)
        return TokenTable(mapped, bounds[:-1], np.diff(bounds))
    return table_from_pieces(text_pieces(path, options), options.tokenizer.vocab_size, where=str(path))


def document_of(line: bytes, where: str, column: str | None = None) -> str | list[int]:
    """The text of a line, or its ids; see `ReadOptions`."""
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise damaged(where, f"is not UTF-8 text (byte {error.start} of the line)", "convert the file") from error
    except (ValueError, RecursionError) as error:
        raise damaged(where, f"is not JSON ({error})", "write one JSON object per line") from error
    names = COLUMNS if column is None else (column,)
    found = [(name, record[name]) for name in names if name in record] if isinstance(record, dict) else []
    match found:
        case [(name, str() as text)] if name in (column, "text"):
            return text
        case [(name, list() as ids)] if name in (column, "tokens") and all(type(i) is int for i in ids):
            return ids
    if column is not None:
        problem = f"is not an object with {column}, a string or a list of integers"
        raise damaged(where, problem, "name the field of the documents: column")
    problem = "is not an object with either text (a string) or tokens (a list of integers)"
    raise damaged(where, problem, 'write {"text": "..."} or {"tokens": [...]}, or name the field: column')


def jsonl_pieces(path: Path, options: ReadOptions, span: Span | None = None) -> Iterator[TokenArray]:
    """The ids of each document, tokenized while they are read; blank lines are skipped.

    Args:
        span: bytes; the lines that begin in them. None: all lines.
    """
    start, stop = span if span is not None else (0, path.stat().st_size)
    batch: list[tuple[str, str | TokenArray]] = []
    size = 0
    with path.open("rb") as lines:
        if start:
            lines.seek(start - 1)
            lines.readline()  # of the span before
        at = lines.tell()
        for number, line in enumerate(lines, start=1):
            if at >= stop:
                break
            if line.strip():
                where = f"{path}: line {number}" if span is None else f"{path}: line at byte offset {at}"
                document = document_of(line, where, options.column)
                batch.append(
                    (where, document if isinstance(document, str) else _checked(document, options.tokenizer, where))
                )
            at += len(line)
            size += len(line)
            if size >= BATCH:
                yield from _encoded(batch, options)
                batch, size = [], 0
    yield from _encoded(batch, options)


def _checked(ids: list[int], tokenizer: Tokenizer, where: str) -> TokenArray:
    bounds = IdBounds.of(where, tokenizer)
    if (wrong := next((i for i in ids if not 0 <= i < bounds.num_ids), None)) is not None:
        raise bounds.refusal(wrong)
    return np.array(ids, dtype=np.int64)


def _encoded(batch: list[tuple[str, str | TokenArray]], options: ReadOptions) -> Iterator[TokenArray]:
    texts = [document for _, document in batch if isinstance(document, str)]
    try:
        encoded = iter(_ended(encode_all(options.tokenizer, texts), options))
    except UnicodeEncodeError as error:
        where = next(place for place, text in batch if isinstance(text, str) and text == error.object)
        raise damaged(where, "text has an unpaired surrogate", "write the text as UTF-8") from error
    return (next(encoded) if isinstance(document, str) else document for _, document in batch)


def jsonl_spans(path: Path, size: int) -> list[Span]:
    """Spans of about `size` bytes."""
    total = path.stat().st_size
    return [(start, min(start + size, total)) for start in range(0, total, size)]


def jsonl_kind(path: Path, column: str | None) -> Kind:
    """What the first record holds; `text` where it cannot be read, since reading the file gives the better message."""
    try:
        with path.open("rb") as lines:
            first = json.loads(next((line for line in lines if line.strip()), b"{}"))
    except (OSError, ValueError, RecursionError):
        return "text"
    if column is None:
        return "ids" if isinstance(first, dict) and "tokens" in first else "text"
    return "ids" if isinstance(first, dict) and isinstance(first.get(column), list) else "text"


def _pyarrow(path: Path) -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise damaged(path, "needs the package pyarrow, which is not installed", "run: pip install pyarrow") from error
    return pyarrow, pyarrow.parquet


def _column(path: Path, schema: Any, pyarrow: Any, column: str | None) -> tuple[str, Kind, Any]:
    """The column of documents, what it holds once its type is checked, and the one type of strings or lists to read it as."""
    found = [name for name in (COLUMNS if column is None else (column,)) if name in schema.names]
    kind = schema.field(found[0]).type if len(found) == 1 else pyarrow.null()
    is_dictionary, values = pyarrow.types.is_dictionary(kind), getattr(kind, "value_type", None)
    is_text = str(values if is_dictionary else kind) in ("string", "large_string", "string_view")
    if is_text and found[0] in (column, "text"):
        return found[0], "text", pyarrow.large_string()
    is_ids = values is not None and not is_dictionary and pyarrow.types.is_integer(values)
    if is_ids and found[0] in (column, "tokens"):
        return found[0], "ids", pyarrow.large_list(values)
    columns = ", ".join(f"{field.name}: {field.type}" for field in schema) or "none"
    needed = "either a column text of strings or a column tokens of lists of integers"
    if column is not None:
        needed = f"a column {column} of strings or lists of integers"
    raise damaged(path, f"needs {needed} (its columns: {columns})", "name the one of the documents: column")


def _texts(path: Path, array: Any, first_row: int, options: ReadOptions) -> list[TokenArray]:
    try:
        return _ended(encode_all(options.tokenizer, array.to_pylist()), options)
    except UnicodeDecodeError as error:
        problem = f"a text in rows {first_row} to {first_row + len(array) - 1} is not UTF-8 ({error.reason})"
        raise damaged(path, problem) from error


def _tokens(path: Path, array: Any, first_row: int, tokenizer: Tokenizer) -> list[TokenArray]:
    values, where = array.flatten(), f"{path}: rows {first_row} to {first_row + len(array) - 1}"
    if values.null_count:
        raise damaged(where, "have a null token", "write an id for every token")
    ids = values.to_numpy(zero_copy_only=False)
    IdBounds.of(where, tokenizer).check(ids, 0)
    ends = np.cumsum(array.value_lengths().to_numpy(zero_copy_only=False))
    pieces: list[TokenArray] = np.split(ids, ends[:-1])
    return pieces


def parquet_pieces(path: Path, options: ReadOptions, span: Span | None = None) -> Iterator[TokenArray]:
    """The ids of each document, tokenized while row groups are read.

    Args:
        span: row groups, from and up to; None: all.
    """
    pyarrow, parquet = _pyarrow(path)
    try:
        with parquet.ParquetFile(path) as file:
            column, kind, plain = _column(path, file.schema_arrow, pyarrow, options.column)
            groups = range(*span) if span is not None else range(file.num_row_groups)
            row = sum(file.metadata.row_group(group).num_rows for group in range(groups.start))
            for batch in file.iter_batches(BATCH_ROWS, row_groups=list(groups), columns=[column]):
                array = batch.column(0).cast(plain)
                if array.null_count:
                    place = row + array.is_null().to_pylist().index(True)
                    raise damaged(path, f"row {place}: {column} is null", "remove such rows")
                if kind == "text":
                    yield from _texts(path, array, row, options)
                else:
                    yield from _tokens(path, array, row, options.tokenizer)
                row += len(array)
    except UserError:
        raise
    except Exception as error:  # pyarrow raises many types for a damaged file
        raise damaged(path, f"is not a readable Parquet file ({error})") from error


def parquet_spans(path: Path, size: int) -> list[Span]:
    """Row groups of together about `size` bytes, uncompressed."""
    _, parquet = _pyarrow(path)
    try:
        metadata = parquet.read_metadata(path)
    except Exception as error:  # pyarrow raises many types for a damaged file
        raise damaged(path, f"is not a readable Parquet file ({error})") from error
    cuts, held = [0], 0
    for group in range(metadata.num_row_groups):
        held += metadata.row_group(group).total_byte_size
        if held >= size:
            cuts.append(group + 1)
            held = 0
    return list(itertools.pairwise(dict.fromkeys([*cuts, metadata.num_row_groups])))


def parquet_kind(path: Path, column: str | None) -> Kind:
    """What the columns hold; `text` where they cannot be read, since reading the file gives the better message."""
    pyarrow, parquet = _pyarrow(path)
    try:
        return _column(path, parquet.read_schema(path), pyarrow, column)[1]
    except Exception:  # noqa: BLE001 - pyarrow raises many types for a damaged file
        return "text"
