"""Formats: documents come out as they were written, ids are within the vocabulary, and a new format is one row of the table."""

from __future__ import annotations

import gzip
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.in_process import program
from tests.support.runs import ROOT
from tests.support.streams import index_bytes, mixing_dataset, spaced, write_arrow, write_megatron
from trainer.data import formats as registry
from trainer.data.documents import ReadOptions
from trainer.data.formats import format_name, load_documents
from trainer.data.layout import discover_direct, discover_nested
from trainer.data.tokenizer import BytesTokenizer, IdsTokenizer
from trainer.errors import UserError
from trainer.lab.tokenized import write_index
from trainer.lab.tokenizer_json import load_tokenizer
from trainer.tools.survey import file_kind

BYTES = BytesTokenizer()
TOKENS = [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14]]


def tokens(path, tokenizer=BYTES, **kwargs):
    documents = load_documents(path, ReadOptions(tokenizer, **kwargs))
    return [documents.read(d, 0, int(n)).tolist() for d, n in enumerate(documents.lengths)]


def texts(path, **kwargs):
    return [BYTES.decode(np.array(document, dtype=np.int64)) for document in tokens(path, **kwargs)]


def test_a_text_file_is_one_document_or_one_per_block(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\n\none\ntwo\n\n \t\nthree é\n\n", encoding="utf-8")
    assert texts(path) == ["\n\none\ntwo\n\n \t\nthree é\n\n"]
    assert texts(path, text_split="blank_line") == ["\n\none\ntwo\n\n \t\n", "three é\n\n"]
    path.write_text("one\n\n  two\n\n \t")
    assert texts(path, text_split="blank_line") == ["one\n\n", "  two\n\n \t"]


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
def test_parquet_and_arrow_are_read_however_its_strings_and_lists_are_stored(tmp_path, kind):
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
    write_arrow(path.with_suffix(".arrow"), columns)
    for each in (path, path.with_suffix(".arrow")):
        assert (texts(each) if "text" in columns else tokens(each)) == (values if "text" in columns else ids)


def write_jsonl(path, columns):
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_parquet(path, columns):
    pytest.importorskip("pyarrow.parquet").write_table(pytest.importorskip("pyarrow").table(columns), path)


def save_to_disk(folder, columns, *, files=2):
    """The directory of a data set; there is a cache, too, as `map` leaves one."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{files:05d}.arrow" for number in range(files)]
    for number, name in enumerate(names):
        write_arrow(folder / name, {key: values[number::files] for key, values in columns.items()})
    write_arrow(folder / "cache-00ff.arrow", columns)
    state = {"_data_files": [{"filename": name} for name in names], "_format_columns": None, "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text('{"features": {}}')


WRITERS = {".jsonl": write_jsonl, ".parquet": write_parquet, ".arrow": write_arrow}


def compressed(suffix, *parts):
    """A member or frame for each part."""
    if suffix == ".gz":
        return b"".join(map(gzip.compress, parts))
    compress = pytest.importorskip("pyarrow").compress
    return b"".join(compress(part, codec="zstd", asbytes=True) for part in parts)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_lines_are_read_across_members_and_frames(tmp_path, monkeypatch, suffix):
    path = tmp_path / "m" / f"a.jsonl{suffix}"
    lines = [b'{"text": "n\u00e9"}\n', b'{"text": "two"}\r\n{"tok', b'ens": [7]}']
    path.parent.mkdir()
    path.write_bytes(compressed(suffix, b"", *lines))
    assert tokens(path) == [list("né".encode()), list(b"two"), [7]]
    assert [stream.relative_path for stream in discover_nested(tmp_path)] == [f"m/{path.name}"]
    long = b'{"text": "' + b"a" * 100_000 + b'"}\n'
    path.write_bytes(compressed(suffix, long))
    assert path.stat().st_size < 1000
    assert tokens(path) == [[97] * 100_000]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    if suffix == ".zst":
        with pytest.raises(UserError, match=r"pyarrow, which is not installed; .*extra parquet"):
            tokens(path)


@pytest.mark.parametrize("kind", ["new_stream", "new_file"])
def test_arrow_is_read_in_both_of_its_formats(tmp_path, kind):
    path, values = tmp_path / "a.arrow", [f"tëxt {i}" for i in range(3000)]
    write_arrow(path, {"text": values, "n": [*range(3000)]}, kind=kind, rows=2500)
    assert texts(path) == values
    write_arrow(path, {"tokens": [[1, 2], [], [3]]}, kind=kind)
    assert tokens(path) == [[1, 2], [], [3]]


def test_a_directory_by_save_to_disk_has_the_files_that_it_lists(tmp_path, caplog):
    columns = {"text": [f"row {number}" for number in range(9)]}
    for folder in ("alone", "_[1]", "two/train", "two/test"):
        save_to_disk(tmp_path / folder, columns)
    (tmp_path / "two" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for streams in (
        discover_direct([tmp_path / "alone"]),
        discover_direct([tmp_path / "_[1]"]),
        discover_direct([tmp_path / "alone" / "*.arrow"]),
        discover_nested(tmp_path, ["alone"]),
        discover_nested(tmp_path / "two", ["train"]),
    ):
        assert [Path(stream.path).name for stream in streams] == names
    assert sorted(text for stream in streams for text in texts(stream.path)) == columns["text"]
    assert caplog.messages == []
    named = discover_direct([tmp_path / "alone" / name for name in ("cache-00ff.arrow", names[0])])
    assert [Path(stream.path).name for stream in named] == ["cache-00ff.arrow", names[0]]
    for discover in (discover_nested, lambda path: discover_direct([path]), lambda path: discover_nested(path.parent)):
        with pytest.raises(
            UserError, match=r"two: is a data set of splits: test, train; name one: paths = \[\".*two/train\"\]"
        ):
            discover(tmp_path / "two")
    (tmp_path / "alone" / names[1]).unlink()
    with pytest.raises(UserError, match=f"lacks {names[1]}, which its state.json lists"):
        discover_direct([tmp_path / "alone"])


@pytest.mark.parametrize("name", ["jsonl", "parquet", "arrow"])
def test_the_column_of_the_documents_may_have_any_name(tmp_path, capsys, name):
    path = tmp_path / f"m/train-00000-of-00042.{name}"
    path.parent.mkdir()
    WRITERS[path.suffix](path, {"text": ["never", "read"], "content": ["one", "two"], "ids": [[1, 2], [3]]})
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


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int64"])
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


# Token ids are below `data.vocab_size`, since the next id begins documents.


def write_ids(path, ids):
    """One document of `ids` in a file of the format of `path`."""
    array = np.array(ids, dtype=np.uint16)
    if path.suffix in WRITERS:
        WRITERS[path.suffix](path, {"tokens": [ids]})
    elif path.suffix == ".npy":
        np.save(path, array)
    else:
        array.tofile(path.with_suffix(".bin"))
        if path.suffix == ".idx":
            write_index(path, np.array([len(ids)]), array.dtype)


@pytest.mark.parametrize("name", ["a.npy", "a.bin", "a.idx", "a.jsonl", "a.parquet", "a.arrow"])
def test_the_id_that_begins_documents_is_refused_in_files_of_ids(tmp_path, name):
    write_ids(tmp_path / name, [3, 499, 500, 7])
    path = (tmp_path / name).with_suffix(name[1:].replace(".idx", ".bin"))
    dtype = "uint16" if name == "a.bin" else None
    assert tokens(path, IdsTokenizer(501), dtype=dtype) == [[3, 499, 500, 7]]
    with pytest.raises(UserError, match=r"token id 500( at token 2)? is outside the vocabulary of 500 ids") as caught:
        tokens(path, IdsTokenizer(500), dtype=dtype)
    assert "set data.vocab_size" in caught.value.fix


def test_large_files_are_checked_where_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.data.documents.WHOLE", 100)
    monkeypatch.setattr("trainer.data.documents.SAMPLE", 4)
    path, ids, tokenizer = tmp_path / "a.npy", np.zeros(4000, dtype=np.uint16), IdsTokenizer(500)
    ids[3210] = 500
    np.save(path, ids)
    documents = load_documents(path, ReadOptions(tokenizer))
    assert documents.read(0, 3000, 3210).tolist() == [0] * 210
    dataset = mixing_dataset(discover_direct([path]), tokenizer=tokenizer, seq_len=16)
    with pytest.raises(UserError, match=r"a\.npy: token id 500 at token 3210 is outside the vocabulary of 500 ids"):
        list(itertools.islice(dataset, 100))
    ids[0] = 600  # where a file begins is looked at when it is opened
    np.save(path, ids)
    with pytest.raises(UserError, match="token id 600 at token 0"):
        load_documents(path, ReadOptions(tokenizer))


# Formats by import path: what they give is checked, and reads like any other.

MODULE = """
import numpy as np
from trainer.data import TokenTable, table_from_pieces

def reversed_lines(path, options):
    pieces = [options.tokenizer.encode(line[::-1]) for line in path.read_text().splitlines()]
    return table_from_pieces([*pieces, np.array([])], options.tokenizer.vocab_size)

def of(tokens, starts, lengths):
    return lambda path, options: TokenTable(tokens, starts, lengths)

alien_id = of([1, 2, 999], [0], [3])
too_long = of([1, 2, 3], [0, 2], [2, 2])
floats = of([1.0, 2.0], [0], [2])
uneven = of([1, 2, 3], [0, 2], [1])
square = of([1, 2, 3], [[0]], [[2]])
ragged = of([[1], [2, 3]], [0], [2])
big_endian = of(np.array([1, 2], ">u2"), [0], [2])
no_table = lambda path, options: [1, 2]

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
    assert texts(file, format="formats_of_mine:reversed_lines") == ["cba", "ed", ""]
    table = load_documents(file, ReadOptions(BYTES, format="formats_of_mine:big_endian"))
    assert (table.tokens.tolist(), table.tokens.dtype) == ([1, 2], np.uint16)
    (stream,) = discover_nested(file.parents[1], format="formats_of_mine:reversed_lines")
    assert stream.relative_path == "a/one.odd"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("alien_id", "token id 999 at token 2 is outside the vocabulary"),
        ("too_long", "a document does not lie within its 3 tokens"),
        *((name, r"must be integers of shapes \[N\]") for name in ("floats", "uneven", "square")),
        ("no_table", "returned a list"),
        ("ragged", r"read by formats_of_mine:ragged\): fails: ValueError: setting an array element"),
        ("crashes", r"read by formats_of_mine:crashes\): fails: KeyError: 'header' \(.*formats_of_mine.py:\d+\)"),
        ("nothing", "has no function nothing"),
    ],
)
def test_what_a_custom_format_must_not_give_is_refused(file, function, message):
    with pytest.raises(UserError, match=message):
        tokens(file, format=f"formats_of_mine:{function}")


