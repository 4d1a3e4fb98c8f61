"""A Hugging Face `tokenizer.json` (extra `tokenizers`)."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.arrays import Ints
from trainer.data import tokenizer
from trainer.data.tokenizer import Tokenizer
from trainer.errors import UserError
from trainer.import_path import users_code

# Text with every byte that UTF-8 may have but NUL, in the form that nearly all text has; and with
# space where a tokenizer may drop or join it.
_CHARACTERS = map(chr, [*range(1, 0x800), *range(0x800, 0xD800, 0x400), *range(0xE000, 0x110000, 0x1000)])
PROBE = f"\t{unicodedata.normalize('NFC', ''.join(_CHARACTERS))}\r\n  "


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`. One id beyond its largest is added to begin documents.

    Saved truncation and padding are switched off: a document is never cut or filled up. Its
    post-processor is not applied, so it adds no special tokens. What spells one, or `eod`, the
    token that ends documents, is ordinary text, unless `parse_special`.
    """

    is_slow = True

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
        self._given = path, parse_special, eod
        self.bos_id = int(max(ids)) + 1  # not their number: ids may have gaps
        self.vocab_size = self.bos_id + 1
        self.words.no_truncation()
        self.words.no_padding()
        self.words.post_processor = None  # it adds special tokens, and may move where tokens begin
        added = self.words.get_added_tokens_decoder()
        self.special_tokens = {each.content: id for id, each in added.items() if each.special or id == eod}
        if not parse_special:
            self._read_as_text(tokenizers)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process reads the file: a pickle of `words` forgets what was set here."""
        path, parse_special, eod = self._given
        return partial(HuggingFaceTokenizer, path, parse_special=parse_special, eod=eod), ()

    def _read_as_text(self, package: Any) -> None:
        """Make what spells a special token ordinary text."""
        words = self.words
        self.settings = ", data.parse_special = false" * bool(self.special_tokens)
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
        return np.asarray(self.encoding(text).ids, dtype=np.int64)

    def encoding(self, text: str) -> Any:
        """What the package makes of a text. UserError: there is an unknown word, and no token for it."""
        # A document already begins with `bos_id`: another mark would be one more target in each.
        try:
            return self.words.encode(text, add_special_tokens=False)
        except Exception:  # one type for all
            text.encode("utf-8")  # names the unpaired surrogate, which the package does not report
            with users_code("data.tokenizer", f"{self.name} cannot encode a text", "name another"):
                raise

    def encode_together(self, texts: Sequence[str]) -> list[Ints]:
        """`encode` of each text, on all cores unless TOKENIZERS_PARALLELISM=false is set."""
        try:
            found = self.words.encode_batch_fast(texts, add_special_tokens=False)
        except Exception:  # noqa: BLE001 - one type for all; `encode` raises a precise error
            return [self.encode(text) for text in texts]
        return [np.asarray(each.ids, dtype=np.int64) for each in found]

    def decode(self, ids: Ints) -> str:
        """The text of the ids, without those that are not in the file."""
        known = [int(i) for i in ids if 0 <= i < self.bos_id]
        return str(self.words.decode(known, skip_special_tokens=False))

    def token_bytes(self) -> tuple[npt.NDArray[np.int32] | None, str]:
        """See `trainer.data.tokenizer.token_bytes`."""
        sizes, spec = np.zeros(self.vocab_size, dtype=np.int32), json.loads(self.words.to_str())
        vocabulary = spec["model"].get("vocab", {})
        if isinstance(vocabulary, list):  # Unigram: tokens with scores
            vocabulary = {token: id for id, (token, _) in enumerate(vocabulary)}
        for token, id in vocabulary.items():
            sizes[id] = len(token)  # if it is byte-level, each character stands for a byte
        takes_space = any(added["lstrip"] or added["rstrip"] for added in spec["added_tokens"])
        for added in spec["added_tokens"]:
            sizes[added["id"]] = 0 if added["special"] else len(added["content"].encode("utf-8"))
        with suppress(UserError):  # it has no token for an unknown word
            if not takes_space and int(sizes[self.encode(PROBE)].sum()) == len(PROBE.encode("utf-8")):
                return sizes, ""
        problem = "its tokens do not add up to the bytes of a text: it is not byte-level, or changes the text"
        return None, f"{self.name}: {problem}"


def load_tokenizer(name: str, *, vocab_size: int = 0, parse_special: bool = False, eod: int | None = None) -> Tokenizer:
    """`bytes`, `ids` (with the number of ids), or a tokenizer.json, which alone heeds the rest."""
    if vocab_size or not name.endswith(".json"):
        return tokenizer.load_tokenizer(name, vocab_size=vocab_size)
    return HuggingFaceTokenizer(name, parse_special=parse_special, eod=eod)
