"""What every format produces: the documents of a file as runs of tokens in one array."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from trainer.arrays import Ints
from trainer.data.formats.id_bounds import IdBounds
from trainer.data.tokenizer import Tokenizer
from trainer.errors import UserError

TokenArray = npt.NDArray[Any]  # any integer dtype: as stored on disk
Kind: TypeAlias = Literal["text", "ids"]
"""What a file holds: text to be tokenized, or token ids."""
CHUNK = 1 << 16  # tokens checked together
TEXT_SPLITS = ("file", "blank_line")


@dataclass(frozen=True)
class TokenTable:
    """All tokens of a file in one array (in memory or mapped), and the place of each document in it.

    Args:
        tokens: any integer dtype, [N].
        starts: where each document begins, int64 [D].
        lengths: tokens per document, int64 [D].
        bounds: None if every id is known to be in the vocabulary; otherwise ids are checked as they are read.
    """

    tokens: TokenArray
    starts: Ints
    lengths: Ints
    bounds: IdBounds | None = None

    @property
    def num_documents(self) -> int:
        """D."""
        return len(self.lengths)

    def read(self, document: int, start: int, stop: int) -> TokenArray:
        """Tokens [start, stop) of a document, as a view.

        Raises:
            UserError: an id is outside the vocabulary, with its position.
        """
        assert 0 <= start <= stop <= self.lengths[document], (document, start, stop)
        begin = int(self.starts[document]) + start
        tokens = self.tokens[begin : begin + stop - start]
        if self.bounds is not None:
            self.bounds.check(tokens, begin)
        return tokens


@dataclass(frozen=True)
class ReadOptions:
    """How to read a file: everything that a format may need to know.

    Args:
        tokenizer: tokenizes text, and bounds the ids in token files.
        dtype: of a headerless token file (`uint16`, ...).
        eod: the id that ends a document in a token file; None: the file is one document.
        text_split: a raw text file is one document (`file`), or one per block between blank lines (`blank_line`).

    Raises:
        UserError: an unknown `text_split`.
    """

    tokenizer: Tokenizer
    dtype: str | None = None
    eod: int | None = None
    text_split: str = "file"

    def __post_init__(self) -> None:
        if self.text_split not in TEXT_SPLITS:
            raise UserError("text_split", f"must be one of {', '.join(TEXT_SPLITS)}; got {self.text_split!r}")


def table_from_pieces(pieces: list[TokenArray], vocab_size: int, *, where: str = "tokens") -> TokenTable:
    """Concatenate documents that were tokenized one by one, in the smallest dtype that holds the vocabulary.

    Args:
        pieces: the ids of each document, any integer dtype.
        vocab_size: number of ids.
        where: the file, for messages.

    Raises:
        UserError: an id is outside the vocabulary; in the smaller dtype it would turn into another one.
    """
    lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
    tokens = np.empty(int(lengths.sum()), dtype=np.min_scalar_type(max(vocab_size - 1, 0)))
    ends = np.cumsum(lengths)
    # Short documents together: a check of each alone would take longer than all else here.
    cuts = np.unique(np.searchsorted(ends, np.arange(CHUNK, len(tokens), CHUNK))).tolist()
    for first, last in itertools.pairwise([0, *(cut for cut in cuts if cut), len(pieces)]):
        if first == last:
            continue
        chunk = np.concatenate(pieces[first:last])
        stop = int(ends[last - 1])
        if chunk.size and not 0 <= chunk.min() <= chunk.max() < vocab_size:
            at = int(np.flatnonzero((chunk < 0) | (chunk >= vocab_size))[0])
            document = int(np.searchsorted(ends, stop - len(chunk) + at, side="right"))
            problem = f"document {document}: token id {int(chunk[at])} is outside the vocabulary of {vocab_size} ids"
            raise UserError(where, problem, "use the tokenizer that made the ids")
        tokens[stop - len(chunk) : stop] = chunk
    return TokenTable(tokens, ends - lengths, lengths)
