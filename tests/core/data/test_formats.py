"""Formats: documents come out as they were written, ids are within the vocabulary, and a new format is one row of the table."""

from __future__ import annotations

import itertools
import json
import struct
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.core.data.megatron_writer import index_bytes, write_megatron
from tests.support.in_process import program
from tests.support.runs import ROOT
from tests.support.streams import mixing_dataset
from trainer.data import formats as registry
from trainer.data.documents import load_npy
from trainer.data.formats import Format, file_kind, format_name, open_documents
from trainer.data.layout import discover_direct, discover_nested
from trainer.data.tokenizer import BytesTokenizer, IdsTokenizer
from trainer.errors import UserError
from trainer.lab.tokenized import write_index

BYTES = BytesTokenizer()
TOKENS = [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14]]


def tokens(path, tokenizer=BYTES, **kwargs):
    documents = open_documents(path, tokenizer=tokenizer, **kwargs)
    return [documents.read(d, 0, int(n)).tolist() for d, n in enumerate(documents.lengths)]


def texts(path, **kwargs):
    return [BYTES.decode(np.array(document, dtype=np.int64)) for document in tokens(path, **kwargs)]


def test_a_text_file_is_one_document_or_one_per_block(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\n\none\ntwo\n\n \t\nthree é\n\n", encoding="utf-8")
    assert texts(path) == ["\n\none\ntwo\n\n \t\nthree é\n\n"]
    assert texts(path, text_split="blank_line") == ["\n\none\ntwo\n\n \t\n", "three é\n\n"]


def test_json_lines_give_a_document_per_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "né"}\n\n{"tokens": [1, 256, 3], "id": 7}\n{"text": ""}\n')
    assert tokens(tmp_path / "a.jsonl") == [[110, 195, 169], [1, 256, 3], []]


def test_a_byte_order_mark_is_no_part_of_a_document(tmp_path):
    mark = b"\xef\xbb\xbf"
    (tmp_path / "a.txt").write_bytes(mark + "\none\n\ntwo é".encode())
    (tmp_path / "a.jsonl").write_bytes(mark + b'{"text": "one"}\n' + mark + b'{"tokens": [2]}\n')  # two files in one
    assert texts(tmp_path / "a.txt") == ["\none\n\ntwo é"]
    assert texts(tmp_path / "a.txt", text_split="blank_line") == ["\none\n\n", "two é"]
    assert tokens(tmp_path / "a.jsonl") == [list(b"one"), [2]]
    assert file_kind(tmp_path / "a.jsonl", "jsonl") == "text"


@pytest.mark.parametrize("kind", ["dictionary", "large_string", "string_view", "fixed", "large_list", "list_view"])
def test_parquet_is_read_however_its_strings_and_lists_are_stored(tmp_path, kind):
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    path, values, ids = tmp_path / "a.parquet", [f"text {i % 3}" for i in range(2000)], [[1, 2], [3, 4], [5, 6]]
    integer = pyarrow.int32()
    columns = {
        "dictionary": lambda: {"text": pyarrow.array(values).dictionary_encode()},
        "fixed": lambda: {"tokens": pyarrow.array(ids, pyarrow.list_(integer, 2))},
        "large_list": lambda: {"tokens": pyarrow.array(ids, pyarrow.large_list(integer))},
        "list_view": lambda: {"tokens": pyarrow.array(ids, pyarrow.list_view(integer))},
    }.get(kind, lambda: {"text": pyarrow.array(values, getattr(pyarrow, kind)())})()
    parquet.write_table(pyarrow.table(columns), path, row_group_size=700 if "text" in columns else 2)
    assert (texts(path) if "text" in columns else tokens(path)) == (values if "text" in columns else ids)


def write_jsonl(path, columns):
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_parquet(path, columns):
    pytest.importorskip("pyarrow.parquet").write_table(pytest.importorskip("pyarrow").table(columns), path)


