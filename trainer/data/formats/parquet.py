"""Parquet (extra `parquet`, pyarrow): one document per row, in a column `text` (tokenized here) or `tokens` (id lists)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.formats.documents import Kind, ReadOptions, TokenArray, TokenTable, table_from_pieces
from trainer.data.formats.id_bounds import IdBounds
from trainer.errors import UserError

COLUMNS = ("text", "tokens")


def _pyarrow(path: Path) -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        problem = "needs the package pyarrow, which is not installed"
        raise UserError(str(path), problem, "run: pip install 'trainer[parquet]'") from error
    return pyarrow, pyarrow.parquet


def _column(path: Path, schema: Any, types: Any) -> str:
    """The column of documents, once its type is checked."""
    found = [name for name in COLUMNS if name in schema.names]
    if len(found) != 1:
        have = "both columns text and tokens" if found else "neither a column text nor a column tokens"
        columns = ", ".join(schema.names) or "none"
        raise UserError(str(path), f"has {have} (its columns: {columns})", "give it exactly one of the two")
    kind = schema.field(found[0]).type
    if found == ["text"]:
        fits, wanted = types.is_string(kind) or types.is_large_string(kind), "strings"
    else:
        is_list = types.is_list(kind) or types.is_large_list(kind)
        fits, wanted = is_list and types.is_integer(kind.value_type), "lists of integers"
    if not fits:
        raise UserError(str(path), f"its column {found[0]} must hold {wanted}, got {kind}", "write the file again")
    return found[0]


def _texts(path: Path, array: Any, first_row: int, options: ReadOptions) -> list[TokenArray]:
    try:
        return [options.tokenizer.encode(text) for text in array.to_pylist()]
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
        place = int(np.flatnonzero((ids < 0) | (ids >= bounds.vocab_size))[0])
        row = first_row + int(np.searchsorted(ends, place, side="right"))
        problem = f"row {row}: token id {int(ids[place])} is outside the vocabulary of {bounds.vocab_size} ids"
        raise UserError(str(path), f"{problem} ({bounds.tokenizer})", "use the tokenizer that made the file")
    pieces: list[TokenArray] = np.split(ids, ends[:-1])
    return pieces


def load_parquet(path: Path, options: ReadOptions) -> TokenTable:
    """The documents of a Parquet file, read into memory.

    Raises:
        UserError: pyarrow is not installed; the file is not Parquet; the column is missing, of the wrong type, or has
            nulls or ids outside the vocabulary.
    """
    pyarrow, parquet = _pyarrow(path)
    pieces: list[TokenArray] = []
    rows = 0
    try:
        with parquet.ParquetFile(path) as file:
            column = _column(path, file.schema_arrow, pyarrow.types)
            for batch in file.iter_batches(columns=[column]):
                array = batch.column(0)
                if array.null_count:
                    row = rows + array.is_null().to_pylist().index(True)
                    raise UserError(str(path), f"row {row}: {column} is null", "remove such rows")
                if column == "text":
                    pieces += _texts(path, array, rows, options)
                else:
                    pieces += _tokens(path, array, rows, IdBounds.of(path, options.tokenizer))
                rows += len(array)
    except UserError:
        raise
    except Exception as error:  # pyarrow raises many types for a damaged file
        reason = " ".join(str(error).split())
        raise UserError(str(path), f"is not a readable Parquet file ({reason})", "write the file again") from error
    if not pieces:
        raise UserError(str(path), "has no rows", "remove the file")
    return table_from_pieces(pieces, options.tokenizer.vocab_size, where=str(path))


def parquet_kind(path: Path) -> Kind:
    """What the columns hold; `text` where they cannot be read, since reading the file gives the better message."""
    _, parquet = _pyarrow(path)
    try:
        names = parquet.read_schema(path).names
    except Exception:  # noqa: BLE001 - pyarrow raises many types for a damaged file
        return "text"
    return "ids" if "tokens" in names else "text"
