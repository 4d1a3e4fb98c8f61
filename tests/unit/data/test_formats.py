"""Formats: documents come out as they were written, and damage is named with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.data.formats import file_kind, open_documents
from trainer.data.tokenizer import BytesTokenizer, Tokenizer, load_tokenizer
from trainer.errors import UserError

BYTES = BytesTokenizer()


def texts(path: Path, **kwargs: Any) -> list[str]:
    documents = open_documents(path, tokenizer=BYTES, **kwargs)
    return [
        BYTES.decode(np.asarray(documents.read(d, 0, int(n)), dtype=np.int64)) for d, n in enumerate(documents.lengths)
    ]


def tokens(path: Path, **kwargs: Any) -> list[list[int]]:
    documents = open_documents(path, tokenizer=BYTES, **kwargs)
    return [documents.read(d, 0, int(n)).tolist() for d, n in enumerate(documents.lengths)]


def test_a_text_file_is_one_document_or_one_a_block(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\n\none\ntwo\n\n \t\nthree é\n\n", encoding="utf-8")
    assert texts(path) == ["\n\none\ntwo\n\n \t\nthree é\n\n"]
    assert texts(path, text_split="blank_line") == ["\n\none\ntwo\n\n \t\n", "three é\n\n"]


def test_json_lines_give_a_document_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "né"}\n\n{"tokens": [1, 256, 3], "id": 7}\n{"text": ""}\n', encoding="utf-8")
    assert tokens(path) == [[110, 195, 169], [1, 256, 3], []]


@pytest.mark.parametrize("name", ["bytes", "tokenizer.json"])
def test_a_byte_order_mark_is_no_part_of_a_document(tmp_path: Path, name: str) -> None:
    mark = b"\xef\xbb\xbf"
    (tmp_path / "a.txt").write_bytes(mark + "\none\n\ntwo é".encode())
    (tmp_path / "a.jsonl").write_bytes(mark + b'{"text": "one"}\n' + mark + b'{"text": "two"}\n')  # two files in one
    (tmp_path / "b.jsonl").write_bytes(mark + b'{"tokens": [2]}\n')
    if name == "bytes":
        words: Tokenizer = BYTES
    else:
        pytest.importorskip("tokenizers")
        make_tokenizer(tmp_path / name)
        words = load_tokenizer(str(tmp_path / name))

    def expected(*documents: str) -> list[list[int]]:
        return [words.encode(text).tolist() for text in documents]

    def found(path: str, **options: Any) -> list[list[int]]:
        table = open_documents(tmp_path / path, tokenizer=words, **options)
        return [table.read(i, 0, int(n)).tolist() for i, n in enumerate(table.lengths)]

    assert found("a.txt") == expected("\none\n\ntwo é")
    assert found("a.txt", text_split="blank_line") == expected("\none\n\n", "two é")
    assert found("a.jsonl") == expected("one", "two")
    assert found("b.jsonl") == [[2]]
    assert file_kind(tmp_path / "b.jsonl", "jsonl") == "ids"


@pytest.mark.parametrize("kind", ["dictionary<string>", "dictionary<large_string>", "large_string", "string_view"])
def test_parquet_text_is_read_however_its_strings_are_stored(tmp_path: Path, kind: str) -> None:
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    plain = getattr(pyarrow, kind.removeprefix("dictionary<").rstrip(">"))()
    values = [f"text {i % 3}" for i in range(2000)]
    array = pyarrow.array(values, plain)
    if kind.startswith("dictionary"):
        array = array.dictionary_encode()
    parquet.write_table(pyarrow.table({"text": array}), tmp_path / "a.parquet", row_group_size=700)
    assert texts(tmp_path / "a.parquet") == values


@pytest.mark.parametrize("kind", ["fixed_size_list", "large_list", "list_view"])
def test_parquet_ids_are_read_however_their_lists_are_stored(tmp_path: Path, kind: str) -> None:
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    integer = pyarrow.int32()
    wanted = pyarrow.list_(integer, 2) if kind == "fixed_size_list" else getattr(pyarrow, kind)(integer)
    array = pyarrow.array([[1, 2], [3, 4], [5, 6]], wanted)
    parquet.write_table(pyarrow.table({"tokens": array}), tmp_path / "a.parquet", row_group_size=2)
    assert tokens(tmp_path / "a.parquet") == [[1, 2], [3, 4], [5, 6]]


def test_token_arrays_are_cut_behind_the_end_of_document(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([5, 0, 6, 7, 0, 0, 8], dtype=np.int32))
    np.array([5, 0, 6, 0], dtype=np.uint16).tofile(tmp_path / "b.bin")
    assert tokens(tmp_path / "a.npy", eod=0) == [[5, 0], [6, 7, 0], [0], [8]]
    assert tokens(tmp_path / "a.npy") == [[5, 0, 6, 7, 0, 0, 8]]
    assert tokens(tmp_path / "b.bin", eod=0, dtype="uint16") == [[5, 0], [6, 0]]


def test_a_scan_in_chunks_finds_every_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data.token_formats.CHUNK", 3)
    ids = np.random.default_rng(0).integers(0, 3, 50)
    np.save(tmp_path / "a.npy", ids)
    found = tokens(tmp_path / "a.npy", eod=0)
    assert [t for document in found for t in document] == ids.tolist()
    assert all(0 not in document[:-1] for document in found)
    assert all(document[-1] == 0 for document in found[:-1])


@pytest.mark.parametrize(
    ("name", "content", "kwargs", "message"),
    [
        ("a.jsonl", b"\n\n", {}, "no documents"),
        ("a.jsonl", b'{"tokens": [true]}\n', {}, "list of integers"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', {}, "surrogate"),
        ("a.bin", b"abcd", {"dtype": "float32"}, "integer dtype"),
        ("a.bin", b"abcd", {"dtype": "u17"}, "integer dtype"),
        ("a.xyz", b"abc", {}, "no format is known"),
        ("a.txt", b"abc", {"format": "xml"}, "must be one of auto, text"),
        ("a.txt", b"abc", {"text_split": "page"}, "must be one of file, blank_line"),
    ],
)
def test_what_cannot_be_read_as_asked_is_refused(
    tmp_path: Path, name: str, content: bytes, kwargs: dict[str, Any], message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        open_documents(tmp_path / name, tokenizer=BYTES, **kwargs)


def test_every_byte_has_a_type_and_text_comes_back() -> None:
    table = BYTES.token_type_table
    assert table is not None
    assert len(table) == BYTES.vocab_size == 257
    names = [BYTES.token_type_names[table[ord(c)]] for c in "a7 \n,\x00"]
    assert names == ["letter", "digit", "space", "newline", "punctuation", "other"]
    assert BYTES.token_type_names[table[0xC3]] == BYTES.token_type_names[table[256]] == "other"
    assert BYTES.decode(np.append(BYTES.encode("né\n"), 256)) == "né\n"


def make_tokenizer(path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    # Many published tokenizers add marks of their own; documents must not get them in the middle of a stream.
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[UNK] $A [UNK]", special_tokens=[("[UNK]", 2)]
    )
    tokenizer.save(str(path))


def test_ids_take_their_vocabulary_from_the_config_and_refuse_text() -> None:
    tokenizer = load_tokenizer("ids", vocab_size=1000)
    assert (tokenizer.vocab_size, tokenizer.bos_id) == (1001, 1000)
    with pytest.raises(UserError, match="cannot tokenize text"):
        tokenizer.encode("a")
    with pytest.raises(UserError, match="must be set"):
        load_tokenizer("ids")
    with pytest.raises(UserError, match="defines its own"):
        load_tokenizer("bytes", vocab_size=5)


def test_a_tokenizer_that_cannot_be_had_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match='must be "bytes", "ids" or'):
        load_tokenizer("words")
    with pytest.raises(UserError, match="no such tokenizer file"):
        load_tokenizer(str(tmp_path / "absent.json"))
    (tmp_path / "bad.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(UserError, match="not a readable tokenizer"):
        load_tokenizer(str(tmp_path / "bad.json"))
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"pip install tokenizers"):
        load_tokenizer(str(tmp_path / "bad.json"))
