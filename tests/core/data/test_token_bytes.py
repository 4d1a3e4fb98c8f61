"""How many bytes of text a token stands for: exactly, or it is said why that is not known."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.tokenizer import BytesTokenizer, HuggingFaceTokenizer, IdsTokenizer, load_tokenizer, token_bytes

tokenizers = pytest.importorskip("tokenizers")
END = "<|end|>"
TEXT = "Many tokens stand for several bytes: ünïcödé, 漢字, 🙂; spaces   too,\n\nand numbers 12345. " * 30


def trained(path, before, normalizer=None, specials=(END,), model=None, **settings):
    """A tokenizer.json that was trained on `TEXT`; `settings` replace parts of it."""
    made = tokenizers.Tokenizer(model or tokenizers.models.BPE())
    made.pre_tokenizer, made.decoder = before, tokenizers.decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    kinds = {"BPE": tokenizers.trainers.BpeTrainer, "Unigram": tokenizers.trainers.UnigramTrainer}
    trainer = kinds[type(made.model).__name__](
        vocab_size=400, special_tokens=list(specials), initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([TEXT], trainer)
    made.add_tokens([tokenizers.AddedToken("<tool>", special=False)])
    path.write_text(json.dumps({**json.loads(made.to_str()), **settings}))
    found = load_tokenizer(str(path))
    assert isinstance(found, HuggingFaceTokenizer)
    return found


def byte_level(**options):
    return tokenizers.pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **options})


def split(behavior="isolated"):
    pattern = tokenizers.Regex(r"\p{N}{1,3}|\p{L}+|\s+|[^\s\p{L}\p{N}]+")
    whole = tokenizers.pre_tokenizers.Split(pattern, behavior)
    return tokenizers.pre_tokenizers.Sequence([whole, byte_level(use_regex=False)])


EXACT = {
    "gpt2": lambda path: trained(path, byte_level()),
    "llama3": lambda path: trained(path, split()),
    "qwen": lambda path: trained(path, split(), tokenizers.normalizers.NFC()),
    "unigram": lambda path: trained(path, byte_level(), model=tokenizers.models.Unigram()),
}


@pytest.fixture(scope="module", params=EXACT)
def exact(request, tmp_path_factory):
    return EXACT[request.param](tmp_path_factory.mktemp("exact") / "tokenizer.json")


@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.text(max_size=12) | st.sampled_from([" ", "the ", "<tool>", "é", "🙂"]), max_size=12))
def test_the_bytes_of_a_texts_tokens_add_up_to_the_text(exact, pieces):
    import unicodedata

    text = unicodedata.normalize("NFC", "".join(pieces))
    sizes, problem = token_bytes(exact)
    assert problem == ""
    assert sizes is not None
    assert int(sizes[exact.encode(text)].sum()) == len(text.encode())


def test_each_token_has_its_own_bytes_and_marks_stand_for_none(exact):
    sizes, _ = token_bytes(exact)
    assert sizes is not None
    assert int(sizes[exact.encode(TEXT)].sum()) == len(TEXT.encode())
    assert (len(sizes), sizes.max() > 3, sizes[exact.bos_id]) == (exact.vocab_size, True, 0)
    assert sizes[exact.encode(f"a{END}")].tolist() == [1, 0]
    for token in random.Random(0).sample(range(exact.bos_id), 100):
        text = exact.decode(np.array([token]))
        if "\ufffd" not in text and text != END:
            assert sizes[token] == len(text.encode()), text


def one_byte_missing(path):
    trained(path, byte_level())
    spec = json.loads(path.read_text())
    del spec["model"]["vocab"]["Q"]
    spec["model"]["merges"] = []
    path.write_text(json.dumps(spec))
    return load_tokenizer(str(path))


def metaspace(path):
    made = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.train_from_iterator([TEXT], tokenizers.trainers.BpeTrainer(special_tokens=["<unk>"], show_progress=False))
    made.save(str(path))
    return load_tokenizer(str(path))


INEXACT = {
    "prefix_space": lambda path: trained(path, byte_level(add_prefix_space=True)),
    "removed": lambda path: trained(path, split("removed")),
    "decomposed": lambda path: trained(path, byte_level(), tokenizers.normalizers.NFD()),
    "one_byte_missing": one_byte_missing,
    "metaspace": metaspace,
}


@pytest.mark.parametrize("case", INEXACT)
def test_where_the_bytes_of_a_text_do_not_add_up_nothing_is_claimed(tmp_path, case):
    sizes, problem = token_bytes(INEXACT[case](tmp_path / "tokenizer.json"))
    assert sizes is None
    assert "do not add up to the bytes of a text" in problem


def test_bytes_are_one_each_and_ids_without_a_tokenizer_have_none():
    sizes, _ = token_bytes(BytesTokenizer())
    assert sizes is not None
    assert sizes.tolist() == [1] * 256 + [0]
    assert token_bytes(IdsTokenizer(10)) == (None, "ids without a tokenizer stand for no text")
