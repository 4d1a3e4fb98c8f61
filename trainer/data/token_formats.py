"""Formats that hold token ids, all memory-mapped: `.npy`, headerless `.bin`, and Megatron-LM's indexed files.

Of the last, `NAME.bin` holds the ids and `NAME.idx` the positions of the documents, all little-endian: the magic, the
version (u64, 1), the dtype code (u8), the number of sequences (u64), the number of document indices (u64), the sizes of
the sequences in tokens (i32 each), their byte offsets in the `.bin` (i64 each), and the document indices (i64 each):
document d holds the sequences from index d up to index d + 1.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from trainer.arrays import Ints
from trainer.data.documents import IdBounds, ReadOptions, TokenArray, TokenTable, damaged
from trainer.errors import UserError
from trainer.files import write_file

CHUNK = 1 << 22  # tokens scanned at a time
MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # the format has codes of floats too


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
        raise damaged(path, "has no tokens", "remove the file")
    # A plain ndarray: slicing the memmap subclass costs several times as much.
    tokens, bounds = np.asarray(mapped), IdBounds.of(path, options.tokenizer)
    if options.eod is None:
        length = np.array([len(tokens)], dtype=np.int64)
        return TokenTable(tokens, np.zeros(1, np.int64), length, bounds.check_sample(tokens))
    bounds.check_eod(options.eod)
    ends = _scan(tokens, options.eod, bounds)
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    return TokenTable(tokens, starts, ends - starts)


def load_npy(path: Path, options: ReadOptions) -> TokenTable:
    """The documents of a 1-D integer `.npy`; a document keeps its end-of-document id as its last token.

    Raises:
        UserError: not a `.npy` file, truncated, another shape or dtype, ids outside the vocabulary.
    """
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # numpy evaluates the header, so a damaged one raises anything
        raise damaged(path, f"is not a readable .npy array ({error})") from error
    is_array = isinstance(tokens, np.ndarray)  # an archive (.npz) is none
    if not is_array or tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not tokens.dtype.isnative:
        found = f"{tokens.dtype.str} of shape {tokens.shape}" if is_array else "an archive (.npz)"
        problem = f"must be a 1-D integer array, little-endian, got {found}"
        raise damaged(path, problem, "save the ids of all documents concatenated")
    return _table(path, tokens, options)


def load_bin(path: Path, options: ReadOptions) -> TokenTable:
    """The documents of a headerless array of `options.dtype`.

    Raises:
        UserError: no dtype or not an integer one, a size that is not a multiple of it, ids outside the vocabulary.
    """
    try:
        dtype = np.dtype(options.dtype or "void")
    except (TypeError, ValueError, SyntaxError):
        dtype = np.dtype("void")
    if dtype.kind not in "iu" or not dtype.isnative:
        problem = f"a headerless token file needs an integer dtype, little-endian; got {options.dtype!r}"
        raise UserError(f"{path}: dtype", problem, 'set dtype = "uint16", or the dtype that wrote the file')
    size = path.stat().st_size
    if size % dtype.itemsize:
        last = size - size % dtype.itemsize
        problem = f"ends in the middle of a token ({dtype}): the last complete one ends at byte offset {last} of {size}"
        raise damaged(path, problem, "write the file again, or set the dtype that wrote it")
    return _table(path, np.memmap(path, dtype=dtype, mode="r"), options)


def _read_index(path: Path) -> tuple[np.dtype[Any], np.ndarray, Ints, Ints]:
    """(dtype, sizes [sequences], pointers [sequences] in bytes, documents [documents + 1]) of an index."""
    with path.open("rb") as file:
        head = file.read(HEADER.size)
    if not head.startswith(MAGIC):
        raise damaged(path, f"is not a Megatron-LM index: it begins with {head[: len(MAGIC)]!r} (byte offset 0)")
    if len(head) < HEADER.size:
        raise damaged(path, f"is cut off inside its header, at byte offset {len(head)} of {HEADER.size}")
    _, version, code, num_sequences, num_indices = HEADER.unpack(head)
    if version != 1:
        raise damaged(path, f"has version {version} at byte offset 9, only 1 is known")
    if code not in DTYPES:
        raise damaged(path, f"has the dtype code {code} at byte offset 17, which is none of integers")
    mapped = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    bounds = np.cumsum([HEADER.size, 4 * num_sequences, 8 * num_sequences, 8 * num_indices]).tolist()
    if len(mapped) != bounds[-1]:
        how = "is cut off" if len(mapped) < bounds[-1] else "continues past its last table"
        raise damaged(path, f"{how}: its tables take {bounds[-1]} bytes, it has {len(mapped)}")
    kinds = ("<i4", "<i8", "<i8")
    tables = (mapped[a:b].view(kind) for a, b, kind in zip(bounds, bounds[1:], kinds, strict=False))
    return np.dtype(DTYPES[code]), *tables  # type: ignore[return-value]


def _check(index: Path, path: Path, dtype: np.dtype[Any], sizes: np.ndarray, pointers: Ints, documents: Ints) -> None:
    """Reject an index that is inconsistent, or that does not belong to the `.bin`."""
    bin_size = path.stat().st_size
    if not len(sizes) or len(documents) < 2:
        raise damaged(index, "has no documents")
    falls = np.flatnonzero(np.diff(documents) < 0)
    if documents[0] != 0 or documents[-1] != len(sizes) or len(falls):
        at = f", and decrease after index {int(falls[0])}" if len(falls) else ""
        run = f"they run from {int(documents[0])} to {int(documents[-1])}{at}"
        raise damaged(index, f"its document indices must increase from 0 to {len(sizes)}; {run}")
    ends = pointers + sizes.astype(np.int64) * dtype.itemsize
    outside = np.flatnonzero((sizes < 0) | (pointers < 0) | (pointers % dtype.itemsize != 0) | (ends > bin_size))
    if len(outside):
        lies = f"sequence {int(outside[0])} lies at bytes {int(pointers[outside[0]])} to {int(ends[outside[0]])}"
        raise damaged(index, f"{lies}, which is outside {path.name} ({bin_size} bytes of {dtype})")
    if int(ends.max()) != bin_size:
        raise damaged(index, f"its sequences end at byte {int(ends.max())}, but {path.name} has {bin_size} bytes")


def _documents(index: Path, starts: Ints, sizes: np.ndarray, documents: Ints) -> tuple[Ints, Ints]:
    """(first token, number of tokens) of each document; its sequences must be contiguous in the `.bin`."""
    if len(documents) == len(sizes) + 1 and int(np.diff(documents).min()) == 1:
        return starts, sizes.astype(np.int64)
    is_inner = np.ones(len(starts), dtype=np.bool_)  # sequences that continue a document
    is_inner[documents[:-1][documents[:-1] < len(starts)]] = False
    gaps = np.flatnonzero(is_inner[1:] & (starts[1:] != (starts + sizes)[:-1]))
    if len(gaps):
        raise damaged(index, f"sequence {int(gaps[0]) + 1} does not directly follow the previous one of its document")
    totals = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
    lengths = totals[documents[1:]] - totals[documents[:-1]]
    return starts[np.minimum(documents[:-1], len(starts) - 1)], lengths


def write_index(path: Path, lengths: Ints, dtype: np.dtype[Any]) -> None:
    """Write the index of a `.bin` whose documents, of these lengths, follow each other, one sequence each.

    Raises:
        UserError: a document is longer than the format's 32 bits can say.
    """
    code = next(code for code, name in DTYPES.items() if np.dtype(name) == dtype)
    if (longest := int(lengths.max(initial=0))) >= 1 << 31:
        raise damaged(path, f"a document of {longest:,} tokens is too long for it", "cut the document")
    pointers = (np.cumsum(lengths) - lengths) * dtype.itemsize
    header = HEADER.pack(MAGIC, 1, code, len(lengths), len(lengths) + 1)
    tables = (lengths.astype("<i4"), pointers.astype("<i8"), np.arange(len(lengths) + 1, dtype="<i8"))
    write_file(path, header + b"".join(table.tobytes() for table in tables))


def load_megatron(path: Path, options: ReadOptions) -> TokenTable:
    """The documents of an indexed `.bin`. Opening reads the index and a few stretches of ids.

    Raises:
        UserError: no index, a damaged index or one of another file, ids outside the vocabulary.
    """
    index = path.with_suffix(".idx")
    if options.eod is not None or options.dtype is not None:
        raise damaged(path, f"eod and dtype do not apply: its index {index.name} defines them", "remove them")
    if not index.is_file():
        raise damaged(index, f"is missing next to {path.name}", 'put it there, or set format = "bin"')
    dtype, sizes, pointers, documents = _read_index(index)
    _check(index, path, dtype, sizes, pointers, documents)
    starts, lengths = _documents(index, pointers // dtype.itemsize, sizes, documents)
    tokens = np.asarray(np.memmap(path, dtype=dtype, mode="r"))
    return TokenTable(tokens, starts, lengths, IdBounds.of(path, options.tokenizer).check_sample(tokens))
