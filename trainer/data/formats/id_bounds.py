"""The range of token ids in a file. Files too large to check when they are opened are checked as they are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.tokenizer import Tokenizer
from trainer.errors import UserError

WHOLE = 1 << 22  # tokens: files up to this size are checked completely when they are opened
SAMPLE, NUM_SAMPLES = 1 << 14, 16  # larger files: this many stretches of this many tokens, both ends included


@dataclass(frozen=True)
class IdBounds:
    """Ids of a file must be at least 0 and less than the vocabulary size.

    Args:
        path: the file, for messages.
        vocab_size: number of ids, including the one that begins documents.
        tokenizer: its name, for messages.
    """

    path: Path
    vocab_size: int
    tokenizer: str

    @classmethod
    def of(cls, path: Path, tokenizer: Tokenizer) -> IdBounds:
        """The bounds that a tokenizer sets for a file."""
        return cls(path, tokenizer.vocab_size, tokenizer.name)

    def is_broken_by(self, tokens: npt.NDArray[Any]) -> bool:
        """Whether some id is out of range."""
        if tokens.size == 0:
            return False
        # Viewed as unsigned, a negative id is a large one: a single maximum checks both ends.
        seen = tokens if tokens.dtype.kind == "u" else tokens.view(f"u{tokens.dtype.itemsize}")
        return int(np.maximum.reduce(seen, axis=None)) >= self.vocab_size

    def check(self, tokens: npt.NDArray[Any], begin: int) -> None:
        """Reject the first id that is out of range; `begin` is the position of `tokens` in the file.

        Raises:
            UserError: with the id and its position.
        """
        if not self.is_broken_by(tokens):
            return
        at = int(np.flatnonzero((tokens < 0) | (tokens >= self.vocab_size))[0])
        raise UserError(
            str(self.path),
            f"token id {int(tokens[at])} at token {begin + at} is outside the vocabulary of {self.vocab_size} ids "
            f"({self.tokenizer}, dtype {tokens.dtype})",
            "use the tokenizer and dtype that made the file",
        )

    def check_sample(self, tokens: npt.NDArray[Any]) -> IdBounds | None:
        """Check a small file completely, or a few stretches of a large one.

        Returns:
            None if every id is known to be in range, otherwise these bounds, for later reads.

        Raises:
            UserError: as `check`.
        """
        if np.iinfo(tokens.dtype).min == 0 and np.iinfo(tokens.dtype).max < self.vocab_size:
            return None
        if len(tokens) <= WHOLE:
            self.check(tokens, 0)
            return None
        for start in np.linspace(0, len(tokens) - SAMPLE, NUM_SAMPLES).astype(np.int64).tolist():
            self.check(tokens[start : start + SAMPLE], start)
        return self
