"""Facts about undescribed data: is it text or token ids, of which dtype, and how many ids are there?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.arrays import Ints
from trainer.data.documents import Kind, ReadOptions
from trainer.data.formats import file_kind, format_name, load_documents, takes_option
from trainer.data.layout import Stream
from trainer.data.tokenizer import IdsTokenizer, load_tokenizer
from trainer.errors import UserError
from trainer.metrics.progress_bar import Report
from trainer.tools.inspection.survey import each_stream, token_chunks

UNBOUNDED = 1 << 40  # larger than any vocabulary
PEEK_BYTES = 1 << 20
# Ids of a vocabulary below a million leave at most this in the upper half of a 32-bit word.
LARGEST_UPPER_HALF = 15


@dataclass(frozen=True)
class Guess:
    """What the files hold, in terms of `[data]` and a source.

    Args:
        kind: text to be tokenized, or token ids.
        formats: names of the formats that occur, sorted.
        dtype: of headerless files; None if there are none.
    """

    kind: Kind
    formats: tuple[str, ...]
    dtype: str | None


@dataclass(frozen=True)
class Look:
    """What reading the streams showed.

    Args:
        lengths: tokens of each document, by stream.
        largest_id: the largest token id, and how often it occurs.
    """

    lengths: list[Ints]
    largest_id: int
    largest_id_count: int


def guess(streams: Sequence[Stream], *, format: str = "auto", dtype: str | None = None) -> Guess:
    """Distinguish text from token ids by the format and first record of each stream.

    Raises:
        UserError: text is mixed with ids, or headerless files differ in dtype; or a file cannot be read.
    """
    examples: dict[Kind, str] = {}
    dtypes: dict[str, str] = {}
    formats = set()
    for stream in streams:
        path = Path(stream.path)
        name = format_name(path, format)
        formats.add(name)
        examples.setdefault(file_kind(path, name), stream.path)
        if dtype is None and takes_option(name, "dtype"):
            dtypes.setdefault(guess_dtype(_two_stretches(path), path.stat().st_size), stream.path)
    if len(examples) > 1:
        problem = f"is text, and {examples['ids']} holds token ids: a run reads only one of the two"
        raise UserError(examples["text"], problem, "name the files of one kind, with a glob in quotes")
    if len(dtypes) > 1:
        seen = ", ".join(f"{path} looks like {each}" for each, path in dtypes.items())
        raise UserError("dtype", f"differs between the files: {seen}", "give --dtype, or name the files of one dtype")
    found = dtype if any(takes_option(name, "dtype") for name in formats) else None
    return Guess(next(iter(examples)), tuple(sorted(formats)), next(iter(dtypes), found))


def _two_stretches(path: Path) -> bytes:
    """The beginning and the middle of the file, aligned to 8 bytes.

    Raises:
        UserError: the file cannot be read, or is empty.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(PEEK_BYTES)
            file.seek(max(size // 2 // 8 * 8, len(head) // 8 * 8))
            middle = file.read(PEEK_BYTES)
    except OSError as error:
        raise UserError(str(path), f"cannot be read: {error.strerror}", "check the path and its mode") from None
    if not head:
        raise UserError(str(path), "the file is empty", "remove it")
    return head[: len(head) // 8 * 8 or len(head)] + middle


def guess_dtype(sample: bytes, size: int) -> str:
    """The integer type of headerless little-endian ids: the widest whose upper bytes are as empty as those of ids.

    Args:
        sample: bytes of the file, from an offset that is a multiple of 8.
        size: bytes of the whole file, which must be a multiple of the type's size.
    """
    if size % 8 == 0 and len(sample) >= 16:
        words = np.frombuffer(sample[: len(sample) // 8 * 8], dtype="<u4")
        if not words[1::2].any() and words[0::2].max() < 1 << 24 and words[0::2].any():
            return "int64"
    if size % 4 == 0 and len(sample) >= 16:
        halves = np.frombuffer(sample[: len(sample) // 4 * 4], dtype="<u2")
        upper, lower = halves[1::2], halves[0::2]
        if upper.max() <= LARGEST_UPPER_HALF and lower.max() > LARGEST_UPPER_HALF:
            return "uint32"
    return "uint16" if size % 2 == 0 else "uint8"


def look(
    streams: Sequence[Stream],
    found: Guess,
    *,
    tokenizer: str,
    format: str = "auto",
    eod: int | None = None,
    report: Report | None = None,
) -> Look:
    """Read the streams once, for the lengths of the documents and the largest token id.

    Raises:
        UserError: a file cannot be read or is damaged.
    """
    bounded = IdsTokenizer(UNBOUNDED) if tokenizer == "ids" else load_tokenizer(tokenizer)
    options = ReadOptions(bounded, found.dtype, eod, format=format)
    lengths: list[Ints] = []
    largest, count = 0, 0
    for stream in each_stream(streams, report):
        documents = load_documents(stream.path, options)
        lengths.append(documents.lengths)
        for chunk in token_chunks(documents) if tokenizer == "ids" else ():
            top = int(chunk.max(initial=0))
            if top >= largest:
                count = int((chunk == top).sum()) + (count if top == largest else 0)
                largest = top
    return Look(lengths, largest, count)