@pytest.mark.parametrize(("name", "write"), [("jsonl", write_jsonl), ("parquet", write_parquet)])
def test_the_column_of_the_documents_may_have_any_name(tmp_path, capsys, name, write):
    path = tmp_path / f"m/train-00000-of-00042.{name}"
    path.parent.mkdir()
    write(path, {"text": ["never", "read"], "content": ["one", "two"], "ids": [[1, 2], [3]]})
    assert texts(path, column="content") == ["one", "two"]
    assert tokens(path, column="ids") == [[1, 2], [3]]
    assert [file_kind(path, name, column) for column in (None, "content", "ids")] == ["text", "text", "ids"]
    with pytest.raises(UserError, match="body"):
        texts(path, column="body")
    config = tmp_path / "x.toml"
    found = program(["init", tmp_path, "--column", "ids", "--out", config], capsys)
    assert found.returncode == 0, found.stderr
    lines = {line.partition(" #")[0].strip() for line in config.read_text().split("\n")}
    assert {'column = "ids"', 'tokenizer = "ids"', "vocab_size = 4"} <= lines


def test_token_arrays_are_cut_behind_the_end_of_document(tmp_path, monkeypatch):
    np.save(tmp_path / "a.npy", np.array([5, 0, 6, 7, 0, 0, 8], dtype=np.int32))
    np.array([5, 0, 6, 0], dtype=np.uint16).tofile(tmp_path / "b.bin")
    for chunk in (1 << 22, 3):  # ids scanned at a time
        monkeypatch.setattr("trainer.data.documents.SCANNED", chunk)
        assert tokens(tmp_path / "a.npy", eod=0) == [[5, 0], [6, 7, 0], [0], [8]]
        assert tokens(tmp_path / "b.bin", eod=0, dtype="uint16") == [[5, 0], [6, 0]]
    assert tokens(tmp_path / "a.npy") == [[5, 0, 6, 7, 0, 0, 8]]


# Megatron-LM's indexed files, written here byte by byte from the published layout.


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_every_integer_dtype_of_an_indexed_file_is_read_as_it_was_written(tmp_path, dtype):
    write_megatron(tmp_path / "a", TOKENS, dtype=dtype)
    assert tokens(tmp_path / "a.bin") == TOKENS


def test_documents_of_several_sequences_are_joined_and_may_lie_in_any_order(tmp_path):
    write_megatron(tmp_path / "a", [*TOKENS, []], documents=[0, 2, 2, 3, 5])
    assert tokens(tmp_path / "a.bin") == [[5, 6, 7, 8], [], [9, 10], [11, 12, 13, 14]]
    write_megatron(tmp_path / "a", TOKENS)
    order, begins = [2, 0, 3, 1], [0, 6, 8, 12]
    index = index_bytes([len(TOKENS[i]) for i in order], [begins[i] for i in order], range(5), code=8)
    (tmp_path / "a.idx").write_bytes(index)
    assert tokens(tmp_path / "a.bin") == [TOKENS[i] for i in order]


