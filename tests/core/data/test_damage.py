"""Damaged input: every kind is one UserError with the path and the place, on one line, and never a traceback."""

from __future__ import annotations

import gzip
import io
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.support.streams import index_bytes, write_arrow, write_megatron
from trainer.data.documents import IdBounds, ReadOptions
from trainer.data.formats import load_documents
from trainer.data.tokenizer import BytesTokenizer
from trainer.errors import UserError

SIZES, POINTERS, DOCUMENTS = [3, 1, 2], [0, 6, 8], [0, 1, 2, 3]  # three documents of uint16 in 12 bytes


def read_all(path, **kwargs):
    """Read a file to its last token."""
    documents = load_documents(path, ReadOptions(BytesTokenizer(), **kwargs))
    IdBounds.of(path, BytesTokenizer()).check(documents.tokens, 0)
    return int(documents.lengths.sum())


def refusal(path, message=".", **kwargs):
    with pytest.raises(UserError, match=message) as refused:
        read_all(path, **kwargs)
    assert "\n" not in refused.value.message
    return refused.value.message


def index(sizes=SIZES, pointers=POINTERS, documents=DOCUMENTS, **kwargs):
    return index_bytes(sizes, pointers, documents, **{"code": 8, **kwargs})


WHOLE = index()
INDICES: dict[str, tuple[bytes, str]] = {
    "wrong magic": (b"NOTANIDX!" + WHOLE[9:], r"a\.idx: is not a Megatron-LM index"),
    "empty": (b"", "is not a Megatron-LM index of version 1"),
    "truncated": (WHOLE[:-9], r"a\.idx: its tables take 102 bytes, it has 93"),
    "unknown version": (index(version=2), "is not a Megatron-LM index of version 1"),
    "unknown dtype": (index(code=9), "is not a Megatron-LM index of version 1 and of integers"),
    "negative length": (index([3, -1, 2]), "do not fit a .bin of 12 bytes"),
    "pointer behind the bin": (index(pointers=[0, 6, 1 << 40]), "do not fit a .bin of 12 bytes"),
    "pointer beyond 64 bits": (index(pointers=[0, (1 << 63) - 2, 8]), "do not fit a .bin of 12 bytes"),
    "less than the bin has": (index([3, 1, 1]), "do not fit a .bin of 12 bytes of uint16"),
    "document indices fall": (index(documents=[0, 2, 1, 3]), "do not increase from 0 to 3"),
    "no documents": (index([], [], [0]), "has no documents"),
    "a document with a gap": (
        index([2, 1, 2], [0, 6, 8], [0, 2, 3]),
        "sequences of a document do not follow each other",
    ),
}


@pytest.mark.parametrize("kind", INDICES)
def test_a_damaged_megatron_index_is_refused(tmp_path, kind):
    content, message = INDICES[kind]
    write_megatron(tmp_path / "a", [[1, 2, 3], [4], [5, 6]])
    assert (tmp_path / "a.idx").read_bytes() == WHOLE
    assert read_all(tmp_path / "a.bin") == 6
    (tmp_path / "a.idx").write_bytes(content)
    assert refusal(tmp_path / "a.bin", message).startswith(str(tmp_path / "a.idx"))


def npy(array, **kwargs):
    file = io.BytesIO()
    np.save(file, array, **kwargs)
    return file.getvalue()


class Bomb:
    """What unpickling this would do."""

    def __reduce__(self):
        return os.mkdir, (os.path.join(tempfile.gettempdir(), f"unpickled-{os.getpid()}"),)


def parquet(columns):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as files

    file = io.BytesIO()
    files.write_table(pyarrow.table(columns), file)
    return file.getvalue()


def arrow(columns, **kwargs):
    with tempfile.TemporaryDirectory() as folder:
        write_arrow(Path(folder, "a"), columns, **kwargs)
        return Path(folder, "a").read_bytes()


def zstd(content):
    return pytest.importorskip("pyarrow").compress(content, codec="zstd", asbytes=True)


