"""Looks at data that nobody has described: which files, of what kind, and which are damaged."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from mmap import ACCESS_READ, mmap
from pathlib import Path

import numpy as np

from trainer.arrays import Ints
from trainer.data.documents import Kind, ReadOptions, TokenArray, TokenTable
from trainer.data.formats import file_kind, format_name, load_documents, takes_option
from trainer.data.layout import (
    Discovery,
    Stream,
    discover_direct,
    discover_nested,
    loose_files,
    refuse_empty_files,
    sort_of,
)
from trainer.data.tokenizer import IdsTokenizer, load_tokenizer
from trainer.errors import UserError
from trainer.metrics.logger import Report, silent
from trainer.tools.corpora import why_not_text
from trainer.wording import counted, few

CHUNK = 1 << 20  # tokens counted together
UNBOUNDED = 1 << 40  # larger than any vocabulary


def each_stream(streams: Sequence[Stream], report: Report) -> Iterator[Stream]:
    """The streams, reporting (streams done, streams, the next path) on the way."""
    for number, stream in enumerate(streams):
        report(number, len(streams), stream.relative_path)
        yield stream
    report(len(streams), len(streams), "done")


def token_chunks(documents: TokenTable) -> Iterator[TokenArray]:
    """Every token of every document, in chunks. Raises UserError: the file is damaged."""
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


def guess(
    streams: Sequence[Stream], *, format: str = "auto", dtype: str | None = None, column: str | None = None
) -> tuple[Kind, list[str]]:
    """Whether the files hold text or token ids, by the format and first record of each; their formats.
    Raises UserError: text is mixed with ids, a headerless file has no dtype, or it cannot be read."""
    examples: dict[Kind, str] = {}
    formats = set()
    for stream in streams:
        path = Path(stream.path)
        name = format_name(path, format)
        formats.add(name)
        examples.setdefault(file_kind(path, name, column), stream.path)
        if takes_option(name, "dtype") and dtype is None:
            problem = f"does not follow from {stream.path}, which has no header"
            raise UserError("dtype", problem, "give the type of its ids, such as --dtype uint16")
    if len(examples) > 1:
        problem = f"is text, and {examples['ids']} holds token ids: a run reads only one of the two"
        raise UserError(examples["text"], problem, "name the files of one kind, with a glob in quotes")
    return next(iter(examples)), sorted(formats)


def look(
    streams: Sequence[Stream],
    *,
    tokenizer: str,
    format: str = "auto",
    dtype: str | None = None,
    eod: int | None = None,
    column: str | None = None,
    report: Report = silent,
) -> tuple[list[Ints], tuple[int, int]]:
    """Read the streams once: tokens of each document, by stream; the largest id and its count.
    Raises UserError: a file cannot be read or is damaged."""
    bounded = IdsTokenizer(UNBOUNDED) if tokenizer == "ids" else load_tokenizer(tokenizer)
    options = ReadOptions(bounded, dtype, eod, format=format, column=column)
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


def verify(
    streams: Sequence[Stream], options: ReadOptions, *, report: Report = silent
) -> tuple[int, int, list[UserError]]:
    """Read every stream completely: the documents, their tokens, and an error for each damaged file."""
    errors: list[UserError] = []
    num_documents = num_tokens = 0
    for stream in each_stream(streams, report):
        try:
            documents = load_documents(stream.path, options)
            num_tokens += sum(len(chunk) for chunk in token_chunks(documents))
            num_documents += documents.num_documents
        except UserError as error:
            errors.append(error)
    return num_documents, num_tokens, errors


def not_text(streams: Sequence[Stream], format: str) -> list[str]:
    """`FILE (why)` of each stream that is read as plain text and is not UTF-8 text, which the bytes
    tokenizer would not notice. `format`: as `data.source.format`."""
    found = []
    for stream in streams:
        if format_name(Path(stream.path), format) == "text":
            with open(stream.path, "rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
                why = why_not_text(content)
            if why:
                found.append(f"{stream.relative_path} ({why})")
    return found


def describe(found: Sequence[str], num_files: int) -> str:
    """A sentence on what `not_text` found among so many files, and what to do."""
    verb = "is" if len(found) == 1 else "are"
    what = f"{len(found):,} of {counted(num_files, 'file')} {verb} not UTF-8 text"
    fix = "convert to UTF-8, or copy the other files with train data build text, which skips such ones"
    return f"{what}: {few(found)}; a run would read the bytes as they are; {fix}"


def discover(paths: Sequence[str], *, format: str = "auto") -> Discovery:
    """A single directory with one directory per modality is NESTED; anything else is DIRECT."""
    directory = Path(paths[0])
    if len(paths) > 1 or not directory.is_dir():
        return Discovery("direct", discover_direct(paths, format=format), paths=tuple(paths))
    try:
        streams = discover_nested(directory, format=format)
        loose = tuple(loose_files(directory, format))
        return Discovery("nested", streams, root=paths[0], left_out=loose)
    except UserError:
        files = [Path(path.name) for path in directory.iterdir() if path.is_file()]
        if not any(sort_of(name, format) == "data" for name in files):
            raise
        pattern = os.path.join(glob.escape(paths[0]), "*")
        return Discovery("direct", discover_direct([pattern], format=format), paths=(pattern,))


def refuse_empty(streams: Sequence[Stream]) -> None:
    """Refuse streams of empty files, all of them at once."""
    paths = [stream.path for stream in streams if os.path.isfile(stream.path)]
    refuse_empty_files([path for path in paths if not os.path.getsize(path)], len(streams))
