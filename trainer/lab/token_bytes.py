"""Bytes of text that a token stands for, where they are known exactly: for bits per byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.tokenizer import BytesTokenizer, HuggingFaceTokenizer, Tokenizer


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
