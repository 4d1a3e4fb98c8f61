"""Megatron-LM's indexed files written from the published layout with `struct`, sharing nothing with the reader."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}
LETTERS = {"uint8": "B", "int8": "b", "int16": "h", "int32": "i", "int64": "q", "uint16": "H"}


def index_bytes(
    sizes: Sequence[int],
    pointers: Sequence[int],
    documents: Sequence[int],
    *,
    code: int,
    magic: bytes = b"MMIDIDX\x00\x00",
    version: int = 1,
) -> bytes:
    """The bytes of an index."""
    head = magic + struct.pack("<Q", version) + struct.pack("<B", code)
    head += struct.pack("<Q", len(sizes)) + struct.pack("<Q", len(documents))
    tables = struct.pack(f"<{len(sizes)}i", *sizes) + struct.pack(f"<{len(pointers)}q", *pointers)
    return head + tables + struct.pack(f"<{len(documents)}q", *documents)


def write_megatron(
    path: Path, sequences: Sequence[Sequence[int]], *, dtype: str = "uint16", documents: Sequence[int] | None = None
) -> None:
    """`path`.bin and `path`.idx; `documents` are the document indices, one sequence a document unless given."""
    letter = LETTERS[dtype]
    size = struct.calcsize(f"<{letter}")
    pointers, at = [], 0
    with path.with_suffix(".bin").open("wb") as file:
        for sequence in sequences:
            pointers.append(at)
            at += file.write(struct.pack(f"<{len(sequence)}{letter}", *sequence))
    assert at == size * sum(map(len, sequences))
    indices = range(len(sequences) + 1) if documents is None else documents
    index = index_bytes([len(s) for s in sequences], pointers, list(indices), code=CODES[dtype])
    path.with_suffix(".idx").write_bytes(index)
