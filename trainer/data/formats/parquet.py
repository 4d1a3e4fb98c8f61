"""Parquet (extra `parquet`, pyarrow): one document per row, in a column `text` (tokenized here) or `tokens` (id lists)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.formats.documents import Kind, ReadOptions, Span, TokenArray, TokenTable, table_from_pieces
from trainer.data.formats.id_bounds import IdBounds
from trainer.data.tokenizer import encode_all
from trainer.errors import UserError

COLUMNS = ("text", "tokens")
BATCH_ROWS = 1024  # tokenized together


def _pyarrow(path: Path) -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        problem = "needs the package pyarrow, which is not installed"
        raise UserError(str(path), problem, "run: pip install pyarrow") from error
    return pyarrow, pyarrow.parquet


def _column(path: Path, schema: Any, pyarrow: Any) -> tuple[str, Any]:
    """The column of documents, once its type is checked, and the one type of strings or lists to read it as."""
    found = [name for name in COLUMNS if name in schema.names]
    if len(found) != 1:
        have = "both columns text and tokens" if found else "neither a column text nor a column tokens"
        columns = ", ".join(schema.names) or "none"
        raise UserError(str(path), f"has {have} (its columns: {columns})", "give it exactly one of the two")
    kind = schema.field(found[0]).type
    is_dictionary, values = pyarrow.types.is_dictionary(kind), getattr(kind, "value_type", None)
    if found == ["text"]:
        fits = str(values if is_dictionary else kind) in ("string", "large_string", "string_view")
        wanted, plain = "strings", pyarrow.large_string()
    else:
        fits = values is not None and not is_dictionary and pyarrow.types.is_integer(values)
        wanted, plain = "lists of integers", pyarrow.large_list(values) if fits else None
    if not fits:
        raise UserError(str(path), f"its column {found[0]} must hold {wanted}, got {kind}", "write the file again")
    return found[0], plain


def _texts(path: Path, array: Any, first_row: int, options: ReadOptions) -> list[TokenArray]:
    try:
        return list(encode_all(options.tokenizer, array.to_pylist()))
    except UnicodeDecodeError as error:
        rows = f"rows {first_row} to {first_row + len(array) - 1}"
        raise UserError(str(path), f"a text in {rows} is not UTF-8 ({error.reason})", "write the file again") from error


def _tokens(path: Path, array: Any, first_row: int, bounds: IdBounds) -> list[TokenArray]:
    values = array.flatten()
    if values.null_count:
        raise UserError(str(path), f"a list from row {first_row} on has a null token", "write an id for every token")
    ids = values.to_numpy(zero_copy_only=False)
    ends = np.cumsum(array.value_lengths().to_numpy(zero_copy_only=False))
    if bounds.is_broken_by(ids):
        place = bounds.first_outside(ids)
        row = first_row + int(np.searchsorted(ends, place, side="right"))
        raise replace(bounds, where=f"{path}: row {row}").refusal(int(ids[place]))
    pieces: list[TokenArray] = np.split(ids, ends[:-1])
    return pieces


def parquet_pieces(path: Path, options: ReadOptions, span: Span | None = None) -> Iterator[TokenArray]:
    """The ids of each document, tokenized while row groups are read.

    Args:
        span: row groups, from and up to; None: all.

    Raises:
        UserError: pyarrow is not installed; the file is not Parquet; the column is missing, of the wrong type, or has
            nulls or ids outside the vocabulary.
    """
    pyarrow, parquet = _pyarrow(path)
    try:
        with parquet.ParquetFile(path) as file:
            column, plain = _column(path, file.schema_arrow, pyarrow)
            groups = range(*span) if span is not None else range(file.num_row_groups)
            row = sum(file.metadata.row_group(group).num_rows for group in range(groups.start))
            for batch in file.iter_batches(BATCH_ROWS, row_groups=list(groups), columns=[column]):
                array = batch.column(0).cast(plain)
                if array.null_count:
                    place = row + array.is_null().to_pylist().index(True)
                    raise UserError(str(path), f"row {place}: {column} is null", "remove such rows")
                if column == "text":
                    yield from _texts(path, array, row, options)
                else:
                    yield from _tokens(path, array, row, IdBounds.of(path, options.tokenizer))
                row += len(array)
    except UserError:
        raise
    except Exception as error:  # pyarrow raises many types for a damaged file
        reason = " ".join(str(error).split())
        raise UserError(str(path), f"is not a readable Parquet file ({reason})", "write the file again") from error


def parquet_spans(path: Path, size: int) -> list[Span]:
    """Row groups of together about `size` bytes, uncompressed.

    Raises:
        UserError: pyarrow is not installed, or the file is not Parquet.
    """
    _, parquet = _pyarrow(path)
    try:
        metadata = parquet.read_metadata(path)
    except Exception as error:  # pyarrow raises many types for a damaged file
        reason = " ".join(str(error).split())
        raise UserError(str(path), f"is not a readable Parquet file ({reason})", "write the file again") from error
    cuts, held = [0], 0
    for group in range(metadata.num_row_groups):
        held += metadata.row_group(group).total_byte_size
        if held >= size:
            cuts.append(group + 1)
            held = 0
    return list(itertools.pairwise(dict.fromkeys([*cuts, metadata.num_row_groups])))


def load_parquet(path: Path, options: ReadOptions) -> TokenTable:
    """The documents of a Parquet file, tokenized when it is opened.

    Raises:
        UserError: as `parquet_pieces`; or there are no rows.
    """
    table = table_from_pieces(parquet_pieces(path, options), options.tokenizer.vocab_size, where=str(path))
    if not table.num_documents:
        raise UserError(str(path), "has no rows", "remove the file")
    return table


def parquet_kind(path: Path) -> Kind:
    """What the columns hold; `text` where they cannot be read, since reading the file gives the better message."""
    _, parquet = _pyarrow(path)
    try:
        names = parquet.read_schema(path).names
    except Exception:  # noqa: BLE001 - pyarrow raises many types for a damaged file
        return "text"
    return "ids" if "tokens" in names else "text"
