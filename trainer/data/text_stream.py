"""Prompts to token ids, and generated ids to text incrementally: text that was emitted never changes."""

from __future__ import annotations

import codecs

import numpy as np

from trainer.data.tokenizer import BytesTokenizer, IdsTokenizer, Tokenizer
from trainer.errors import UserError

REPLACEMENT = "\ufffd"
LONGEST_CHARACTER = 8  # tokens that one character may take


class TextStream:
    """Decodes token by token. A character whose bytes span several tokens is emitted with the last of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._is_bytes = isinstance(tokenizer, BytesTokenizer)
        self._separates = isinstance(tokenizer, IdsTokenizer)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._context: list[int] = []  # already emitted; a tokenizer may join the next token to it
        self._waiting: list[int] = []

    def push(self, token: int) -> str:
        """The text that `token` completes; may be empty."""
        if self._is_bytes:
            return self._decoder.decode(bytes([token])) if token < 256 else ""
        if self._separates:
            return f"{token} "
        self._waiting.append(token)
        text = self._new_text()
        if text.endswith(REPLACEMENT) and len(self._waiting) < LONGEST_CHARACTER:
            return ""
        self._context, self._waiting = self._waiting, []
        return text

    def flush(self) -> str:
        """The text still held back, with U+FFFD for incomplete characters."""
        if self._is_bytes:
            return self._decoder.decode(b"", final=True)
        text, self._waiting = (self._new_text() if self._waiting else ""), []
        return text

    def _new_text(self) -> str:
        before = self._decode(self._context)
        return self._decode([*self._context, *self._waiting])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(np.array(ids, dtype=np.int64))


def prompt_ids(tokenizer: Tokenizer, prompt: str, key: str) -> list[int]:
    """The ids to continue: the one that begins a document, then the prompt's. With `ids` a prompt is ids and spaces.

    Raises:
        UserError: the prompt cannot be tokenized.
    """
    if tokenizer.name != "ids":
        return [tokenizer.bos_id, *tokenizer.encode(prompt).tolist()]
    try:
        ids = [int(word) for word in prompt.split()]
    except ValueError:
        raise UserError(key, f'must be token ids with tokenizer "ids", got {prompt!r}', 'write "17 4 99"') from None
    wrong = next((i for i in ids if not 0 <= i < tokenizer.bos_id), None)
    if wrong is not None:
        raise UserError(key, f"token id {wrong} is outside the vocabulary of {tokenizer.bos_id} ids", "use its ids")
    return [tokenizer.bos_id, *ids]
