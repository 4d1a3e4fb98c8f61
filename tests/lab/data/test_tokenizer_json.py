"""A tokenizer.json: a document has the tokens of its text alone, and each token known bytes of text, or none has."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.streams import spaced
from trainer.data import documents
from trainer.data.documents import ReadOptions, table_from_pieces
from trainer.data.formats import load_documents
from trainer.data.tokenizer import BytesTokenizer, IdsTokenizer, encode_all, prompt_ids, token_bytes
from trainer.errors import UserError
from trainer.lab.samples import TextStream
from trainer.lab.tokenizer_json import HuggingFaceTokenizer, load_tokenizer

tokenizers = pytest.importorskip("tokenizers")
WORDS = {"a": 0, "b": 1, "[UNK]": 2, "[CLS]": 3, "[SEP]": 4}


def make(path, vocabulary=WORDS, **settings):
    """A tokenizer of words; `settings` replace parts of the saved JSON."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path.write_text(json.dumps({**json.loads(made.to_str()), **settings}))
    found = load_tokenizer(str(path))
    assert isinstance(found, HuggingFaceTokenizer)
    return found


TRUNCATION = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
PADDING = {"strategy": {"Fixed": 12}, "direction": "Right", "pad_to_multiple_of": None}
PADDING |= {"pad_id": 4, "pad_type_id": 0, "pad_token": "[SEP]"}
FIRST, LAST = ({"SpecialToken": {"id": name, "type_id": 0}} for name in ("[CLS]", "[SEP]"))
POST_PROCESSOR = {
    "type": "TemplateProcessing",
    "single": [FIRST, {"Sequence": {"id": "A", "type_id": 0}}, LAST],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {name: {"id": name, "ids": [id], "tokens": [name]} for name, id in (("[CLS]", 3), ("[SEP]", 4))},
}


@pytest.mark.parametrize(
    "given",
    [{}, {"truncation": TRUNCATION, "post_processor": POST_PROCESSOR}, {"truncation": TRUNCATION, "padding": PADDING}],
    ids=lambda given: " and ".join(given) or "plain",
)
def test_a_document_is_neither_cut_nor_padded_nor_marked(tmp_path, given):
    tokenizer = make(tmp_path / "tokenizer.json", **given)
    for words in (1, 4, 120):
        assert tokenizer.encode("b " * words).tolist() == [1] * words
    assert tokenizer.decode(tokenizer.encode("a b a")) == "a b a"


@given(
    lengths=st.lists(st.integers(0, 9), max_size=12),
    chunk=st.integers(1, 12),
    spooled=st.sampled_from([1, 1 << 20]),
    wrong=st.none() | st.tuples(st.integers(0, 99), st.sampled_from([-1, 100, 300])),
)
def test_a_table_in_memory_or_in_a_file_holds_every_piece_and_names_a_wrong_id(lengths, chunk, spooled, wrong):
    ids = np.arange(sum(lengths)) % 100
    pieces = np.split(ids, np.cumsum(lengths))[:-1] if lengths else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "CHUNK", chunk)
        patch.setattr(documents, "SPOOLED", spooled)
        if wrong is None or wrong[0] >= len(ids):
            table = table_from_pieces(iter(pieces), 100)
            read = [table.read(d, 0, int(n)).tolist() for d, n in enumerate(table.lengths)]
            assert read == [piece.tolist() for piece in pieces]
            assert isinstance(table.tokens.base, np.memmap) == (spooled == 1 and len(ids) > 1)
            return
        ids[wrong[0]] = wrong[1]
        with pytest.raises(UserError, match=f"token id {wrong[1]} at token {wrong[0]} is outside"):
            table_from_pieces(pieces, 100)


def added(id, content, *, special=True):
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
    return {"id": id, "content": content, "special": special, **flags}


def test_texts_together_are_encoded_as_each_alone(tmp_path):
    tokenizer = make(tmp_path / "tokenizer.json", post_processor=POST_PROCESSOR, added_tokens=[added(3, "[CLS]")])
    texts = ["a b", "", "b [CLS] a", "a" * 50]
    together = encode_all(tokenizer, texts)
    assert [ids.tolist() for ids in together] == [tokenizer.encode(text).tolist() for text in texts]
    (tmp_path / "a.txt").write_bytes(b"a b \xff")
    with pytest.raises(UserError, match="byte offset 4"):
        load_documents(tmp_path / "a.txt", ReadOptions(tokenizer))
    with pytest.raises(UnicodeEncodeError):
        encode_all(tokenizer, ["a", "\ud800"])
    with pytest.raises(UserError, match=r"data.tokenizer: tokenizer.json cannot encode a text: .*Missing \[UNK\]"):
        encode_all(make(tmp_path / "tokenizer.json", {"a": 0}), ["a", "b"])


# How many bytes of text a token stands for.

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
@given(pieces=st.lists(st.text(max_size=12) | st.sampled_from([" ", "the ", "<tool>", END, "é", "🙂"]), max_size=12))
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
    assert sizes[exact.special_tokens[END]] == 0
    for token in random.Random(0).sample(range(exact.bos_id), 100):
        text = exact.decode(np.array([token]))
        if "\ufffd" not in text and text != END:
            assert sizes[token] == len(text.encode()), text


