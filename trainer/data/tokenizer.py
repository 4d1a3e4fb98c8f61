"""Tokenizers: raw bytes, a Hugging Face `tokenizer.json` (extra `tokenizers`), or none for ids."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from trainer.arrays import Ints
from trainer.errors import UserError
from trainer.files import parse_count

# Text with every byte that UTF-8 may have, in the form that nearly all text has.
_CHARACTERS = map(chr, [*range(1, 0x800), *range(0x800, 0xD800, 0x400), *range(0xE000, 0x110000, 0x1000)])
PROBE = unicodedata.normalize("NFC", "".join(_CHARACTERS))


@runtime_checkable
class Tokenizer(Protocol):
    """The part of a tokenizer that trainer.data needs."""

    name: str  # for messages and fingerprints
    vocab_size: int  # number of ids, including `bos_id`
    bos_id: int  # the input before a document's first token
    token_type_names: tuple[str, ...]  # empty if the tokenizer has no token types
    # The type of each id as an index of the names, [vocab_size]; None without types.
    token_type_table: npt.NDArray[np.int8] | None

    def encode(self, text: str) -> Ints:
        """The ids of a text, without any beginning or end mark, int64 [n]."""
        ...

    def decode(self, ids: Ints) -> str:
        """The text of some ids, without the beginning mark."""
        ...


def encode_all(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Ints]:
    """`encode` of each text; together where the tokenizer can do that faster.

    Raises UnicodeEncodeError if a text has an unpaired surrogate.
    """
    together = getattr(tokenizer, "encode_together", None)
    return [tokenizer.encode(text) for text in texts] if together is None else together(texts)


def _byte_type(byte: int) -> str:
    character = chr(byte)
    if byte >= 128:
        return "other"
    if character.isalpha():
        return "letter"
    if character.isdigit():
        return "digit"
    if character in "\n\r":
        return "newline"
    if character in " \t":
        return "space"
    return "punctuation" if character.isprintable() else "other"


class BytesTokenizer:
    """Ids 0 to 255 are the bytes of the UTF-8 text, 256 begins a document."""

    name = "bytes"
    vocab_size = 257
    bos_id = 256
    token_type_names: tuple[str, ...] = ("letter", "digit", "space", "newline", "punctuation", "other")

    def __init__(self) -> None:
        kinds = [*map(_byte_type, range(256)), "other"]
        types = [self.token_type_names.index(kind) for kind in kinds]
        self.token_type_table: npt.NDArray[np.int8] | None = np.array(types, dtype=np.int8)

    def encode(self, text: str) -> Ints:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Ints) -> str:
        """The text; bytes that are not UTF-8 become U+FFFD."""
        return bytes(int(i) for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A `tokenizer.json`. One id beyond its largest is added to begin documents.

    Saved truncation and padding are switched off: a document is never cut or filled up. Its
    post-processor is not applied, so it adds no special tokens. What spells one, or `eod`, the
    token that ends documents, is ordinary text, unless `parse_special`.
    """

    token_type_names: tuple[str, ...] = ()
    token_type_table: npt.NDArray[np.int8] | None = None

    def __init__(self, path: str, *, parse_special: bool = False, eod: int | None = None) -> None:
        try:
            import tokenizers

            if not Path(path).is_file():
                raise ValueError("there is no such tokenizer file")
            self.words = tokenizers.Tokenizer.from_file(path)
            ids = self.words.get_vocab(with_added_tokens=True).values()
            if not ids:
                raise ValueError("its vocabulary is empty")
        except Exception as error:  # the package raises one type for all
            fix = "name another"
            if isinstance(error, ImportError):
                fix = "run: pip install tokenizers"
            raise UserError("data.tokenizer", f"{path} is not a readable tokenizer.json ({error})", fix) from error
        self.name = Path(path).name
        self.bos_id = int(max(ids)) + 1  # not their number: ids may have gaps
        self.vocab_size = self.bos_id + 1
        self.words.no_truncation()
        self.words.no_padding()
        added = self.words.get_added_tokens_decoder()
        self.special_tokens = {each.content: id for id, each in added.items() if each.special or id == eod}
        self.parse_special = parse_special
        if not parse_special:
            self._read_as_text(tokenizers)

    def _read_as_text(self, package: Any) -> None:
        """Make what spells a special token ordinary text."""
        words = self.words
        words.add_special_tokens([*self.special_tokens])  # `eod` may be none yet
        words.encode_special_tokens = True
        if self.special_tokens and getattr(words.model, "ignore_merges", True):
            # The model may know it as a word: it is cut behind its first character.
            firsts = [f"{re.escape(each[0])}(?={re.escape(each[1:])})" for each in self.special_tokens]
            cut = package.pre_tokenizers.Split(package.Regex("|".join(firsts)), "isolated")
            steps = [step for step in (cut, words.pre_tokenizer) if step is not None]
            words.pre_tokenizer = package.pre_tokenizers.Sequence(steps)

    def encode(self, text: str) -> Ints:
        """The ids, without the special tokens of the post-processor."""
        # A document already begins with `bos_id`: another mark would be one more target in each.
        try:
            ids = self.words.encode(text, add_special_tokens=False).ids
        except TypeError:
            text.encode("utf-8")  # names the unpaired surrogate, which the package does not report
            raise
        return np.asarray(ids, dtype=np.int64)

    def encode_together(self, texts: Sequence[str]) -> list[Ints]:
        """`encode` of each text, on all cores unless TOKENIZERS_PARALLELISM=false is set."""
        try:
            found = self.words.encode_batch_fast(texts, add_special_tokens=False)
        except Exception:  # noqa: BLE001 - one type for all; `encode` raises a precise error
            return [self.encode(text) for text in texts]
        return [np.asarray(each.ids, dtype=np.int64) for each in found]

    @property
    def spec(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.words.to_str())
        return found

    def decode(self, ids: Ints) -> str:
        """The text of the ids below the vocabulary."""
        known = [int(i) for i in ids if 0 <= i < self.bos_id]
        text: str = self.words.decode(known, skip_special_tokens=False)
        return text


