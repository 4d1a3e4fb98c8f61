"""Tokenizers: raw bytes, a Hugging Face `tokenizer.json` (extra `tokenizers`), or none for files of token ids."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trainer.arrays import Ints
from trainer.errors import UserError

logger = logging.getLogger("trainer.data")


class Tokenizer(Protocol):
    """What trainer.data needs of a tokenizer."""

    name: str
    """For messages and fingerprints."""
    vocab_size: int
    """Number of ids, including `bos_id`."""
    bos_id: int
    """The input before a document's first token."""
    token_type_names: tuple[str, ...]
    """Names of the token types; empty if the tokenizer has none."""
    token_type_table: npt.NDArray[np.int8] | None
    """int8 [vocab_size], the type of each id as an index of `token_type_names`; None if the tokenizer has none."""

    def encode(self, text: str) -> Ints:
        """The ids of a text, without any beginning or end mark, int64 [n]."""
        ...

    def decode(self, ids: Ints) -> str:
        """The text of some ids, without the beginning mark."""
        ...


def encode_all(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Ints]:
    """`encode` of each text; together where the tokenizer can do that faster.

    Raises:
        UnicodeEncodeError: a text has an unpaired surrogate.
    """
    together = getattr(tokenizer, "encode_together", None)
    return together(texts) if together is not None else [tokenizer.encode(text) for text in texts]