def test_every_format_has_a_row_in_the_docs():
    page = (ROOT / "docs" / "mixing.md").read_text(encoding="utf-8")
    assert [name for name in registry.FORMATS if f"\n| `{name}` | " not in page] == []


# The id that ends documents.


@pytest.mark.parametrize("tokenizer", ["bytes", "json"])
@pytest.mark.parametrize("ending", ["txt", "jsonl", "parquet", "arrow"])
def test_each_text_but_an_empty_one_gets_the_id_that_ends_documents(tmp_path, ending, tokenizer):
    path, texts = tmp_path / f"a.{ending}", ["al", "beta beta", "", "beta\n\n"]
    if ending == "txt":
        texts = ["al\n\n", "beta beta\n\n", "beta"]
        path.write_text("".join(texts))
    else:
        WRITERS[path.suffix](path, {"text": texts})
    if tokenizer == "json":
        spaced("plain").save(str(tmp_path / "tokenizer.json"))
    words = load_tokenizer(tokenizer if tokenizer == "bytes" else str(tmp_path / "tokenizer.json"))
    eod = words.bos_id  # may be any id of the vocabulary
    found = load_documents(path, ReadOptions(words, text_split="blank_line", text_eod=eod))
    documents = [found.read(i, 0, int(length)).tolist() for i, length in enumerate(found.lengths)]
    ended = [[*words.encode(text).tolist(), eod] if text else [] for text in texts]
    assert documents == ended


def test_a_text_that_ends_with_the_id_gets_no_second_one_and_need_not_be_utf8(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\n")
    options = ReadOptions(BytesTokenizer(), text_eod=10)
    assert load_documents(tmp_path / "a.txt", options).tokens.tolist() == [255, 10]
