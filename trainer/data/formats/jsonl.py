"""JSON lines: one document per line, as `text` (tokenized here) or as `tokens` (ids)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.formats.documents import Kind, ReadOptions, Span, TokenArray, TokenTable, table_from_pieces
from trainer.data.formats.id_bounds import IdBounds
from trainer.data.tokenizer import BytesTokenizer, Tokenizer, encode_all
from trainer.errors import UserError

BATCH = 1 << 20  # bytes of lines that are tokenized together


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(where, f"is not UTF-8 text (byte {error.start} of the line)", "convert the file") from error
    except (ValueError, RecursionError) as error:
        raise UserError(where, f"is not JSON ({error})", "write one JSON object per line") from error
    if not isinstance(record, dict):
        raise UserError(where, f"is a JSON {type(record).__name__}, not an object", 'write {"text": "..."}')
    return record


def _document(record: dict[str, Any], tokenizer: Tokenizer, where: str) -> str | TokenArray:
    """A record's text, or its ids."""
    if ("text" in record) == ("tokens" in record):
        have = "both text and tokens" if "text" in record else "neither text nor tokens"
        raise UserError(where, f"has {have}", "give each line exactly one of the two fields")
    if "text" in record:
        text = record["text"]
        if not isinstance(text, str):
            raise UserError(where, f"text must be a string, got {type(text).__name__}")
        return text
    ids = record["tokens"]
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise UserError(where, "tokens must be a list of integers")
    bounds = IdBounds.of(where, tokenizer)
    wrong = next((i for i in ids if not 0 <= i < bounds.num_ids), None)
    if wrong is not None:
        raise bounds.refusal(wrong)
    return np.array(ids, dtype=np.int64)


def text_of(line: bytes, where: str) -> str:
    """The text of one line.

    Raises:
        UserError: it is not an object with the field `text`, and without `tokens`.
    """
    record = _parse(line, where)
    if "tokens" in record and "text" not in record:
        raise UserError(where, "holds token ids, not text", "leave the file out: a run reads it as it is")
    text = _document(record, BytesTokenizer(), where)
    assert isinstance(text, str)
    return text


def jsonl_pieces(path: Path, options: ReadOptions, span: Span | None = None) -> Iterator[TokenArray]:
    """The ids of each document, tokenized while they are read; blank lines are skipped.

    Args:
        span: bytes; the lines that begin in them. None: all lines.

    Raises:
        UserError: with path and line number (in a span: its byte offset), for anything but an object with one of the two
            fields.
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
                batch.append((where, _document(_parse(line, where), options.tokenizer, where)))
            at += len(line)
            size += len(line)
            if size >= BATCH:
                yield from _encoded(batch, options.tokenizer)
                batch, size = [], 0
    yield from _encoded(batch, options.tokenizer)


def _encoded(batch: list[tuple[str, str | TokenArray]], tokenizer: Tokenizer) -> Iterator[TokenArray]:
    texts = [document for _, document in batch if isinstance(document, str)]
    try:
        encoded = iter(encode_all(tokenizer, texts))
    except UnicodeEncodeError as error:
        where = next(place for place, text in batch if isinstance(text, str) and text == error.object)
        raise UserError(where, "text has an unpaired surrogate", "write the text as UTF-8") from error
    return (next(encoded) if isinstance(document, str) else document for _, document in batch)


def jsonl_spans(path: Path, size: int) -> list[Span]:
    """Spans of about `size` bytes."""
    total = path.stat().st_size
    return [(start, min(start + size, total)) for start in range(0, total, size)]


def load_jsonl(path: Path, options: ReadOptions) -> TokenTable:
    """The documents of a JSON lines file, tokenized when it is opened.

    Raises:
        UserError: as `jsonl_pieces`; or there is no document.
    """
    table = table_from_pieces(jsonl_pieces(path, options), options.tokenizer.vocab_size, where=str(path))
    if not table.num_documents:
        raise UserError(str(path), "has no documents, only blank lines", "remove the file")
    return table


def jsonl_kind(path: Path) -> Kind:
    """What the first record holds; `text` where it cannot be read, since reading the file gives the better message."""
    try:
        with path.open("rb") as lines:
            first = json.loads(next((line for line in lines if line.strip()), b"{}"))
    except (OSError, ValueError, RecursionError):
        return "text"
    return "ids" if isinstance(first, dict) and "tokens" in first else "text"
