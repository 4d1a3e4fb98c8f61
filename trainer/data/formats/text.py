"""Raw text files: one document per file, or one per block between blank lines."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from trainer.data.formats.documents import ReadOptions, TokenArray, TokenTable, table_from_pieces
from trainer.data.tokenizer import BytesTokenizer
from trainer.errors import UserError

BLANK_LINES = re.compile(rb"\n(?:[ \t\r]*\n)+")


def _block_starts(data: bytes) -> list[int]:
    ends = [match.end() for match in BLANK_LINES.finditer(data)]
    return [0] + [end for end in ends if end < len(data) and data[:end].strip()]


def load_text(path: Path, options: ReadOptions) -> TokenTable:
    """The documents of a text file. With the bytes tokenizer the file itself is mapped, whatever its bytes.

    Raises:
        UserError: with another tokenizer, text that is not UTF-8 (with the byte's offset).
    """
    mapped = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    starts = [0] if options.text_split == "file" else _block_starts(mapped.tobytes())
    bounds = np.array([*starts, len(mapped)], dtype=np.int64)
    if isinstance(options.tokenizer, BytesTokenizer):
        return TokenTable(mapped, bounds[:-1], np.diff(bounds))
    data = mapped.tobytes()
    pieces: list[TokenArray] = []
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        try:
            text = data[start:stop].decode("utf-8")
        except UnicodeDecodeError as error:
            problem = f"is not UTF-8 text (byte offset {start + error.start})"
            raise UserError(str(path), problem, "convert the file to UTF-8, or use the bytes tokenizer") from error
        pieces.append(options.tokenizer.encode(text))
    return table_from_pieces(pieces, options.tokenizer.vocab_size, where=str(path))