LONG = np.arange(100, dtype=np.uint16)
LINES = b"".join(b'{"text": "%d"}\n' % number for number in range(1000))
FILES = [  # a dict holds the columns of a Parquet file, or a function makes the content; a .bin is read as uint16
    ("a.txt", b"", "the file is empty"),
    ("a.xyz", b"abc", "no format is known"),
    ("a.jsonl", b"\n\n", "no documents"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"line 2: is not JSON in UTF-8 .* in position 10"),
    ("a.jsonl", b'{"text": ["a"]}\n', r"line 1: is not an object with either text .* \(it has text\)"),
    ("a.jsonl", b'{"text": "\\ud800"}\n', "surrogate"),
    ("a.jsonl", b'{"tokens": [true]}\n', "or a list of integers"),
    ("a.jsonl", b'{"tokens": [1, 99999999999999999999]}\n', "token id 99999999999999999999"),
    ("a.bin", b"abcde", "byte offset 4"),
    ("a.bin", LONG.tobytes() + b"\x01\x01\x00\x00", "id 257 at token 100"),
    ("a.npy", npy(LONG.astype(">u2")), "little-endian, got >u2"),
    ("a.npy", LONG.tobytes(), 'if it holds ids alone, set format = "bin" and their dtype'),
    ("a.npy", npy(np.array([Bomb()], dtype=object), allow_pickle=True), "not a readable .npy"),
    ("a.npy", npy(np.array([1, -5], np.int8)), "token id -5 at token 1"),
    ("a.parquet", {"text": [1]}, r"needs one column text or tokens, of strings .* integers \(its columns: text"),
    ("a.parquet", {"text": ["a", "b", None]}, "rows 0 to 2: text is null in one"),
    ("a.parquet", {"tokens": [[1], [2, None]]}, "null token"),
    ("a.parquet", {"tokens": [[1], [], [2, 257]]}, "rows 0 to 2: token id 257 at token 2"),
    ("a.parquet", b"PAR1 and so on", "not a readable Parquet file"),
    ("cut.jsonl.gz", lambda: gzip.compress(LINES)[:-9], "not a whole gzip file .*ended before the end"),
    ("crc.jsonl.gz", lambda: gzip.compress(LINES)[:-5] + b"12345", "not a whole gzip file .*CRC"),
    ("none.jsonl.gz", lambda: gzip.compress(b""), "no documents"),
    ("plain.jsonl.gz", LINES, "not a whole gzip file .*Not a gzipped"),
    ("cut.jsonl.zst", lambda: zstd(LINES) * 2 + zstd(LINES)[:-9], "not a readable zstandard file .*Truncated"),
    ("cut.arrow", lambda: arrow({"text": [*"abcdef"]})[:-20], "has no end of an Arrow stream"),
    ("file.arrow", lambda: arrow({"text": [*"abcdef"]}, kind="new_file")[:-9], "not a readable Arrow file"),
    ("parquet.arrow", lambda: parquet({"text": ["a"]}), "has no end of an Arrow stream"),
    ("null.arrow", lambda: arrow({"text": ["a", "b", "c", None]}), "rows 2 to 3: text is null in one"),
    ("twice.arrow", lambda: arrow({"text": ["a"], "texT": ["b"]}).replace(b"texT", b"text"), "needs one column text"),
    ("id.arrow", lambda: arrow({"tokens": [[1], [2], [999]]}), "rows 2 to 2: token id 999"),
]


@pytest.mark.parametrize(("name", "content", "message"), FILES, ids=[message for *_, message in FILES])
def test_a_damaged_file_is_refused(tmp_path, name, content, message):
    path = tmp_path / name
    if path.suffix == ".parquet":
        pytest.importorskip("pyarrow")
    path.write_bytes(parquet(content) if isinstance(content, dict) else content() if callable(content) else content)
    options = {"dtype": "uint16"} if name == "a.bin" else {}
    assert refusal(path, message, **options).startswith(str(path))
    assert not list(Path(tempfile.gettempdir()).glob(f"unpickled-{os.getpid()}"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs an integer dtype"),
        ({"dtype": "u17"}, "integer dtype"),
        ({"format": "xml"}, "must be one of auto, text"),
        ({"text_split": "page"}, "should be 'file' or 'blank_line'"),
    ],
)
def test_what_cannot_be_read_as_asked_is_refused(tmp_path, options, message):
    (tmp_path / "a.bin").write_bytes(b"abcd")
    with pytest.raises(UserError, match=message):
        read_all(tmp_path / "a.bin", **options)


def test_what_is_no_file_is_refused(tmp_path):
    (tmp_path / "a.txt").mkdir()
    os.mkfifo(tmp_path / "b.txt")
    (tmp_path / "d.txt").symlink_to(tmp_path / "nowhere")
    for name in ("a.txt", "b.txt"):
        assert "is not a regular file" in refusal(tmp_path / name)
    for name in ("c.txt", "d.txt"):
        assert "cannot be read (No such file or directory)" in refusal(tmp_path / name)


@pytest.mark.parametrize("kind", ["npy", "idx", "parquet", "jsonl", "arrow", "jsonl.gz", "jsonl.zst"])
def test_no_byte_that_is_flipped_gives_anything_but_tokens_or_a_refusal(tmp_path, kind):
    write_megatron(tmp_path / "a", [[1, 2, 3], [4], [5, 6]])
    whole = {
        "npy": lambda: npy(LONG[:4]),
        "idx": lambda: WHOLE,
        "parquet": lambda: parquet({"text": ["abc", "d"]}),
        "jsonl": lambda: b'{"text": "a\\u00e9b"}\n{"tokens": [1, 2]}\n',
        "arrow": lambda: arrow({"text": ["abc", "d", "éf"]}),
        "jsonl.gz": lambda: gzip.compress(LINES[:300]),
        "jsonl.zst": lambda: zstd(LINES[:300]),
    }[kind]()
    damaged, generator, messages = tmp_path / f"a.{kind}", np.random.default_rng(0), []
    places = generator.permutation(len(whole))[:150].tolist()
    for place in places:
        content = bytearray(whole)
        content[place] ^= 1 << int(generator.integers(8))
        damaged.write_bytes(content)
        try:
            read_all(tmp_path / "a.bin" if kind == "idx" else damaged)
        except UserError as error:
            messages.append(error.message)
    assert not any("\n" in message for message in messages)
    assert len(messages) > len(places) // 8
