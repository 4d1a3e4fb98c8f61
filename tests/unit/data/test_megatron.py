"""Megatron-LM's indexed files, written here byte by byte from the published layout."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.streams import mixing_dataset
from tests.unit.data.megatron_writer import index_bytes, write_megatron
from trainer.data.formats import format_name, open_documents
from trainer.data.layout import discover_direct, discover_nested
from trainer.data.tokenizer import IdsTokenizer
from trainer.errors import UserError

TOKENS = [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14]]


def read(path: Path, **kwargs: object) -> list[list[int]]:
    documents = open_documents(path, tokenizer=IdsTokenizer(100), **kwargs)  # type: ignore[arg-type]
    return [documents.read(d, 0, int(n)).tolist() for d, n in enumerate(documents.lengths)]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_every_integer_dtype_is_read_as_it_was_written(tmp_path: Path, dtype: str) -> None:
    write_megatron(tmp_path / "a", TOKENS, dtype=dtype)
    assert read(tmp_path / "a.bin") == TOKENS


def test_the_layout_spelled_out_byte_by_byte(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\x01\x00\x02\x00\x03\x00")
    (tmp_path / "a.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        b"\x01\x00\x00\x00\x00\x00\x00\x00"  # version
        b"\x08"  # uint16
        b"\x02\x00\x00\x00\x00\x00\x00\x00"  # sequences
        b"\x03\x00\x00\x00\x00\x00\x00\x00"  # document indices
        b"\x02\x00\x00\x00\x01\x00\x00\x00"  # sizes
        b"\x00\x00\x00\x00\x00\x00\x00\x00\x04\x00\x00\x00\x00\x00\x00\x00"  # pointers
        b"\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00"
    )
    assert read(tmp_path / "a.bin") == [[1, 2], [3]]


def test_documents_of_several_sequences_are_joined_and_empty_ones_stay(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", [*TOKENS, []], documents=[0, 2, 2, 3, 5])
    assert read(tmp_path / "a.bin") == [[5, 6, 7, 8], [], [9, 10], [11, 12, 13, 14]]
    write_megatron(tmp_path / "b", TOKENS, documents=[0, 4, 4])
    assert read(tmp_path / "b.bin") == [[t for s in TOKENS for t in s], []]


def test_a_bin_is_megatrons_if_an_idx_lies_beside_it_and_the_idx_is_no_stream(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    write_megatron(tmp_path / "m" / "a", TOKENS)
    np.array([1, 2, 3], dtype=np.uint16).tofile(tmp_path / "m" / "b.bin")
    assert [format_name(tmp_path / "m" / name) for name in ("a.bin", "b.bin")] == ["megatron", "bin"]
    for streams in (discover_nested(tmp_path, format="megatron"), discover_direct([tmp_path / "m" / "*"])):
        assert [Path(s.path).name for s in streams] == ["a.bin", "b.bin"]
    assert read(tmp_path / "m" / "b.bin", dtype="uint16") == [[1, 2, 3]]
    assert read(tmp_path / "m" / "a.bin", format="bin", dtype="uint16") == [[t for s in TOKENS for t in s]]
    with pytest.raises(UserError, match=r"b\.idx: is missing"):
        read(tmp_path / "m" / "b.bin", format="megatron")
    for given in ({"eod": 0}, {"dtype": "uint16"}):
        with pytest.raises(UserError, match="does not apply to"):
            read(tmp_path / "m" / "a.bin", **given)


def test_documents_out_of_the_order_of_the_bin_are_found_by_their_pointers(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", TOKENS)
    order = [2, 0, 3, 1]
    begins = [0, 6, 8, 12]
    (tmp_path / "a.idx").write_bytes(
        index_bytes([len(TOKENS[i]) for i in order], [begins[i] for i in order], range(5), code=8)
    )
    assert read(tmp_path / "a.bin") == [TOKENS[i] for i in order]


def sparse(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)


def test_a_stream_of_ten_million_cells_opens_in_under_a_second_and_is_not_read(tmp_path: Path) -> None:
    """10 million cells of 1,024 tokens (20 GB, sparse), headerless and with an index of 300,000 documents."""
    cells, seq_len, documents = 10_000_000, 1024, 300_000
    sparse(tmp_path / "flat.bin", 2 * cells * seq_len)
    sparse(tmp_path / "indexed.bin", 2 * cells * seq_len)
    per_document = cells * seq_len // documents
    sizes = np.full(documents, per_document, dtype="<i4")
    sizes[-1] += cells * seq_len - int(sizes.sum(dtype=np.int64))
    pointers = 2 * (np.cumsum(sizes, dtype="<i8") - sizes)
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, documents, documents + 1)
    index = head + sizes.tobytes() + pointers.astype("<i8").tobytes() + np.arange(documents + 1, dtype="<i8").tobytes()
    (tmp_path / "indexed.idx").write_bytes(index)
    for name, dtype in (("flat.bin", "uint16"), ("indexed.bin", None)):
        dataset = mixing_dataset(
            discover_direct([tmp_path / name]), name="s", tokenizer=IdsTokenizer(32_000), seq_len=seq_len, dtype=dtype
        )
        begin = time.process_time()
        batch = next(dataset)  # opens, cuts into groups, plans the whole slice, and reads one batch
        spent = time.process_time() - begin
        assert batch["tokens"].shape == (8, seq_len)
        assert spent < 1.0, (name, spent)
