"""Flat arrays of token ids, memory-mapped: `.npy`, and headerless `.bin` of a given dtype.

Megatron-LM's indexed token files: `NAME.bin` holds the ids, `NAME.idx` the positions of the documents.

The index, all little-endian: the magic, the version (u64, 1), the dtype code (u8), the number of sequences (u64), the
number of document indices (u64), the sizes of the sequences in tokens (i32 each), their byte offsets in the `.bin` (i64
each), and the document indices (i64 each): document d holds the sequences from index d up to index d + 1. Both files
are memory-mapped.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from trainer.arrays import Ints
from trainer.data.documents import IdBounds, ReadOptions, TokenArray, TokenTable
from trainer.errors import UserError
from trainer.files import write_file

CHUNK = 1 << 22  # tokens scanned at a time
SAMPLE_BYTES = 1 << 16  # at either end of a file whose dtype is doubted


def _scan(tokens: TokenArray, eod: int, bounds: IdBounds) -> Ints:
    """The end of each document (just past its end-of-document id), int64 [D]; checks every id along the way."""
    ends = []
    for start in range(0, len(tokens), CHUNK):
        chunk = tokens[start : start + CHUNK]
        bounds.check(chunk, start)
        ends.append(np.flatnonzero(chunk == eod) + (start + 1))
    found = np.concatenate(ends).astype(np.int64)
    return found if len(found) and found[-1] == len(tokens) else np.append(found, len(tokens))


def _table(path: Path, mapped: TokenArray, options: ReadOptions) -> TokenTable:
    """Without an end-of-document id the file is one document and stays unread; with one it is scanned completely."""
    if not len(mapped):
        raise UserError(str(path), "has no tokens", "remove the file")
    # A plain ndarray: slicing the memmap subclass costs several times as much.
    tokens, bounds = np.asarray(mapped), IdBounds.of(path, options.tokenizer)
    if options.eod is None:
        length = np.array([len(tokens)], dtype=np.int64)
        return TokenTable(tokens, np.zeros(1, np.int64), length, bounds.check_sample(tokens))
    bounds.check_eod(options.eod)
    ends = _scan(tokens, options.eod, bounds)
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    return TokenTable(tokens, starts, ends - starts)


def _check_dtype(dtype: np.dtype[Any], key: str) -> None:
    if dtype.kind not in "iu":
        raise UserError(key, f"must be an integer dtype, got {dtype}", 'use "uint16", or the dtype that wrote the file')
    if not dtype.isnative:
        raise UserError(key, f"is big-endian ({dtype.str})", "write the ids little-endian: array.astype('<u2')")


def has_zero_halves(tokens: TokenArray) -> bool:
    """Whether nearly every second value is 0, and not nearly all others: as when ids are read with less than their width.

    Looks at both ends of the array. Values that are mostly 0 at odd and even places are no such case.
    """
    size = SAMPLE_BYTES // tokens.itemsize
    if len(tokens) < 64 or tokens.itemsize == 8:
        return False
    last = max(len(tokens) - size, 0) // 2 * 2
    sample = np.concatenate([tokens[:size], tokens[max(last, size) :] if last else tokens[:0]])
    return bool((sample[1::2] == 0).mean() >= 0.99 and (sample[0::2] == 0).mean() <= 0.9)


def load_npy(path: Path, options: ReadOptions) -> TokenTable:
    """The documents of a 1-D integer `.npy`; a document keeps its end-of-document id as its last token.

    Raises:
        UserError: not a `.npy` file, truncated, another shape or dtype, ids outside the vocabulary.
    """
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy evaluates the header, so a damaged one raises anything
        reason = " ".join(str(error).split())
        raise UserError(str(path), f"is not a readable .npy array ({reason})", "write the file again") from error
    if not isinstance(tokens, np.ndarray):
        raise UserError(str(path), "is an archive of arrays (.npz), not one array", "save one array with numpy.save")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        problem = f"must be a 1-D integer array, got {tokens.dtype} of shape {tokens.shape}"
        raise UserError(str(path), problem, "save the ids of all documents concatenated")
    _check_dtype(tokens.dtype, str(path))
    return _table(path, tokens, options)


def load_bin(path: Path, options: ReadOptions) -> TokenTable:
    """The documents of a headerless array of `options.dtype`.

    Raises:
        UserError: no dtype or not an integer one, a size that is not a multiple of it, ids outside the vocabulary.
    """
    if options.dtype is None:
        problem = "a headerless token file needs a dtype"
        raise UserError(str(path), problem, 'set dtype = "uint16", or the dtype that wrote it')
    try:
        dtype = np.dtype(options.dtype)
    except (TypeError, ValueError, SyntaxError) as error:
        raise UserError("dtype", f"unknown dtype {options.dtype!r}", 'set it to "uint16", for example') from error
    _check_dtype(dtype, "dtype")
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise UserError(
            str(path),
            f"ends in the middle of a token: {size} bytes are not a multiple of {dtype.itemsize} ({dtype}), "
            f"the last complete token ends at byte offset {size - size % dtype.itemsize}",
            "write the file again, or set the dtype that wrote it",
        )
    return _table(path, np.memmap(path, dtype=dtype, mode="r"), options)


MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
FLOATS = {6: "float64", 7: "float32"}
AGAIN = "write both files again with the tool that made them"


@dataclass(frozen=True)
class _Index:
    """The tables of an index: sizes [sequences], pointers [sequences] in bytes, documents [documents + 1]."""

    path: Path
    dtype: np.dtype[np.generic]
    sizes: np.ndarray
    pointers: Ints
    documents: Ints

    def refuse(self, problem: str) -> NoReturn:
        raise UserError(str(self.path), problem, AGAIN)


def _read_header(path: Path, size: int) -> tuple[np.dtype[np.generic], int, int]:
    """(dtype, sequences, document indices) of an index file of `size` bytes."""
    with path.open("rb") as file:
        head = file.read(HEADER.size)
    if not head.startswith(MAGIC):
        found = head[: len(MAGIC)]
        raise UserError(str(path), f"is not a Megatron-LM index: it begins with {found!r} (byte offset 0)", AGAIN)
    if len(head) < HEADER.size:
        raise UserError(str(path), f"is cut off inside its header, at byte offset {size} of {HEADER.size}", AGAIN)
    _, version, code, num_sequences, num_indices = HEADER.unpack(head)
    if version != 1:
        hint = " (big-endian?)" if version == 1 << 56 else ""
        raise UserError(str(path), f"has version {version}{hint} at byte offset 9, only 1 is known", AGAIN)
    if code in FLOATS:
        raise UserError(str(path), f"holds {FLOATS[code]}, not token ids (dtype code {code}, byte offset 17)", AGAIN)
    if code not in DTYPES:
        raise UserError(str(path), f"has an unknown dtype code {code} at byte offset 17", AGAIN)
    wanted = HEADER.size + 12 * num_sequences + 8 * num_indices
    if size != wanted:
        how = "is cut off" if size < wanted else "continues past its last table"
        problem = (
            f"{how}: {num_sequences} sequences and {num_indices} document indices take {wanted} bytes, it has {size}"
        )
        raise UserError(str(path), problem, AGAIN)
    return np.dtype(DTYPES[code]), num_sequences, num_indices


def _read_index(path: Path) -> _Index:
    dtype, num_sequences, num_indices = _read_header(path, path.stat().st_size)
    mapped = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    bounds = np.cumsum([HEADER.size, 4 * num_sequences, 8 * num_sequences, 8 * num_indices]).tolist()
    sizes, pointers, documents = (
        mapped[start:stop].view(kind)
        for start, stop, kind in zip(bounds, bounds[1:], ("<i4", "<i8", "<i8"), strict=False)
    )
    return _Index(path, dtype, sizes, pointers, documents)


def _check(index: _Index, bin_path: Path) -> None:
    """Reject an index that is inconsistent, or that does not belong to the `.bin`."""
    itemsize, bin_size = index.dtype.itemsize, bin_path.stat().st_size
    if not len(index.sizes) or len(index.documents) < 2:
        index.refuse("has no documents")
    if index.sizes.min() < 0:
        at = int(np.flatnonzero(index.sizes < 0)[0])
        index.refuse(f"sequence {at} has the negative length {int(index.sizes[at])}")
    first, last = int(index.documents[0]), int(index.documents[-1])
    falls = np.flatnonzero(np.diff(index.documents) < 0)
    if first != 0 or last != len(index.sizes) or len(falls):
        place = f", and decrease after index {int(falls[0])}" if len(falls) else ""
        index.refuse(
            f"its document indices must increase from 0 to {len(index.sizes)}; they run from {first} to {last}{place}"
        )
    ends = index.pointers + index.sizes.astype(np.int64) * itemsize
    outside = (index.pointers < 0) | (index.pointers % itemsize != 0) | (ends > bin_size)
    if outside.any():
        at = int(np.flatnonzero(outside)[0])
        index.refuse(
            f"sequence {at} lies at bytes {int(index.pointers[at])} to {int(ends[at])}, which is outside "
            f"{bin_path.name} ({bin_size} bytes of {index.dtype})"
        )
    if int(ends.max()) != bin_size:
        index.refuse(f"its sequences end at byte {int(ends.max())}, but {bin_path.name} has {bin_size} bytes")


def _documents(index: _Index) -> tuple[Ints, Ints]:
    """(first token, number of tokens) of each document; its sequences must be contiguous in the `.bin`."""
    starts = index.pointers // index.dtype.itemsize
    if len(index.documents) == len(index.sizes) + 1 and int(np.diff(index.documents).min()) == 1:
        return starts, index.sizes.astype(np.int64)
    ends = starts + index.sizes
    is_inner = np.ones(len(starts), dtype=np.bool_)  # sequences that continue a document
    is_inner[index.documents[:-1][index.documents[:-1] < len(starts)]] = False
    gaps = np.flatnonzero(is_inner[1:] & (starts[1:] != ends[:-1]))
    if len(gaps):
        index.refuse(f"sequence {int(gaps[0]) + 1} does not directly follow the previous one of its document")
    totals = np.concatenate([np.zeros(1, np.int64), np.cumsum(index.sizes, dtype=np.int64)])
    lengths = totals[index.documents[1:]] - totals[index.documents[:-1]]
    return starts[np.minimum(index.documents[:-1], len(starts) - 1)], lengths


def write_index(path: Path, lengths: Ints, dtype: np.dtype[Any]) -> None:
    """Write the index of a `.bin` whose documents, of these lengths, follow each other, one sequence each.

    Raises:
        UserError: a document is longer than the format's 32 bits can say.
    """
    code = next(code for code, name in DTYPES.items() if np.dtype(name) == dtype)
    if len(lengths) and int(lengths.max()) >= 1 << 31:
        raise UserError(
            str(path), f"a document of {int(lengths.max()):,} tokens is too long for it", "cut the document"
        )
    pointers = (np.cumsum(lengths) - lengths) * dtype.itemsize
    header = HEADER.pack(MAGIC, 1, code, len(lengths), len(lengths) + 1)
    tables = (lengths.astype("<i4"), pointers.astype("<i8"), np.arange(len(lengths) + 1, dtype="<i8"))
    write_file(path, header + b"".join(table.tobytes() for table in tables))


def load_megatron(path: Path, options: ReadOptions) -> TokenTable:
    """The documents of an indexed `.bin`. Opening reads the index and a few stretches of ids.

    Raises:
        UserError: no index, a damaged index or one of another file, ids outside the vocabulary.
    """
    index_path = path.with_suffix(".idx")
    if options.eod is not None or options.dtype is not None:
        given = "eod" if options.eod is not None else "dtype"
        raise UserError(given, f"does not apply to {path}: its index {index_path.name} defines it", f"remove {given}")
    if not index_path.is_file():
        raise UserError(str(index_path), f"is missing beside {path.name}", 'put it there, or set format = "bin"')
    index = _read_index(index_path)
    _check(index, path)
    starts, lengths = _documents(index)
    tokens = np.asarray(np.memmap(path, dtype=index.dtype, mode="r"))
    return TokenTable(tokens, starts, lengths, IdBounds.of(path, options.tokenizer).check_sample(tokens))