def words(path):
    """Of a model that knows what spells a special token as a word."""
    vocabulary, tokens = {"a": 0, "[UNK]": 1, END: 2}, [added(2, END), added(3, "<tool>", special=False)]
    return make(path, vocabulary, added_tokens=tokens, pre_tokenizer={"type": "WhitespaceSplit"})


@pytest.mark.parametrize("case", [*EXACT, "words"])
def test_what_spells_a_special_token_or_the_end_is_text_unless_the_config_parses_it(tmp_path, case):
    path, text = tmp_path / "tokenizer.json", f"a {END} a{END}<tool> {END}"
    EXACT.get(case, words)(path)
    tool = tokenizers.Tokenizer.from_file(str(path)).token_to_id("<tool>")
    for parse_special, found in ((False, [0, 0]), (True, [3, 1])):
        tokenizer = load_tokenizer(str(path), parse_special=parse_special, eod=tool)
        ids = tokenizer.encode(text).tolist()
        assert [ids.count(id) for id in (tokenizer.special_tokens[END], tool)] == found
        assert [each.tolist() for each in encode_all(tokenizer, ["a", text])] == [[*tokenizer.encode("a")], ids]
        assert prompt_ids(tokenizer, text, "--prompt") == [tokenizer.bos_id, *ids]


SPACED = {**added(400, "<tool>", special=False), "rstrip": True}
INEXACT = {
    "no_unknown": lambda path: make(path, {"a": 0}),
    "prefix_space": lambda path: trained(path, byte_level(add_prefix_space=True)),
    "removed": lambda path: trained(path, split("removed")),
    "decomposed": lambda path: trained(path, byte_level(), tokenizers.normalizers.NFD()),
    "stripped": lambda path: trained(path, byte_level(), tokenizers.normalizers.Strip()),
    "takes_space": lambda path: trained(path, byte_level(), added_tokens=[SPACED]),
    "metaspace": lambda path: spaced("metaspace").save(str(path)) or load_tokenizer(str(path)),
}


@pytest.mark.parametrize("case", INEXACT)
def test_where_the_bytes_of_a_text_do_not_add_up_nothing_is_claimed(tmp_path, case):
    sizes, problem = token_bytes(INEXACT[case](tmp_path / "tokenizer.json"))
    assert sizes is None
    assert "do not add up to the bytes of a text" in problem


def test_bytes_are_one_each_and_ids_without_a_tokenizer_have_none():
    assert token_bytes(BytesTokenizer())[0].tolist() == [1] * 256 + [0]
    assert token_bytes(IdsTokenizer(10)) == (None, "ids without a tokenizer stand for no text")


def pieces_of(tokenizer, ids, prompt=()):
    stream = TextStream(tokenizer, prompt)
    return [*map(stream.push, ids), stream.flush()]


@given(st.binary(max_size=60))
def test_bytes_come_out_as_the_whole_would(data):
    pieces = pieces_of(BytesTokenizer(), data)
    assert "".join(pieces) == data.decode("utf-8", errors="replace")
    assert pieces_of(BytesTokenizer(), "aé€".encode()) == ["a", "", "é", "", "", "€", ""]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return EXACT["gpt2"](tmp_path_factory.mktemp("gpt2") / "tokenizer.json")


@given(text=st.text(alphabet="the and\n €é😀dog", max_size=40), cut=st.integers(0, 2))
def test_a_tokenizer_json_streams_what_it_decodes_also_half_a_character_at_the_end(gpt2, text, cut):
    ids = gpt2.encode(text)
    assert gpt2.decode(ids) == text
    ids = ids[: max(len(ids) - cut, 0)]
    assert "".join(pieces_of(gpt2, ids.tolist())) == gpt2.decode(ids)


@pytest.mark.parametrize("kind", ["metaspace", "llama", "pieces", "plain"])
def test_no_space_is_lost_after_the_prompt_or_between_tokens(kind, tmp_path):
    spaced(kind).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    text = "alpha beta gamma delta" if kind == "pieces" else "al beta gamma delta"
    ids = tokenizer.encode(text).tolist()
    for cut in range(len(ids)):
        prompt = ids[:cut]
        assert tokenizer.decode(prompt) + "".join(pieces_of(tokenizer, ids[cut:], [tokenizer.bos_id, *prompt])) == text


def test_ids_are_written_as_numbers_and_a_prompt_that_is_no_text_or_no_ids_is_refused(gpt2):
    assert "".join(pieces_of(IdsTokenizer(50), [3, 4], [50, 7, 49])) == " 3 4"
    assert prompt_ids(IdsTokenizer(50), "7 49", "--prompt") == [50, 7, 49]
    assert prompt_ids(BytesTokenizer(), "ab", "--prompt") == [256, 97, 98]
    no_ids, no_text = [(IdsTokenizer(50), "7 50"), (IdsTokenizer(50), "seven")], "caf\udce9"
    for tokenizer, prompt in [*no_ids, (BytesTokenizer(), no_text), (gpt2, no_text)]:
        with pytest.raises(UserError, match="--prompt: "):
            prompt_ids(tokenizer, prompt, "--prompt")
