"""The id that ends documents: one that no file can hold is refused, one that a file does not hold is a warning."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest

from tests.support.spaced import spaced
from tests.support.streams import mixing_dataset
from trainer.data.documents import ReadOptions
from trainer.data.formats import load_documents, open_documents
from trainer.data.groups import has_zero_halves
from trainer.data.layout import discover_direct
from trainer.data.tokenizer import BytesTokenizer, IdsTokenizer, load_tokenizer
from trainer.errors import UserError


def dataset(*paths, **settings):
    given = {"tokenizer": IdsTokenizer(500), "seq_len": 4, "repeat": False, **settings}
    return mixing_dataset(discover_direct(paths), name="s", **given)


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


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


def test_an_eod_that_a_file_lacks_is_one_warning_per_source(tmp_path, caplog):
    for name in "abc":
        np.save(tmp_path / f"{name}.npy", np.array([1, 7, 2, 3, 7, 4] if name == "a" else [1, 2, 3]))
    list(dataset(*(tmp_path / f"{name}.npy" for name in "abc"), eod=7, num_streams_mixed=1))
    (said,) = warnings(caplog)
    assert said.startswith(f"source s: eod = 7 does not occur in 1 of 1 files, {tmp_path / 'b.npy'} (3 tokens): ")


def test_files_that_eod_splits_or_ends_are_no_warning(tmp_path, caplog):
    np.save(tmp_path / "a.npy", np.array([1, 7, 2, 3]))
    np.save(tmp_path / "b.npy", np.array([1, 2, 7]))
    np.save(tmp_path / "c.npy", np.array([7]))
    (tmp_path / "d.jsonl").write_text('{"tokens": [1, 2]}\n')
    list(dataset(*(tmp_path / name for name in ("a.npy", "b.npy", "c.npy", "d.jsonl")), eod=7))
    list(dataset(tmp_path / "a.npy"))
    assert warnings(caplog) == []


IDS = np.random.default_rng(0).integers(0, 256, 131_072)


@pytest.mark.parametrize(("wide", "narrow"), [("uint16", "uint8"), ("int64", "uint16")])
def test_ids_read_with_less_than_their_width_are_a_warning(tmp_path, caplog, wide, narrow):
    IDS.astype(wide).tofile(tmp_path / "a.bin")
    next(dataset(tmp_path / "a.bin", dtype=narrow))
    (said,) = warnings(caplog)
    assert f'source s: dtype = "{narrow}" gives 0 as every second id in 1 of 1 files, {tmp_path / "a.bin"}' in said
    caplog.clear()
    next(dataset(tmp_path / "a.bin", dtype=wide))
    assert warnings(caplog) == []


@pytest.mark.parametrize("size", [63, 100_000])
def test_other_ids_are_of_no_doubtful_dtype(size):
    some = IDS[:size].astype(np.uint8)
    sparse = np.where(np.random.default_rng(1).random(size) < 0.005, some, 0)  # mostly 0, at odd and even places
    for ids in (some, sparse, np.zeros(size, np.uint8), np.resize([3, 0, 0], size)):
        assert not has_zero_halves(ids), ids[:9]
    pairs = np.resize([3, 0], size)
    assert has_zero_halves(pairs.astype(np.uint16)) == (size >= 64)
    assert not has_zero_halves(pairs.astype(np.int64))
    half = pairs.astype(np.uint16)
    half[size // 2 :] = 7  # the other end is looked at too
    assert not has_zero_halves(half)


def test_nothing_held_out_of_one_document_says_what_splits_it(tmp_path, caplog):
    held = {"split": "holdout", "holdout_fraction": 0.001}
    np.save(tmp_path / "a.npy", np.array([1, 2, 3]))
    (tmp_path / "a.jsonl").write_text('{"tokens": [1, 2]}\n' * 2)
    one = "each file is one document, and documents are held out whole; set eod or text_split"
    for name, eod, why in (("a.npy", None, one), ("a.npy", 9, one), ("a.jsonl", None, "change holdout_fraction")):
        with pytest.raises(UserError, match=f"s: no document is left to read.*{why}"):
            next(dataset(tmp_path / name, eod=eod, **held))
    assert warnings(caplog) == []  # the training data of the same source warn
