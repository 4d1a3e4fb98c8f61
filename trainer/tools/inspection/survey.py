"""Facts about data: documents, tokens, groups and cells by stream, how often each id occurs; and, if nobody says how to read
files, whether they hold text or token ids, and of which dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from trainer.arrays import Ints
from trainer.data.documents import Kind, ReadOptions, TokenArray, TokenTable
from trainer.data.formats import file_kind, format_name, load_documents, takes_option
from trainer.data.groups import CutOptions, build_groups
from trainer.data.layout import Stream
from trainer.data.tokenizer import IdsTokenizer, Tokenizer, load_tokenizer
from trainer.errors import UserError
from trainer.metrics.progress_bar import Report

CHUNK = 1 << 20  # tokens counted together
UNBOUNDED = 1 << 40  # larger than any vocabulary
PEEK_BYTES = 1 << 20
# Ids of a vocabulary below a million leave at most this in the upper half of a 32-bit word.
LARGEST_UPPER_HALF = 15


@dataclass(frozen=True)
class StreamFacts:
    """Counts of one stream. `empty_documents` have no token and are never read; `packed_cells`: if documents shared cells."""

    stream: str
    modality: str
    format: str
    documents: int
    empty_documents: int
    tokens: int
    groups: int
    cells: int
    packed_cells: int


@dataclass(frozen=True)
class Survey:
    """Counts of a list of streams.

    Args:
        streams: one entry per stream.
        counts: how often each id occurs, int64 [vocab_size].
    """

    streams: list[StreamFacts]
    counts: Ints = field(repr=False)

    def total(self, seq_len: int, modality: str | None = None) -> dict[str, float]:
        """Sums over one modality, or over all, and the padding as a share of the cells' tokens."""
        chosen = [facts for facts in self.streams if modality in (None, facts.modality)]
        names = ("documents", "empty_documents", "tokens", "groups", "cells", "packed_cells")
        totals: dict[str, float] = {"streams": len(chosen)}
        totals |= {name: sum(getattr(facts, name) for facts in chosen) for name in names}
        for kind in ("", "packed_"):
            tokens = totals[f"{kind}cells"] * seq_len
            totals[f"{kind}padding_share"] = 1.0 - totals["tokens"] / tokens if tokens else 0.0
        return totals

    @property
    def modalities(self) -> list[str]:
        """All labels, sorted."""
        return sorted({facts.modality for facts in self.streams})

    def type_counts(self, tokenizer: Tokenizer) -> dict[str, int]:
        """Tokens of each type; empty if the tokenizer has none."""
        table = tokenizer.token_type_table
        if table is None:
            return {}
        by_type = np.bincount(table, weights=self.counts, minlength=len(tokenizer.token_type_names))
        return dict(zip(tokenizer.token_type_names, by_type.astype(np.int64).tolist(), strict=True))

    def top_ids(self, number: int) -> list[tuple[int, int]]:
        """(id, occurrences) of the most frequent ids; ties in ascending order of id."""
        order = np.argsort(-self.counts, kind="stable")[:number]
        return [(int(i), int(self.counts[i])) for i in order if self.counts[i]]


def each_stream(streams: Sequence[Stream], report: Report | None) -> Iterator[Stream]:
    """The streams, reporting (streams done, streams, the next path) on the way."""
    for number, stream in enumerate(streams):
        if report is not None:
            report(number, len(streams), stream.relative_path)
        yield stream
    if report is not None:
        report(len(streams), len(streams), "done")


def token_chunks(documents: TokenTable) -> Iterator[TokenArray]:
    """Every token of every document once, in chunks of whole or partial documents.

    Raises:
        UserError: the file is damaged.
    """
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


def survey(
    streams: Sequence[Stream],
    options: ReadOptions,
    cut: CutOptions,
    *,
    report: Report | None = None,
) -> Survey:
    """Read every stream once and count.

    Args:
        streams: from `discover_nested` or `discover_direct`.
        options, cut: how files are read and documents would be cut.
        report: see `each_stream`.

    Raises:
        UserError: for the first file that is unreadable or damaged.
    """
    found = []
    counts = np.zeros(options.tokenizer.vocab_size, dtype=np.int64)
    for stream in each_stream(streams, report):
        documents = load_documents(stream.path, options)
        lengths = documents.lengths
        plain, packed = (
            build_groups(lengths, np.arange(len(lengths)), stream.relative_path, replace(cut, pack=pack))
            for pack in (False, True)
        )
        for chunk in token_chunks(documents):
            counts += np.bincount(chunk.astype(np.intp, copy=False), minlength=len(counts))
        facts = StreamFacts(
            stream=stream.relative_path,
            modality=stream.modality,
            format=format_name(Path(stream.path), options.format),
            documents=len(lengths),
            empty_documents=int((lengths == 0).sum()),
            tokens=int(lengths.sum()),
            groups=plain.num_groups,
            cells=int(plain.cell_offsets[-1]),
            packed_cells=int(packed.cell_offsets[-1]),
        )
        found.append(facts)
    return Survey(found, counts)


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
    """The dtype of a headerless file, by its beginning and its middle.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(PEEK_BYTES)
            file.seek(max(size // 2 // 8 * 8, len(head) // 8 * 8))
            middle = file.read(PEEK_BYTES)
    except OSError as error:
        raise UserError(str(path), f"cannot be read: {error.strerror}", "check the path and its mode") from None
    return guess_dtype(head[: len(head) // 8 * 8 or len(head)] + middle, size)


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
