"""Flat arrays of token ids, memory-mapped: `.npy`, and headerless `.bin` of a given dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from trainer.arrays import Ints
from trainer.data.formats.documents import ReadOptions, TokenArray, TokenTable
from trainer.data.formats.id_bounds import IdBounds
from trainer.errors import UserError

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
