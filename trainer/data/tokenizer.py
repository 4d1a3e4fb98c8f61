"""Tokenizers: raw bytes, or none for ids."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from trainer.arrays import Ints
from trainer.errors import UserError
from trainer.files import parse_count


@runtime_checkable
class Tokenizer(Protocol):
    """The part of a tokenizer that trainer.data needs."""

    name: str  # for messages and fingerprints
    vocab_size: int  # number of ids, including `bos_id`
    bos_id: int  # the input before a document's first token
    is_slow: bool = False  # so that a copy of a text's ids is worth its space
    settings: str = ""  # of it, for fingerprints; empty if it has none
    token_type_names: tuple[str, ...] = ()  # empty if the tokenizer has no token types
    # The type of each id as an index of the names, [vocab_size]; None without types.
    token_type_table: npt.NDArray[np.int8] | None = None

    def encode(self, text: str) -> Ints:
        """The ids of a text, without any beginning or end mark, int64 [n]."""

    def decode(self, ids: Ints) -> str:
        """The text of some ids, without the beginning mark."""


def encode_all(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Ints]:
    """`encode` of each text; together where the tokenizer can do that faster.

    Raises UnicodeEncodeError if a text has an unpaired surrogate.
    """
    together = getattr(tokenizer, "encode_together", None)
    return [tokenizer.encode(text) for text in texts] if together is None else together(texts)


# All bytes that are not of these are "other".
BYTES_OF_TYPE = {
    "letter": string.ascii_letters,
    "digit": string.digits,
    "space": " \t",
    "newline": "\n\r",
    "punctuation": string.punctuation,
}


class BytesTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes of the UTF-8 text, 256 begins a document."""

    name = "bytes"
    vocab_size = 257
    bos_id = 256
    token_type_names = (*BYTES_OF_TYPE, "other")

    def __init__(self) -> None:
        self.token_type_table = np.full(self.vocab_size, len(BYTES_OF_TYPE), np.int8)
        for number, characters in enumerate(BYTES_OF_TYPE.values()):
            self.token_type_table[[*characters.encode()]] = number

    def encode(self, text: str) -> Ints:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Ints) -> str:
        """The text; bytes that are not UTF-8 become U+FFFD."""
        return bytes(int(i) for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")

    def token_bytes(self) -> tuple[npt.NDArray[np.int32], str]:
        """See `token_bytes`."""
        sizes = np.zeros(self.vocab_size, dtype=np.int32)
        sizes[:256] = 1
        return sizes, ""


class IdsTokenizer(Tokenizer):
    """No tokenizer, for files of token ids: one id is added to begin documents."""

    name = "ids"

    def __init__(self, vocab_size: int) -> None:
        self.bos_id = vocab_size
        self.vocab_size = vocab_size + 1

    def encode(self, text: str) -> Ints:
        fix = 'use "bytes" or a tokenizer.json for text files'
        raise UserError("data.tokenizer", '"ids" cannot tokenize text', fix)

    def decode(self, ids: Ints) -> str:
        return " ".join(str(int(i)) for i in ids if i != self.bos_id)


def load_tokenizer(name: str, *, vocab_size: int = 0) -> Tokenizer:
    """`bytes`, or `ids` with the number of ids."""
    if (name == "ids") != (vocab_size > 0):
        raise UserError("data.vocab_size", f'must be set with tokenizer = "ids", and with no other; got {vocab_size}')
    if name == "ids":
        return IdsTokenizer(vocab_size)
    if name == "bytes":
        return BytesTokenizer()
    raise UserError("data.tokenizer", f'must be "bytes", "ids" or the path of a tokenizer.json, got {name!r}')


def prompt_ids(tokenizer: Tokenizer, prompt: str, key: str) -> list[int]:
    """The ids to continue: that which begins a document, then the prompt's (words with `ids`)."""
    if tokenizer.name == "ids":
        words = prompt.split()
        ids = [id for id in map(parse_count, words) if id is not None and id < tokenizer.bos_id]
        if len(ids) == len(words):
            return [tokenizer.bos_id, *ids]
        problem = f'with tokenizer "ids", must be ids below {tokenizer.bos_id}; got {prompt!r}'
        fix = 'write "17 4 99"'
    else:
        try:
            return [tokenizer.bos_id, *tokenizer.encode(prompt).tolist()]
        except UnicodeEncodeError:
            problem, fix = f"is not UTF-8 text: {prompt}", "set the terminal to UTF-8"
    raise UserError(key, problem, fix)


def token_bytes(tokenizer: Tokenizer) -> tuple[npt.NDArray[np.int32] | None, str]:
    """Bytes of UTF-8 text that each id stands for, int32 [vocab_size], 0 if it is special; and "".

    Or None, and why the bytes are not known exactly: those of a text, as the tokenizer normalizes
    it, must add up to its length.
    """
    known = getattr(tokenizer, "token_bytes", None)
    return (None, "ids without a tokenizer stand for no text") if known is None else known()
