"""Reads data completely: what data that nobody has described are, and which files are damaged."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path

import numpy as np

from trainer.arrays import Ints
from trainer.data.documents import Kind, ReadOptions, TokenArray, TokenTable
from trainer.data.formats import file_kind, format_name, load_documents, takes_option
from trainer.data.layout import Stream
from trainer.data.tokenizer import IdsTokenizer, load_tokenizer
from trainer.errors import UserError
from trainer.metrics.logger import Report, silent
from trainer.tools.corpus.documents import why_not_text
from trainer.tools.corpus.writer import MANIFEST_NAME, StreamEntry, read_manifest
from trainer.wording import counted, few

CHUNK = 1 << 20  # tokens counted together
UNBOUNDED = 1 << 40  # larger than any vocabulary
AGAIN = "build the corpus again, or remove manifest.json"


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


@dataclass(frozen=True)
class Guess:
    """The content of the files in terms of `[data]` and a source."""

    kind: Kind
    formats: tuple[str, ...]  # names of those that occur, sorted


def guess(
    streams: Sequence[Stream], *, format: str = "auto", dtype: str | None = None, column: str | None = None
) -> Guess:
    """Distinguish text from token ids by the format and first record of each stream.
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
    return Guess(next(iter(examples)), tuple(sorted(formats)))


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


@dataclass(frozen=True)
class Verification:
    """The result of reading everything."""

    streams: int
    documents: int
    tokens: int
    errors: list[UserError]  # one per damaged file
    is_hashed: bool  # hashes of a manifest were compared
    not_text: list[str]  # as of `not_text`


def verify(
    streams: Sequence[Stream], options: ReadOptions, *, root: Path | None = None, report: Report = silent
) -> Verification:
    """Read every stream completely.

    Args:
        streams: from `discover_nested` or `discover_direct`.
        options: how files are read.
        root: of a NESTED layout; if it has a corpus manifest, hashes are compared too.
        report: see `each_stream`.

    Raises:
        UserError: the manifest itself is damaged. Damaged streams are in the result.
    """
    has_hashes = root is not None and (root / MANIFEST_NAME).exists()
    entries = read_manifest(root).entries if root is not None and has_hashes else {}
    errors: list[UserError] = []
    strange: list[str] = []
    num_documents = num_tokens = 0
    for stream in each_stream(streams, report):
        try:
            if has_hashes:
                _compare(Path(stream.path), entries.pop(stream.relative_path, None))
            documents = load_documents(stream.path, options)
            num_tokens += sum(len(chunk) for chunk in token_chunks(documents))
            num_documents += documents.num_documents
            strange += not_text([stream], options.format)
        except UserError as error:
            errors.append(error)
        except OSError as error:
            problem = f"cannot be read ({error.strerror or error})"
            errors.append(UserError(stream.path, problem, "check the file"))
    problem = f"is in {MANIFEST_NAME}, but not here"
    errors += [UserError(f"{root}/{path}", problem, AGAIN) for path in sorted(entries)]
    return Verification(len(streams), num_documents, num_tokens, errors, has_hashes, strange)


def _compare(path: Path, entry: StreamEntry | None) -> None:
    """Raise UserError unless the file matches the manifest."""
    if entry is None:
        raise UserError(str(path), f"is not in {MANIFEST_NAME}", AGAIN)
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
            raise UserError(str(path), f"differs from what {MANIFEST_NAME} says", AGAIN)


def not_text(streams: Sequence[Stream], format: str) -> list[str]:
    """`FILE (why)` of each stream that is read as plain text and is not UTF-8 text, which the bytes
    tokenizer would not notice.
    `format`: as `data.source.format`.
    Raises OSError: a file cannot be read."""
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
