"""Token ids in files: those of `data.vocab_size` are below it, since the next id begins documents."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.streams import mixing_dataset
from trainer.data.formats import open_documents
from trainer.data.layout import discover_direct
from trainer.data.token_formats import write_index
from trainer.data.tokenizer import IdsTokenizer, Tokenizer
from trainer.errors import UserError

FILES = ("a.npy", "a.bin", "a.idx", "a.jsonl", "a.parquet")


def write(folder: Path, name: str, ids: list[int]) -> Path:
    """One document of `ids` in a file of the format of `name`."""
    path = folder / name
    array = np.array(ids, dtype=np.uint16)
    if name == "a.npy":
        np.save(path, array)
    elif name == "a.jsonl":
        path.write_text(json.dumps({"tokens": ids}) + "\n")
    elif name == "a.parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"tokens": [ids]}), path)
    else:
        path = folder / "a.bin"
        array.tofile(path)
        if name == "a.idx":
            write_index(folder / "a.idx", np.array([len(ids)]), array.dtype)
    return path


def read(path: Path, tokenizer: Tokenizer) -> list[int]:
    is_bare = path.suffix == ".bin" and not path.with_suffix(".idx").exists()
    documents = open_documents(path, tokenizer=tokenizer, dtype="uint16" if is_bare else None)
    found: list[int] = documents.read(0, 0, int(documents.lengths[0])).tolist()
    return found


@pytest.mark.parametrize("name", FILES)
def test_the_id_that_begins_documents_is_refused_in_files_of_ids(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, name, [3, 499, 500, 7])
    assert read(path, IdsTokenizer(501)) == [3, 499, 500, 7]
    for size, wrong in ((500, 500), (499, 499), (4, 499)):
        message = rf"token id {wrong}( at token \d)? is outside the vocabulary of {size} ids"
        with pytest.raises(UserError, match=message) as caught:
            read(path, IdsTokenizer(size))
        assert "set data.vocab_size" in caught.value.fix


def test_the_dtype_alone_proves_ids_only_below_the_vocabulary(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([3, 255], dtype=np.uint8))
    assert read(tmp_path / "a.npy", IdsTokenizer(256)) == [3, 255]
    with pytest.raises(UserError, match="token id 255 at token 1"):
        read(tmp_path / "a.npy", IdsTokenizer(255))


def test_large_files_are_checked_where_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data.documents.WHOLE", 100)
    monkeypatch.setattr("trainer.data.documents.SAMPLE", 4)
    ids = np.zeros(4000, dtype=np.uint16)
    ids[3210] = 500
    np.save(tmp_path / "a.npy", ids)
    documents = open_documents(tmp_path / "a.npy", tokenizer=IdsTokenizer(500))
    assert documents.read(0, 3000, 3210).tolist() == [0] * 210
    with pytest.raises(UserError, match=r"a\.npy: token id 500 at token 3210 is outside the vocabulary of 500 ids"):
        documents.read(0, 3000, 3300)
    streams = discover_direct([tmp_path / "a.npy"])
    with pytest.raises(UserError, match=r"a\.npy: token id 500 at token 3210 is outside"):
        list(itertools.islice(mixing_dataset(streams, name="s", tokenizer=IdsTokenizer(500), seq_len=16), 100))
    ids[[3210, 0]] = 0, 600  # where a file begins is looked at when it is opened
    np.save(tmp_path / "a.npy", ids)
    with pytest.raises(UserError, match="token id 600 at token 0"):
        open_documents(tmp_path / "a.npy", tokenizer=IdsTokenizer(500))
