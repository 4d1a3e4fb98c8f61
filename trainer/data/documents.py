"""The documents of a file as runs of tokens in one array, and the range that its token ids must lie in."""

from __future__ import annotations

import itertools
import tempfile
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from trainer.arrays import Ints
from trainer.data.tokenizer import IdsTokenizer, Tokenizer
from trainer.errors import UserError

AGAIN = "write the file again"
WHOLE = 1 << 22  # tokens: files up to this size are checked completely when they are opened
SAMPLE, NUM_SAMPLES = 1 << 14, 16  # larger files: this many stretches of this many tokens, both ends included


def damaged(where: Path | str, problem: str, fix: str = AGAIN) -> UserError:
    """The error for a file, or a place in it, that does not hold what its format promises."""
    return UserError(str(where), " ".join(problem.split()), fix)


@dataclass(frozen=True)
class IdBounds:
    """Ids of a file must be at least 0 and less than the number of ids.

    Args:
        where: the file or the place in it, for messages.
        num_ids: the ids are 0 to num_ids - 1. With the tokenizer `ids`, `data.vocab_size`: the id that begins documents
            follows them and must not be in a file. With any other tokenizer, its whole vocabulary.
        tokenizer: its name, for messages.
    """

    where: str
    num_ids: int
    tokenizer: str

    @classmethod
    def of(cls, where: Path | str, tokenizer: Tokenizer) -> IdBounds:
        """The bounds that a tokenizer sets for a file."""
        num_ids = tokenizer.bos_id if isinstance(tokenizer, IdsTokenizer) else tokenizer.vocab_size
        return cls(str(where), num_ids, tokenizer.name)

    def refusal(self, token: int, *, at: int | None = None, dtype: np.dtype[Any] | None = None) -> UserError:
        """The error for an id that is out of range, at this position of the file, read with this dtype."""
        position = "" if at is None else f" at token {at}"
        read_as = "" if dtype is None else f", read as {dtype}"
        fix = "data.vocab_size" if self.tokenizer == IdsTokenizer.name else "the tokenizer"
        return damaged(
            self.where,
            f"token id {token}{position} is outside the vocabulary of {self.num_ids} ids ({self.tokenizer}){read_as}",
            f"set {fix}, or the dtype of a .bin, to that of the tool that made the file",
        )

    def check_eod(self, eod: int, key: str = "eod") -> None:
        """Refuse an end-of-document id that no file can hold.

        Raises:
            UserError: it is outside the vocabulary.
        """
        if not 0 <= eod < self.num_ids:
            problem = f"{eod} is outside the vocabulary of {self.num_ids} ids ({self.tokenizer})"
            raise UserError(key, problem, "set it to the id that ends documents in the files")

    def is_broken_by(self, tokens: npt.NDArray[Any]) -> bool:
        """Whether some id is out of range."""
        if tokens.size == 0:
            return False
        # Viewed as unsigned, a negative id is a large one: a single maximum checks both ends.
        seen = tokens if tokens.dtype.kind == "u" else tokens.view(f"u{tokens.dtype.itemsize}")
        return int(np.maximum.reduce(seen, axis=None)) >= self.num_ids

    def check(self, tokens: npt.NDArray[Any], begin: int) -> None:
        """Reject the first id that is out of range; `begin` is the position of `tokens` in the file.

        Raises:
            UserError: with the id and its position.
        """
        if self.is_broken_by(tokens):
            at = self.first_outside(tokens)
            raise self.refusal(int(tokens[at]), at=begin + at, dtype=tokens.dtype)

    def first_outside(self, tokens: npt.NDArray[Any]) -> int:
        """The index of the first id that is out of range; there is one."""
        return int(np.flatnonzero((tokens < 0) | (tokens >= self.num_ids))[0])

    def check_sample(self, tokens: npt.NDArray[Any]) -> IdBounds | None:
        """Check a small file completely, or a few stretches of a large one.

        Returns:
            None if every id is known to be in range, otherwise these bounds, for later reads.

        Raises:
            UserError: as `check`.
        """
        if np.iinfo(tokens.dtype).min == 0 and np.iinfo(tokens.dtype).max < self.num_ids:
            return None
        if len(tokens) <= WHOLE:
            self.check(tokens, 0)
            return None
        for start in np.linspace(0, len(tokens) - SAMPLE, NUM_SAMPLES).astype(np.int64).tolist():
            self.check(tokens[start : start + SAMPLE], start)
        return self


TokenArray = npt.NDArray[Any]  # any integer dtype: as stored on disk
Kind: TypeAlias = Literal["text", "ids"]
"""What a file holds: text to be tokenized, or token ids."""
Span: TypeAlias = tuple[int, int]
"""A part of a file that is tokenized alone: from and up to; in bytes, or in whatever its format counts."""
CHUNK = 1 << 16  # tokens checked together
SPOOLED = 256_000_000  # bytes of tokens that a file of text may take in memory
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
        format: `auto` (by file extension), a key of `FORMATS`, or an import path `package.module:function`.

    Raises:
        UserError: an unknown `text_split`.
    """

    tokenizer: Tokenizer
    dtype: str | None = None
    eod: int | None = None
    text_split: str = "file"
    format: str = "auto"

    def __post_init__(self) -> None:
        if self.text_split not in TEXT_SPLITS:
            raise UserError("text_split", f"must be one of {', '.join(TEXT_SPLITS)}; got {self.text_split!r}")


def table_from_pieces(pieces: Iterable[TokenArray], vocab_size: int, *, where: str = "tokens") -> TokenTable:
    """Concatenate documents that are tokenized one by one, in the smallest dtype that holds the vocabulary.

    Large ones do not stay in memory: their tokens are in a file of the directory for temporary files (`TMPDIR`), mapped.

    Args:
        pieces: the ids of each document, any integer dtype.
        vocab_size: number of ids.
        where: the file, for messages.

    Raises:
        UserError: an id is outside the vocabulary; in the smaller dtype it would turn into another one.
    """
    dtype, lengths = np.dtype(np.min_scalar_type(max(vocab_size - 1, 0))), array("q")
    bounds = IdBounds(where, vocab_size, "the tokenizer")
    with tempfile.SpooledTemporaryFile(SPOOLED, prefix="trainer-tokens-") as store:
        waiting: list[TokenArray] = []
        size = 0
        # Short documents together: a check of each alone would take longer than all else here.
        for piece in itertools.chain(pieces, [None]):
            if piece is not None:
                waiting.append(piece)
                lengths.append(len(piece))
                size += len(piece)
            if waiting and (piece is None or size >= CHUNK):
                chunk = np.concatenate(waiting)
                if chunk.size and not 0 <= chunk.min() <= chunk.max() < vocab_size:
                    at = bounds.first_outside(chunk)
                    inside = int(np.searchsorted(np.cumsum([len(each) for each in waiting]), at, side="right"))
                    document = len(lengths) - len(waiting) + inside
                    raise replace(bounds, where=f"{where}: document {document}").refusal(int(chunk[at]))
                store.write(chunk.astype(dtype).tobytes())
                waiting, size = [], 0
        num_bytes = store.tell()
        store.flush()
        store.seek(0)
        # Mapped, and gone with the mapping.
        tokens = np.memmap(store, dtype, "r") if num_bytes > SPOOLED else np.frombuffer(store.read(), dtype)
    sizes = np.array(lengths, dtype=np.int64)
    return TokenTable(np.asarray(tokens), np.cumsum(sizes) - sizes, sizes)
