"""The id that ends documents: one that no file can hold is refused, and text is ended with it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.support.spaced import spaced
from tests.support.streams import mixing_dataset
from trainer.data.documents import ReadOptions
from trainer.data.formats import load_documents, open_documents
from trainer.data.layout import discover_direct
from trainer.data.tokenizer import BytesTokenizer, IdsTokenizer, load_tokenizer
from trainer.errors import UserError


def dataset(*paths, **settings):
    given = {"tokenizer": IdsTokenizer(500), "seq_len": 4, "repeat": False, **settings}
    return mixing_dataset(discover_direct(paths), name="s", **given)


@pytest.mark.parametrize("eod", [-1, 500])
def test_an_eod_outside_the_vocabulary_is_refused(tmp_path, eod):
    np.save(tmp_path / "a.npy", np.array([3, 4]))
    with pytest.raises(UserError, match=rf"eod: {eod} is outside the vocabulary of 500 ids"):
        open_documents(tmp_path / "a.npy", tokenizer=IdsTokenizer(500), eod=eod)


@pytest.mark.parametrize("tokenizer", ["bytes", "json"])
@pytest.mark.parametrize("ending", ["txt", "jsonl", "parquet"])
def test_each_text_but_an_empty_one_gets_the_id_that_ends_documents(tmp_path, ending, tokenizer):
    path, texts = tmp_path / f"a.{ending}", ["al", "beta beta", "", "beta\n\n"]
    if ending == "txt":
        texts = ["al\n\n", "beta beta\n\n", "beta"]
        path.write_text("".join(texts))
    elif ending == "jsonl":
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts) + '{"tokens": [1, 2]}\n')
    else:
        pytest.importorskip("pyarrow.parquet").write_table(pytest.importorskip("pyarrow").table({"text": texts}), path)
    if tokenizer == "json":
        spaced("plain").save(str(tmp_path / "tokenizer.json"))
    words = load_tokenizer(tokenizer if tokenizer == "bytes" else str(tmp_path / "tokenizer.json"))
    eod = words.bos_id  # may be any id of the vocabulary
    found = load_documents(path, ReadOptions(words, text_split="blank_line", text_eod=eod))
    documents = [found.read(i, 0, int(length)).tolist() for i, length in enumerate(found.lengths)]
    ended = [[*words.encode(text).tolist(), eod] if text else [] for text in texts]
    assert documents == ended + [[1, 2]] * (ending == "jsonl"), "ids have it, if they are to"


def test_a_text_that_ends_with_the_id_gets_no_second_one_and_need_not_be_utf8(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\n")
    options = ReadOptions(BytesTokenizer(), text_eod=10)
    assert load_documents(tmp_path / "a.txt", options).tokens.tolist() == [255, 10]


def test_nothing_held_out_of_one_document_says_what_splits_it(tmp_path):
    held = {"split": "holdout", "holdout_fraction": 0.001}
    np.save(tmp_path / "a.npy", np.array([1, 2, 3]))
    (tmp_path / "a.jsonl").write_text('{"tokens": [1, 2]}\n' * 2)
    one = "each file is one document, and documents are held out whole; set eod or text_split"
    for name, eod, why in (("a.npy", None, one), ("a.npy", 9, one), ("a.jsonl", None, "change holdout_fraction")):
        with pytest.raises(UserError, match=f"s: no document is left to read.*{why}"):
            next(dataset(tmp_path / name, eod=eod, **held))
