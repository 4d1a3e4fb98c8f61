"""Flat arrays of token ids, mapped from the disk: `.npy`, and headerless `.bin` of a given dtype."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trainer.data.documents import ReadOptions, TokenArray, TokenTable
from trainer.data.keyed import IntArray
from trainer.errors import UserError

CHUNK = 1 << 22  # tokens looked at together while a file is scanned


def _scan(path: Path, tokens: TokenArray, options: ReadOptions) -> IntArray:
    """Check every id against the vocabulary, and return where documents end (behind each end-of-document id)."""
    size, ends = options.tokenizer.vocab_size, []
    for start in range(0, len(tokens), CHUNK):
        chunk = tokens[start : start + CHUNK]
        if int(chunk.max()) >= size or int(chunk.min()) < 0:
            at = start + int(np.flatnonzero((chunk < 0) | (chunk >= size))[0])
            raise UserError(
                str(path),
                f"token id {int(tokens[at])} at token {at} is outside the vocabulary of {size} ids "
                f"({options.tokenizer.name}, dtype {tokens.dtype})",
                "use the tokenizer and dtype that made the file",
            )
        if options.eod is not None:
            ends.append(np.flatnonzero(chunk == options.eod) + (start + 1))
    found = np.concatenate(ends).astype(np.int64) if ends else np.empty(0, np.int64)
    return found if len(found) and found[-1] == len(tokens) else np.append(found, len(tokens))


def _table(path: Path, tokens: TokenArray, options: ReadOptions) -> TokenTable:
    if not len(tokens):
        raise UserError(str(path), "has no tokens", "remove the file")
    ends = _scan(path, tokens, options)
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
    # As a plain ndarray: slicing the memmap subclass costs several times as much.
    return TokenTable(np.asarray(tokens), starts, ends - starts)


def load_npy(path: Path, options: ReadOptions) -> TokenTable:
    """The documents of a 1-D integer `.npy`; a document keeps its end-of-document id as its last token.

    Raises:
        UserError: no `.npy` file, truncated, another shape or dtype, ids beyond the vocabulary.
    """
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise UserError(str(path), f"is not a readable .npy array ({error})", "write the file again") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise UserError(
            str(path),
            f"must be a 1-D array of whole numbers, got {tokens.dtype} of shape {tokens.shape}",
            "save the ids of all documents one after another",
        )
    return _table(path, tokens, options)


def load_bin(path: Path, options: ReadOptions) -> TokenTable:
    """The documents of a headerless array of `options.dtype`.

    Raises:
        UserError: no or no integer dtype, a size that is not a multiple of it, ids beyond the vocabulary.
    """
    if options.dtype is None:
        raise UserError(str(path), "a headerless token file needs a dtype", 'set dtype = "uint16", or what wrote it')
    try:
        dtype = np.dtype(options.dtype)
    except TypeError as error:
        raise UserError("dtype", f"no such dtype: {options.dtype!r}", 'set it to "uint16", for example') from error
    if dtype.kind not in "iu":
        raise UserError("dtype", f"must be a dtype of whole numbers, got {dtype}")
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise UserError(
            str(path),
            f"ends in the middle of a token: {size} bytes are no multiple of {dtype.itemsize} ({dtype}), "
            f"the last whole token ends at byte offset {size - size % dtype.itemsize}",
            "write the file again, or set the dtype that wrote it",
        )
    return _table(path, np.memmap(path, dtype=dtype, mode="r"), options)