class TimedTokenizer:
    """A tokenizer, of the same class for `isinstance`, that counts the seconds that its encoding takes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.seconds = 0.0

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._tokenizer)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._tokenizer, name)
        return partial(self._timed, value) if name in ("encode", "encode_together") else value

    def _timed(self, encode: Callable[[Any], Any], text: Any) -> Any:
        start = time.perf_counter()
        ids = encode(text)
        self.seconds += time.perf_counter() - start
        return ids


def _byte_types(names: tuple[str, ...]) -> npt.NDArray[np.int8]:
    def kind(byte: int) -> str:
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

    return np.array([names.index(kind(byte)) for byte in range(256)] + [names.index("other")], dtype=np.int8)


class BytesTokenizer:
    """Ids 0 to 255 are the bytes of the UTF-8 text, 256 begins a document."""

    name = "bytes"
    vocab_size = 257
    bos_id = 256
    token_type_names: tuple[str, ...] = ("letter", "digit", "space", "newline", "punctuation", "other")

    def __init__(self) -> None:
        self.token_type_table: npt.NDArray[np.int8] | None = _byte_types(self.token_type_names)

    def encode(self, text: str) -> Ints:
        """The UTF-8 bytes, int64 [n]."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Ints) -> str:
        """The text; bytes that are not UTF-8 become U+FFFD."""
        return bytes(int(i) for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A `tokenizer.json`. One id beyond its largest is added to begin documents.

    Truncation and padding that were saved in the file are switched off: a document is never cut or filled up. Its
    post-processor is not applied, so it adds no special tokens.

    Raises:
        UserError: the package is not installed, or the file cannot be read as a tokenizer.
    """

    token_type_names: tuple[str, ...] = ()
    token_type_table: npt.NDArray[np.int8] | None = None

    def __init__(self, path: str) -> None:
        try:
            import tokenizers

            if not Path(path).is_file():
                raise ValueError("there is no such tokenizer file")
            self._tokenizer = tokenizers.Tokenizer.from_file(path)
            ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
            if not ids:
                raise ValueError("its vocabulary is empty")
        except Exception as error:  # the package raises one type for all
            fix = "run: pip install tokenizers" if isinstance(error, ImportError) else "set data.tokenizer to another"
            raise UserError(path, f"is not a readable tokenizer.json ({error})", fix) from error
        self.name = Path(path).name
        self.bos_id = int(max(ids)) + 1  # not their number: ids may have gaps
        self.vocab_size = self.bos_id + 1
        # What prepares batches of fixed length would drop or invent tokens.
        saved = {"truncation": self._tokenizer.truncation, "padding": self._tokenizer.padding}
        if found := [name for name, settings in saved.items() if settings is not None]:
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            logger.warning("%s: switched off the %s saved in it: documents stay whole", path, " and ".join(found))

    def encode(self, text: str) -> Ints:
        """The ids, without the special tokens of the post-processor.

        A document already begins with `bos_id`, and a mark of the tokenizer's own would be one more target in each.
        """
        try:
            return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)
        except TypeError:
            text.encode("utf-8")  # where the package says nothing of an unpaired surrogate, this says it
            raise

    def encode_together(self, texts: Sequence[str]) -> list[Ints]:
        """`encode` of each text, on all cores unless the environment says TOKENIZERS_PARALLELISM=false."""
        try:
            found = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception:  # noqa: BLE001 - the package raises one type for all; `encode` says which text it is, and why
            return [self.encode(text) for text in texts]
        return [np.asarray(each.ids, dtype=np.int64) for each in found]

    @property
    def spec(self) -> dict[str, Any]:
        """What the file says."""
        found: dict[str, Any] = json.loads(self._tokenizer.to_str())
        return found

    def decode(self, ids: Ints) -> str:
        """The text of the ids below the vocabulary."""
        text: str = self._tokenizer.decode([int(i) for i in ids if 0 <= i < self.bos_id], skip_special_tokens=False)
        return text


class IdsTokenizer:
    """No tokenizer, for files of token ids: the vocabulary size is given, and one id is added to begin documents.

    Raises:
        UserError: from `encode`: always.
    """

    name = "ids"
    token_type_names: tuple[str, ...] = ()
    token_type_table: npt.NDArray[np.int8] | None = None

    def __init__(self, vocab_size: int) -> None:
        self.bos_id = vocab_size
        self.vocab_size = vocab_size + 1

    def encode(self, text: str) -> Ints:
        """Reject: there is nothing to tokenize text with."""
        problem = '"ids" cannot tokenize text'
        raise UserError("data.tokenizer", problem, 'use "bytes" or a tokenizer.json for text files')

    def decode(self, ids: Ints) -> str:
        """The ids themselves, separated by spaces."""
        return " ".join(str(int(i)) for i in ids if i != self.bos_id)


def load_tokenizer(name: str, *, vocab_size: int = 0) -> Tokenizer:
    """`bytes`, `ids` (with the number of ids), or the path of a tokenizer.json.

    Raises:
        UserError: none of them; or `vocab_size` is given to a tokenizer that defines its own.
    """
    if (name == "ids") != (vocab_size > 0):
        raise UserError("data.vocab_size", f'must be set with tokenizer = "ids", and with no other; got {vocab_size}')
    if name not in ("ids", "bytes") and not name.endswith(".json"):
        raise UserError("data.tokenizer", f'must be "bytes", "ids" or the path of a tokenizer.json, got {name!r}')
    if name == "ids":
        return IdsTokenizer(vocab_size)
    return BytesTokenizer() if name == "bytes" else HuggingFaceTokenizer(name)


def prompt_ids(tokenizer: Tokenizer, prompt: str, key: str) -> list[int]:
    """The ids to continue: the one that begins a document, then the prompt's. With `ids` a prompt is ids and spaces.

    Raises:
        UserError: the prompt cannot be tokenized.
    """
    words, problem, fix = prompt.split(), "is not UTF-8", "write it as UTF-8"
    if tokenizer.name == "ids":
        problem, fix = f'with tokenizer "ids", must be ids below {tokenizer.bos_id}; got {prompt!r}', 'write "17 4 99"'
        if all(word.isdecimal() and int(word) < tokenizer.bos_id for word in words):
            return [tokenizer.bos_id, *map(int, words)]
    elif not re.search("[\ud800-\udfff]", prompt):  # as which Python has bytes of a command line that are not UTF-8
        return [tokenizer.bos_id, *tokenizer.encode(prompt).tolist()]
    raise UserError(key, problem, fix)


def token_bytes(tokenizer: Tokenizer) -> tuple[npt.NDArray[np.int32] | None, str]:
    """Bytes of UTF-8 text that each id stands for, int32 [vocab_size]: 0 for marks such as `bos_id` and special tokens.

    Returns:
        The table, and ""; or None, and why the bytes of a token are not known exactly: those of a text must always add up to
        its length.
    """
    sizes = np.zeros(tokenizer.vocab_size, dtype=np.int32)
    if isinstance(tokenizer, BytesTokenizer):
        sizes[:256] = 1
        return sizes, ""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return None, "ids without a tokenizer stand for no text"
    spec = tokenizer.spec
    if problem := _why_inexact(spec):
        return None, f"{tokenizer.name}: the bytes of a token are not known exactly ({problem})"
    for token, id in _tokens_of(spec["model"]):
        sizes[id] = len(token)  # each character stands for a byte
    for added in spec["added_tokens"]:
        sizes[added["id"]] = 0 if added["special"] else len(added["content"].encode("utf-8"))
    return sizes, ""


def _tokens_of(model: dict[str, Any]) -> list[tuple[str, int]]:
    vocabulary = model.get("vocab", {})
    if isinstance(vocabulary, dict):
        return list(vocabulary.items())
    return [(token, id) for id, (token, _) in enumerate(vocabulary)]  # Unigram: tokens with scores


def _why_inexact(spec: dict[str, Any]) -> str:
    """Why the tokens of a byte-level tokenizer.json do not cut a text into bytes without a rest; empty if they do.

    NFC is let pass: the tokens stand for the text in this form, which nearly all text has.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    def steps(name: str, parts: str) -> list[dict[str, Any]]:
        step = spec[name] or {}
        return list(step[parts] if step.get("type") == "Sequence" else filter(None, [step]))

    model, before = spec["model"], steps("pre_tokenizer", "pretokenizers")
    tokens = {token for token, _ in _tokens_of(model)}
    if not any(step["type"] == "ByteLevel" for step in before) or model.get("type") not in ("BPE", "Unigram"):
        return "it is not byte-level"
    if missing := set(ByteLevel.alphabet()) - tokens:
        return f"{len(missing)} of the 256 bytes have no token"
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return "its tokens have prefixes or suffixes"
    if changes := [step["type"] for step in steps("normalizer", "normalizers") if step["type"] != "NFC"]:
        return f"its normalizer {changes[0]} changes the text"
    for step in before:
        kind = step["type"]
        is_removing = kind not in ("ByteLevel", "Split", "Digits", "Punctuation", "UnicodeScripts")
        if is_removing or step.get("behavior") == "Removed" or step.get("add_prefix_space"):
            return f"its pre-tokenizer {kind} adds or removes spaces"
    if any(added["lstrip"] or added["rstrip"] for added in spec["added_tokens"] if not added["special"]):
        return "an added token takes the spaces around it"
    return ""