class IdsTokenizer:
    """No tokenizer, for files of token ids: one id is added to begin documents."""

    name = "ids"
    token_type_names: tuple[str, ...] = ()
    token_type_table: npt.NDArray[np.int8] | None = None

    def __init__(self, vocab_size: int) -> None:
        self.bos_id = vocab_size
        self.vocab_size = vocab_size + 1

    def encode(self, text: str) -> Ints:
        fix = 'use "bytes" or a tokenizer.json for text files'
        raise UserError("data.tokenizer", '"ids" cannot tokenize text', fix)

    def decode(self, ids: Ints) -> str:
        return " ".join(str(int(i)) for i in ids if i != self.bos_id)


def load_tokenizer(name: str, *, vocab_size: int = 0, parse_special: bool = False, eod: int | None = None) -> Tokenizer:
    """`bytes`, `ids` (with the number of ids), or the path of a tokenizer.json, which alone heeds
    the other options."""
    if (name == "ids") != (vocab_size > 0):
        raise UserError("data.vocab_size", f'must be set with tokenizer = "ids", and with no other; got {vocab_size}')
    if name == "ids":
        return IdsTokenizer(vocab_size)
    if name == "bytes":
        return BytesTokenizer()
    if name.endswith(".json"):
        return HuggingFaceTokenizer(name, parse_special=parse_special, eod=eod)
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
    """Bytes of UTF-8 text that each id stands for, int32 [vocab_size], 0 for special tokens; and
    "".

    Or None, and why the bytes are not known exactly: those of a text must add up to its length.
    """
    sizes = np.zeros(tokenizer.vocab_size, dtype=np.int32)
    if isinstance(tokenizer, BytesTokenizer):
        sizes[:256] = 1
        return sizes, ""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return None, "ids without a tokenizer stand for no text"
    spec = tokenizer.spec
    vocabulary = spec["model"].get("vocab", {})
    if isinstance(vocabulary, list):  # Unigram: tokens with scores
        vocabulary = {token: id for id, (token, _) in enumerate(vocabulary)}
    for token, id in vocabulary.items():
        sizes[id] = len(token)  # if it is byte-level, each character stands for a byte
    for added in spec["added_tokens"]:
        sizes[added["id"]] = 0 if added["special"] else len(added["content"].encode("utf-8"))
    if int(sizes[tokenizer.encode(PROBE)].sum()) != len(PROBE.encode("utf-8")):
        problem = "its tokens do not add up to the bytes of a text: it is not byte-level, or changes the text"
        return None, f"{tokenizer.name}: {problem}"
    return sizes, ""