def test_a_bin_is_megatrons_if_it_has_an_idx_and_the_idx_is_no_stream(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    write_megatron(folder / "a", TOKENS)
    np.array([1, 2, 3], dtype=np.uint16).tofile(folder / "b.bin")
    assert [format_name(folder / name) for name in ("a.bin", "b.bin")] == ["megatron", "bin"]
    for streams in (discover_nested(tmp_path, format="megatron"), discover_direct([folder / "*"])):
        assert [Path(s.path).name for s in streams] == ["a.bin", "b.bin"]
    assert tokens(folder / "a.bin", format="bin", dtype="uint16") == [[t for s in TOKENS for t in s]]
    with pytest.raises(UserError, match=r"b\.idx: is missing"):
        tokens(folder / "b.bin", format="megatron")
    with pytest.raises(UserError, match="eod and dtype do not apply"):
        tokens(folder / "a.bin", eod=0)


def test_a_stream_of_ten_million_cells_opens_in_under_a_second_and_is_not_read(tmp_path):
    """10 million cells of 1,024 tokens (20 GB, sparse), headerless and with an index of 300,000 documents."""
    cells, seq_len, documents = 10_000_000, 1024, 300_000
    for name in ("flat.bin", "indexed.bin"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(2 * cells * seq_len)
    sizes = np.full(documents, cells * seq_len // documents, dtype="<i4")
    sizes[-1] += cells * seq_len - int(sizes.sum(dtype=np.int64))
    pointers = 2 * (np.cumsum(sizes, dtype="<i8") - sizes)
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, documents, documents + 1)
    index = head + sizes.tobytes() + pointers.astype("<i8").tobytes() + np.arange(documents + 1, dtype="<i8").tobytes()
    (tmp_path / "indexed.idx").write_bytes(index)
    for name, dtype in (("flat.bin", "uint16"), ("indexed.bin", None)):
        streams, ids = discover_direct([tmp_path / name]), IdsTokenizer(32_000)
        dataset = mixing_dataset(streams, tokenizer=ids, seq_len=seq_len, dtype=dtype)
        begin = time.process_time()
        batch = next(dataset)  # opens, cuts into groups, plans the whole slice, and reads one batch
        assert batch["tokens"].shape == (8, seq_len)
        assert time.process_time() - begin < 1.0, name


# Token ids are below `data.vocab_size`, since the next id begins documents.


def write_ids(folder, name, ids):
    """One document of `ids` in a file of the format of `name`."""
    path, array = folder / name, np.array(ids, dtype=np.uint16)
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


@pytest.mark.parametrize("name", ["a.npy", "a.bin", "a.idx", "a.jsonl", "a.parquet"])
def test_the_id_that_begins_documents_is_refused_in_files_of_ids(tmp_path, name):
    path = write_ids(tmp_path, name, [3, 499, 500, 7])
    dtype = "uint16" if name == "a.bin" else None
    assert tokens(path, IdsTokenizer(501), dtype=dtype) == [[3, 499, 500, 7]]
    with pytest.raises(UserError, match=r"token id 500( at token 2)? is outside the vocabulary of 500 ids") as caught:
        tokens(path, IdsTokenizer(500), dtype=dtype)
    assert "set data.vocab_size" in caught.value.fix


def test_the_dtype_alone_proves_ids_only_below_the_vocabulary(tmp_path):
    np.save(tmp_path / "a.npy", np.array([3, 255], dtype=np.uint8))
    assert tokens(tmp_path / "a.npy", IdsTokenizer(256)) == [[3, 255]]
    with pytest.raises(UserError, match="token id 255 at token 1"):
        tokens(tmp_path / "a.npy", IdsTokenizer(255))


def test_large_files_are_checked_where_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.data.documents.WHOLE", 100)
    monkeypatch.setattr("trainer.data.documents.SAMPLE", 4)
    path, ids, tokenizer = tmp_path / "a.npy", np.zeros(4000, dtype=np.uint16), IdsTokenizer(500)
    ids[3210] = 500
    np.save(path, ids)
    documents = open_documents(path, tokenizer=tokenizer)
    assert documents.read(0, 3000, 3210).tolist() == [0] * 210
    dataset = mixing_dataset(discover_direct([path]), tokenizer=tokenizer, seq_len=16)
    with pytest.raises(UserError, match=r"a\.npy: token id 500 at token 3210 is outside the vocabulary of 500 ids"):
        list(itertools.islice(dataset, 100))
    ids[0] = 600  # where a file begins is looked at when it is opened
    np.save(path, ids)
    with pytest.raises(UserError, match="token id 600 at token 0"):
        open_documents(path, tokenizer=tokenizer)


# Formats by import path: what they give is checked, and reads like any other.

MODULE = """
import numpy as np
from trainer.data import TokenTable, table_from_pieces

def reversed_lines(path, options):
    lines = path.read_text().splitlines()
    return table_from_pieces([options.tokenizer.encode(line[::-1]) for line in lines], options.tokenizer.vocab_size)

def of(tokens, starts, lengths):
    return lambda path, options: TokenTable(np.asarray(tokens), np.asarray(starts), np.asarray(lengths))

alien_id = of([1, 2, 999], [0], [3])
too_long = of([1, 2, 3], [0, 2], [2, 2])
floats = of([1.0, 2.0], [0], [2])

def no_table(path, options):
    return [1, 2]

def crashes(path, options):
    raise KeyError("header")
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file in a modality's directory, next to a module with formats."""
    (tmp_path / "formats_of_mine.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "formats_of_mine", raising=False)
    path = tmp_path / "corpus" / "a" / "one.odd"
    path.parent.mkdir(parents=True)
    path.write_text("abc\nde\n", encoding="utf-8")
    return path


def test_documents_are_those_that_a_custom_format_gives_for_files_of_any_ending(file):
    assert texts(file, format="formats_of_mine:reversed_lines") == ["cba", "ed"]
    (stream,) = discover_nested(file.parents[1], format="formats_of_mine:reversed_lines")
    assert stream.relative_path == "a/one.odd"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("alien_id", "token id 999 at token 2 is outside the vocabulary"),
        ("too_long", r"document 1 is \[2, 4\) of 3 tokens"),
        ("floats", r"lengths are float64 \[2\]"),
        ("no_table", "returned a list"),
        ("crashes", r"read by formats_of_mine:crashes\): fails: KeyError: 'header' \(.*formats_of_mine.py:\d+\)"),
        ("nothing", "has no function nothing"),
    ],
)
def test_what_a_custom_format_must_not_give_is_refused(file, function, message):
    with pytest.raises(UserError, match=message):
        tokens(file, format=f"formats_of_mine:{function}")


def test_a_row_of_the_table_is_all_that_a_new_format_needs(tmp_path, monkeypatch, capsys):
    row = Format((".ids",), load_npy, kind="ids", options=("eod",))
    monkeypatch.setattr(registry, "FORMATS", {**registry.FORMATS, "ids": row})
    corpus = tmp_path / "corpus"
    for number in range(4):
        path = corpus / "ab"[number % 2] / f"s{number}.ids"
        path.parent.mkdir(parents=True, exist_ok=True)
        ids = np.random.default_rng(number).integers(1, 200, 4000)
        with path.open("wb") as opened:
            np.save(opened, np.where(np.arange(4000) % 50, ids, 0).astype(np.uint8))
    reading = ["--tokenizer", "ids", "--vocab-size", "200", "--eod", "0"]
    assert "4 streams, 324 documents, 16,000 tokens" in program(["data", "verify", corpus, *reading], capsys).stdout
    config = tmp_path / "x.toml"
    program(["init", corpus, "--out", config, "--eod", "0"], capsys)
    lines = {line.partition(" #")[0].strip() for line in config.read_text().split("\n")}
    assert {'tokenizer = "ids"', "vocab_size = 200"} <= lines


def test_every_format_has_a_row_in_the_docs():
    page = (ROOT / "docs" / "mixing.md").read_text(encoding="utf-8")
    assert [name for name in registry.FORMATS if f"\n| `{name}` | " not in page] == []


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("text", b"{}", "text"),
        ("jsonl", b'\n{"text": "a"}\n{"tokens": [1]}\n', "text"),
        ("jsonl", b'{"tokens": [1]}\n', "ids"),
        ("jsonl", b"{not JSON", "text"),
        ("npy", b"", "ids"),
        ("my_package.formats:load", b"", "text"),
    ],
)
def test_the_kind_of_a_file_is_its_formats_or_what_its_first_record_holds(tmp_path, name, content, kind):
    (tmp_path / "file").write_bytes(content)
    assert file_kind(tmp_path / "file", name) == kind
