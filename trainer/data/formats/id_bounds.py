"""The range of token ids in a file. Files too large to check when they are opened are checked as they are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.tokenizer import IdsTokenizer, Tokenizer
from trainer.errors import UserError

WHOLE = 1 << 22  # tokens: files up to this size are checked completely when they are opened
SAMPLE, NUM_SAMPLES = 1 << 14, 16  # larger files: this many stretches of this many tokens, both ends included


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

    @property
    def vocabulary(self) -> str:
        """The vocabulary, for messages; with `ids` it is what the user set."""
        if self.tokenizer == IdsTokenizer.name:
            return f"the vocabulary (data.vocab_size = {self.num_ids}: ids 0 to {self.num_ids - 1})"
        return f"the vocabulary of {self.num_ids} ids ({self.tokenizer})"

    def refusal(self, token: int, *, at: int | None = None, dtype: np.dtype[Any] | None = None) -> UserError:
        """What to say of an id that is out of range.

        Args:
            token: the id.
            at: its position in the file.
            dtype: of the file's tokens, where the user may have set a wrong one.
        """
        position = "" if at is None else f" at token {at}"
        read_as = "" if dtype is None else f", read as {dtype}"
        if self.tokenizer == IdsTokenizer.name:
            fix = "set data.vocab_size to the number of ids of the tokenizer that made the file"
            fix += "" if dtype is None else "; of a .bin, check dtype too"
        else:
            fix = f"use the tokenizer{'' if dtype is None else ' and dtype'} that made the file"
        return UserError(self.where, f"token id {token}{position} is outside {self.vocabulary}{read_as}", fix)

    def check_eod(self, eod: int, key: str = "eod") -> None:
        """Refuse an end-of-document id that no file can hold.

        Raises:
            UserError: it is outside the vocabulary.
        """
        if not 0 <= eod < self.num_ids:
            raise UserError(
                key, f"{eod} is outside {self.vocabulary}", "set it to the id that ends documents in the files"
            )

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
        if not self.is_broken_by(tokens):
            return
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
