"""Raw text files: one document per file, or one per block between blank lines."""

from __future__ import annotations

import itertools
import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from trainer.arrays import Ints
from trainer.data.formats.documents import ReadOptions, Span, TokenArray, TokenTable, table_from_pieces
from trainer.data.tokenizer import BytesTokenizer
from trainer.errors import UserError

NO_SPACE = re.compile(rb"[^\s]")
BLANK_LINES = re.compile(rb"\n(?:[ \t\r]*\n)+")


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
    """The ids of each document, tokenized while they are read. A span is all of the file.

    Raises:
        UserError: text that is not UTF-8 (with the byte's offset).
    """
    data = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    for start, stop in itertools.pairwise(_bounds(data, options.text_split).tolist()):
        try:
            text = data[start:stop].tobytes().decode("utf-8")
        except UnicodeDecodeError as error:
            problem = f"is not UTF-8 text (byte offset {start + error.start})"
            raise UserError(str(path), problem, "convert the file to UTF-8, or use the bytes tokenizer") from error
        yield options.tokenizer.encode(text)


def text_spans(path: Path, size: int) -> list[Span]:
    """One: documents may be as long as the file."""
    return [(0, path.stat().st_size)]


def load_text(path: Path, options: ReadOptions) -> TokenTable:
    """The documents of a text file. With the bytes tokenizer the file itself is mapped, whatever its bytes.

    Raises:
        UserError: with another tokenizer, text that is not UTF-8 (with the byte's offset).
    """
    if isinstance(options.tokenizer, BytesTokenizer):
        mapped = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
        bounds = _bounds(mapped, options.text_split)
        return TokenTable(mapped, bounds[:-1], np.diff(bounds))
    return table_from_pieces(text_pieces(path, options), options.tokenizer.vocab_size, where=str(path))
