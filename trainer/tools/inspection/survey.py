"""Reads data that nobody has described: text or token ids, dtype, lengths and largest id."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.arrays import Ints
from trainer.data.documents import Kind, ReadOptions, TokenArray, TokenTable
from trainer.data.formats import file_kind, format_name, load_documents, takes_option
from trainer.data.layout import Stream
from trainer.data.tokenizer import IdsTokenizer, load_tokenizer
from trainer.errors import UserError
from trainer.metrics.progress_bar import Report, silent

CHUNK = 1 << 20  # tokens counted together
UNBOUNDED = 1 << 40  # larger than any vocabulary
PEEK_BYTES = 1 << 20
# Ids of a vocabulary below a million leave at most this in the upper half of a 32-bit word.
LARGEST_UPPER_HALF = 15


def each_stream(streams: Sequence[Stream], report: Report) -> Iterator[Stream]:
    """The streams, reporting (streams done, streams, the next path) on the way."""
    for number, stream in enumerate(streams):
        report(number, len(streams), stream.relative_path)
        yield stream
    report(len(streams), len(streams), "done")


def token_chunks(documents: TokenTable) -> Iterator[TokenArray]:
    """Every token of every document once, in chunks of whole or partial documents.
    Raises UserError: the file is damaged."""
    waiting: list[TokenArray] = []
    num_waiting = 0
    for document, length in enumerate(documents.lengths.tolist()):
        for start in range(0, length, CHUNK):
            waiting.append(documents.read(document, start, min(start + CHUNK, length)))
            num_waiting += len(waiting[-1])
            if num_waiting >= CHUNK:
                yield np.concatenate(waiting)
                waiting, num_waiting = [], 0
    if waiting:
        yield np.concatenate(waiting)


@dataclass(frozen=True)
class Guess:
    """The content of the files in terms of `[data]` and a source."""

    kind: Kind
    formats: tuple[str, ...]  # names of those that occur, sorted
    dtype: str | None  # of headerless files; None if there are none


def guess(
    streams: Sequence[Stream], *, format: str = "auto", dtype: str | None = None, column: str | None = None
) -> Guess:
    """Distinguish text from token ids by the format and first record of each stream.
    Raises UserError: text is mixed with ids, or headerless files differ in dtype; or a file cannot
    be read."""
    examples: dict[Kind, str] = {}
    dtypes: dict[str, str] = {}
    formats = set()
    for stream in streams:
        path = Path(stream.path)
        name = format_name(path, format)
        formats.add(name)
        examples.setdefault(file_kind(path, name, column), stream.path)
        if takes_option(name, "dtype"):
            dtypes.setdefault(dtype or _dtype_of(path), stream.path)
    if len(examples) > 1:
        problem = f"is text, and {examples['ids']} holds token ids: a run reads only one of the two"
        raise UserError(examples["text"], problem, "name the files of one kind, with a glob in quotes")
    if len(dtypes) > 1:
        seen = ", ".join(f"{path} looks like {each}" for each, path in dtypes.items())
        raise UserError("dtype", f"differs between the files: {seen}", "give --dtype, or name the files of one dtype")
    return Guess(next(iter(examples)), tuple(sorted(formats)), next(iter(dtypes), None))


def _dtype_of(path: Path) -> str:
    """The dtype of a headerless file, by its beginning and its middle."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            sample = file.read(PEEK_BYTES)
            if size > 2 * PEEK_BYTES:
                file.seek(size // 16 * 8)
                sample += file.read(PEEK_BYTES)
    except OSError as error:
        raise UserError(str(path), f"cannot be read: {error.strerror}", "check the path and its mode") from None
    return guess_dtype(sample, size)


def guess_dtype(sample: bytes, size: int) -> str:
    """The integer type of headerless little-endian ids: the widest whose upper bytes are as empty
    as those of ids.
    `sample`: bytes of the file, from an offset that is a multiple of 8. `size`: bytes of the whole
    file, which must be a multiple of the type's size."""
    if size % 8 == 0 and len(sample) >= 16:
        # The upper half of each int64 is 0, unless ids are beyond any vocabulary.
        words = np.frombuffer(sample[: len(sample) // 8 * 8], dtype="<u4")
        if not words[1::2].any() and words[0::2].max() < 1 << 24 and words[0::2].any():
            return "int64"
    if size % 4 == 0 and len(sample) >= 16:
        halves = np.frombuffer(sample[: len(sample) // 4 * 4], dtype="<u2")
        upper, lower = halves[1::2], halves[0::2]
        if upper.max() <= LARGEST_UPPER_HALF and lower.max() > LARGEST_UPPER_HALF:
            return "uint32"
    if size % 2 == 0:
        return "uint16"
    return "uint8"


def look(
    streams: Sequence[Stream],
    found: Guess,
    *,
    tokenizer: str,
    format: str = "auto",
    eod: int | None = None,
    column: str | None = None,
    report: Report = silent,
) -> tuple[list[Ints], tuple[int, int]]:
    """Read the streams once: the tokens of each document, by stream; and the largest token id, and
    how often it occurs.
    Raises UserError: a file cannot be read or is damaged."""
    bounded = IdsTokenizer(UNBOUNDED) if tokenizer == "ids" else load_tokenizer(tokenizer)
    options = ReadOptions(bounded, found.dtype, eod, format=format, column=column)
    lengths: list[Ints] = []
    largest, count = 0, 0
    for stream in each_stream(streams, report):
        documents = load_documents(stream.path, options)
        lengths.append(documents.lengths)
        if tokenizer != "ids":  # a tokenizer has a vocabulary of its own
            continue
        for chunk in token_chunks(documents):
            top = int(chunk.max(initial=0))
            if top > largest:
                largest, count = top, 0
            count += int((chunk == largest).sum())
    return lengths, (largest, count)
