"""What every format offers: documents, each a run of tokens that can be read from anywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trainer.data.formats.id_bounds import IdBounds
from trainer.data.keyed import IntArray
from trainer.data.tokenizer import Tokenizer

TokenArray = npt.NDArray[Any]  # any integer dtype: as it is on the disk


class Documents(Protocol):
    """The documents of one stream. Nothing is read before something is asked."""

    @property
    def num_documents(self) -> int:
        """How many documents the stream has."""
        ...

    @property
    def lengths(self) -> IntArray:
        """Tokens per document, int64 [num_documents]."""
        ...

    def read(self, document: int, start: int, stop: int) -> TokenArray:
        """Tokens [start, stop) of a document, in any integer dtype."""
        ...

    def close(self) -> None:
        """Let go of files and memory."""
        ...


@dataclass(frozen=True)
class TokenTable:
    """All tokens of a stream in one array (in memory or mapped), and where each document lies in it.

    `bounds` is None if every id is known to be in the vocabulary; otherwise ids are checked against it when they are read.
    """

    tokens: TokenArray
    starts: IntArray
    lengths: IntArray
    bounds: IdBounds | None = None


@dataclass(frozen=True)
class ReadOptions:
    """How to read a file: everything that a format may need to know.

    Args:
        tokenizer: makes ids of text, and bounds the ids in token files.
        dtype: of a headerless token file (`uint16`, ...).
        eod: the id that ends a document in a token file; None: the file is one document.
        text_split: a raw text file is one document (`file`), or one a block between blank lines (`blank_line`).
    """

    tokenizer: Tokenizer
    dtype: str | None = None
    eod: int | None = None
    text_split: str = "file"


class ArrayDocuments:
    """Documents that lie in one array; the array is made (mapped or tokenised) at the first use."""

    def __init__(self, load: Callable[[], TokenTable]) -> None:
        self._load = load
        self._table: TokenTable | None = None

    @property
    def table(self) -> TokenTable:
        """The array and the documents' places; reads the file at the first use."""
        if self._table is None:
            self._table = self._load()
        return self._table

    @property
    def num_documents(self) -> int:
        """How many documents the stream has."""
        return len(self.table.lengths)

    @property
    def lengths(self) -> IntArray:
        """Tokens per document, int64 [num_documents]."""
        return self.table.lengths

    def read(self, document: int, start: int, stop: int) -> TokenArray:
        """Tokens [start, stop) of a document: a view.

        Raises:
            UserError: an id is outside the vocabulary, with its place.
        """
        table = self.table
        assert 0 <= start <= stop <= table.lengths[document], (document, start, stop)
        begin = int(table.starts[document]) + start
        tokens = table.tokens[begin : begin + stop - start]
        if table.bounds is not None:
            table.bounds.check(tokens, begin)
        return tokens

    def close(self) -> None:
        """Drop the array; a later use reads the file again."""
        self._table = None


def table_from_pieces(pieces: list[TokenArray], vocab_size: int) -> TokenTable:
    """Put documents that were tokenised one by one into one array of the smallest fitting dtype."""
    lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
    tokens = np.empty(int(lengths.sum()), dtype=np.min_scalar_type(max(vocab_size - 1, 0)))
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])[:-1]
    for piece, start in zip(pieces, starts.tolist(), strict=True):
        tokens[start : start + len(piece)] = piece
    return TokenTable(tokens, starts, lengths)
