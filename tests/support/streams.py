"""Streams and data sets of streams for tests, the files they come from, and small tokenizers."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.data.documents import ReadOptions
from trainer.data.groups import CutOptions
from trainer.data.layout import Stream, discover_nested
from trainer.data.shard_source import MixOptions
from trainer.data.tokenizer import BytesTokenizer
from trainer.lab.stream_mixing import StreamMixingDataset


def mixing_dataset(
    streams: Sequence[Stream], *, rank: int = 0, world_size: int = 1, **settings: Any
) -> StreamMixingDataset:
    """A data set, its settings by name; cells of 4 bytes unless they say otherwise."""
    settings = {"namespace": settings.pop("name", "source"), "tokenizer": BytesTokenizer(), **settings}
    settings = {"seq_len": 4, "max_group_cells": 64, "batching_mode": "per_stream", **settings}
    return StreamMixingDataset(streams, *options_of(settings), shard=rank, num_shards=world_size)


def options_of(settings: dict[str, Any]) -> list[Any]:
    """How files are cut, read and mixed, of settings by name."""
    kinds = (CutOptions, ReadOptions, MixOptions)
    names = [{each.name for each in fields(kind)} & settings.keys() for kind in kinds]
    assert set().union(*names) == settings.keys(), settings
    return [kind(**{name: settings[name] for name in own}) for kind, own in zip(kinds, names, strict=True)]


class WideTokens(BytesTokenizer):
    """Bytes, with room for the ids of `write_tokens`."""

    vocab_size = 2000
    bos_id = 1999

    def __init__(self) -> None:
        super().__init__()
        self.token_type_table = None


def write_tokens(folder: Path, layout: Mapping[str, Sequence[int]], *, is_unique: bool = False) -> list[Stream]:
    """A file `NAME.jsonl` for each name of the layout, of documents of these lengths.

    Ids count up through a stream, so that (document, position) can be read from them; if they are unique, through all.
    """
    first = 0
    for name, lengths in layout.items():
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True, parents=True)
        rows = []
        for size in lengths:
            rows.append({"tokens": list(range(first, first + size))})
            first += size
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        first = first if is_unique else 0
    return discover_nested(folder)


@contextmanager
def streams_of(
    layout: Sequence[Sequence[int]], modalities: str = "ab", *, is_unique: bool = False
) -> Iterator[list[Stream]]:
    """Streams of documents of these lengths, in the modalities in turn; see `write_tokens`."""
    with tempfile.TemporaryDirectory() as folder:
        named = {f"{modalities[i % len(modalities)]}/s{i}": lengths for i, lengths in enumerate(layout)}
        yield write_tokens(Path(folder), named, is_unique=is_unique)


def spaced(kind: str) -> Any:
    """A tokenizer whose words carry their space, or get it from what stands before them; or with a token for each byte."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    if kind == "byte_level":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        found = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
        found.pre_tokenizer, found.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        return found
    words, mark = ["al", "beta", "gamma", "delta"], "" if kind in ("pieces", "plain") else "\u2581"
    vocabulary = {"<unk>": 0, **{mark + word: number for number, word in enumerate(words, 1)}, "##pha": 5}
    model = models.WordPiece if kind == "pieces" else models.WordLevel
    found = Tokenizer(model(vocabulary, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    if kind == "pieces":
        found.decoder = decoders.WordPiece()
    elif kind == "metaspace":
        found.pre_tokenizer, found.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    elif kind == "llama":
        found.normalizer = normalizers.Sequence([normalizers.Prepend(mark), normalizers.Replace(" ", mark)])
        found.pre_tokenizer = pre_tokenizers.Split(mark, "merged_with_next")
        found.decoder = decoders.Sequence([decoders.Replace(mark, " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return found


CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


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
    head = struct.pack("<9sQBQQ", magic, version, code, len(sizes), len(documents))
    tables = (np.array(sizes, "<i4"), np.array(pointers, "<i8"), np.array(documents, "<i8"))
    return head + b"".join(table.tobytes() for table in tables)


def write_megatron(
    path: Path, sequences: Sequence[Sequence[int]], *, dtype: str = "uint16", documents: Sequence[int] | None = None
) -> None:
    """`path`.bin and `path`.idx; `documents` are the document indices, one sequence a document unless given."""
    arrays = [np.array(sequence, dtype) for sequence in sequences]
    np.concatenate(arrays).tofile(path.with_suffix(".bin"))
    sizes = [len(sequence) for sequence in sequences]
    pointers = [sum(array.nbytes for array in arrays[:number]) for number in range(len(arrays))]
    indices = range(len(sequences) + 1) if documents is None else documents
    path.with_suffix(".idx").write_bytes(index_bytes(sizes, pointers, indices, code=CODES[dtype]))


def write_arrow(path: Path, columns: Mapping[str, Any], *, kind: str = "new_stream", rows: int = 2) -> None:
    """As `save_to_disk` writes it, or in the file format (`new_file`)."""
    pyarrow = pytest.importorskip("pyarrow", reason="extra parquet")
    table = pyarrow.table(columns)
    with pyarrow.OSFile(str(path), "wb") as file, getattr(pyarrow.ipc, kind)(file, table.schema) as stream:
        stream.write_table(table, rows)
