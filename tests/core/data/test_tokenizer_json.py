"""What a tokenizer.json may hold beside its vocabulary: none of it may change a document's tokens."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data import documents
from trainer.data.documents import table_from_pieces
from trainer.data.formats import open_documents
from trainer.data.tokenizer import HuggingFaceTokenizer, encode_all, load_tokenizer
from trainer.errors import UserError

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
def test_a_document_is_neither_cut_nor_padded_nor_marked(tmp_path, caplog, given):
    tokenizer = make(tmp_path / "tokenizer.json", **given)
    for words in (1, 4, 120):
        assert tokenizer.encode("b " * words).tolist() == [1] * words
    assert tokenizer.decode(tokenizer.encode("a b a")) == "a b a"
    said = " and ".join(name for name in ("truncation", "padding") if name in given)
    assert [record.message for record in caplog.records if "switched off" in record.message] == (
        [f"{tmp_path / 'tokenizer.json'}: switched off the {said} saved in it: documents stay whole"] if said else []
    )


@given(ids=st.lists(st.integers(0, 70_000), min_size=3, max_size=6, unique=True))
def test_ids_with_gaps_come_back_from_a_stream_as_they_are(tmp_path_factory, ids):
    folder = tmp_path_factory.mktemp("gaps")
    words = ["a", "b", "[UNK]", "c", "d", "e"][: len(ids)]
    tokenizer = make(folder / "tokenizer.json", dict(zip(words, ids, strict=True)))
    assert (tokenizer.bos_id, tokenizer.vocab_size) == (max(ids) + 1, max(ids) + 2)
    (folder / "a.jsonl").write_text(json.dumps({"text": " ".join(w for w in words if w != "[UNK]")}) + "\n")
    table = open_documents(folder / "a.jsonl", tokenizer=tokenizer)
    assert table.tokens.tolist() == [i for w, i in zip(words, ids, strict=True) if w != "[UNK]"]
    assert tokenizer.decode(table.tokens.astype(np.int64)) == " ".join(w for w in words if w != "[UNK]")


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


def test_texts_together_are_encoded_as_each_alone(tmp_path):
    added = [{"id": 3, "content": "[CLS]", "single_word": False, "lstrip": False, "rstrip": False}]
    added[0] |= {"normalized": False, "special": True}
    tokenizer = make(tmp_path / "tokenizer.json", post_processor=POST_PROCESSOR, added_tokens=added)
    texts = ["a b", "", "b [CLS] a", "a" * 50]
    together = encode_all(tokenizer, texts)
    assert [ids.tolist() for ids in together] == [tokenizer.encode(text).tolist() for text in texts]
    assert together[2].tolist() == [1, 3, 0]  # a special token that is written in a text is that token
    (tmp_path / "a.txt").write_bytes(b"a b \xff")
    with pytest.raises(UserError, match="byte offset 4"):
        open_documents(tmp_path / "a.txt", tokenizer=tokenizer)
    with pytest.raises(UnicodeEncodeError):
        encode_all(tokenizer, ["a", "\ud800"])
