"""Ids in token files that are too large to be looked through when they are opened: checked where they are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.tokenizer import Tokenizer
from trainer.errors import UserError

WHOLE = 1 << 22  # tokens: a file of at most so many is looked through when it is opened
SAMPLE, NUM_SAMPLES = (
    1 << 14,
    16,
)  # of a larger one so many stretches of so many tokens, its beginning and end among them


@dataclass(frozen=True)
class IdBounds:
    """What the ids of a file must be: at least 0 and less than the vocabulary.

    Args:
        path: the file, for messages.
        vocab_size: ids there are, the one that begins documents included.
        tokenizer: its name, for messages.
    """

    path: Path
    vocab_size: int
    tokenizer: str

    @classmethod
    def of(cls, path: Path, tokenizer: Tokenizer) -> IdBounds:
        """The bounds that a tokenizer sets to a file."""
        return cls(path, tokenizer.vocab_size, tokenizer.name)

    def is_broken_by(self, tokens: npt.NDArray[Any]) -> bool:
        """Whether some id is outside. A negative id, seen as unsigned, is a large one."""
        if tokens.size == 0:
            return False
        seen = tokens if tokens.dtype.kind == "u" else tokens.view(f"u{tokens.dtype.itemsize}")
        return int(np.maximum.reduce(seen, axis=None)) >= self.vocab_size

    def check(self, tokens: npt.NDArray[Any], begin: int) -> None:
        """Refuse the first id that is outside; `begin` is where `tokens` lie in the file.

        Raises:
            UserError: with the id and its place.
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
        """Look through a small file, or a few stretches of a large one.

        Returns:
            None if every id is known to be inside, otherwise these bounds, for the reads to come.

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
