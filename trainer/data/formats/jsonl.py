"""JSON lines: one document per line, as `text` (tokenized here) or as `tokens` (ids)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.formats.documents import Kind, ReadOptions, TokenArray, TokenTable, table_from_pieces
from trainer.data.tokenizer import Tokenizer
from trainer.errors import UserError


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(where, f"is not UTF-8 text (byte {error.start} of the line)", "convert the file") from error
    except (ValueError, RecursionError) as error:
        raise UserError(where, f"is not JSON ({error})", "write one JSON object per line") from error
    if not isinstance(record, dict):
        raise UserError(where, f"is a JSON {type(record).__name__}, not an object", 'write {"text": "..."}')
    return record


def _tokens(record: dict[str, Any], tokenizer: Tokenizer, where: str) -> TokenArray:
    if ("text" in record) == ("tokens" in record):
        have = "both text and tokens" if "text" in record else "neither text nor tokens"
        raise UserError(where, f"has {have}", "give each line exactly one of the two fields")
    if "text" in record:
        if not isinstance(record["text"], str):
            raise UserError(where, f"text must be a string, got {type(record['text']).__name__}")
        try:
            return tokenizer.encode(record["text"])
        except UnicodeEncodeError as error:
            raise UserError(where, "text has an unpaired surrogate", "write the text as UTF-8") from error
    ids = record["tokens"]
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise UserError(where, "tokens must be a list of integers")
    wrong = next((i for i in ids if not 0 <= i < tokenizer.vocab_size), None)
    if wrong is not None:
        problem = f"token id {wrong} is outside the vocabulary of {tokenizer.vocab_size} ids ({tokenizer.name})"
        raise UserError(where, problem, "use the tokenizer that made the file")
    return np.array(ids, dtype=np.int64)


def load_jsonl(path: Path, options: ReadOptions) -> TokenTable:
    """The documents of a JSON lines file, tokenized into memory; blank lines are skipped.

    Raises:
        UserError: with path and line number, for anything but an object with one of the two fields.
    """
    pieces: list[TokenArray] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path}: line {number}"
                pieces.append(_tokens(_parse(line, where), options.tokenizer, where))
    if not pieces:
        raise UserError(str(path), "has no documents, only blank lines", "remove the file")
    return table_from_pieces(pieces, options.tokenizer.vocab_size, where=str(path))


def jsonl_kind(path: Path) -> Kind:
    """What the first record holds; `text` where it cannot be read, since reading the file gives the better message."""
    try:
        with path.open("rb") as lines:
            first = json.loads(next((line for line in lines if line.strip()), b"{}"))
    except (OSError, ValueError, RecursionError):
        return "text"
    return "ids" if isinstance(first, dict) and "tokens" in first else "text"
