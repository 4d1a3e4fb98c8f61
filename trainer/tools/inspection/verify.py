"""Reads everything once, to find damaged files, and text that is not UTF-8, before a run does."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path

from trainer.data.documents import ReadOptions
from trainer.data.formats import format_name, load_documents
from trainer.data.layout import Stream
from trainer.errors import UserError
from trainer.metrics.progress_bar import Report, silent
from trainer.tools.corpus.documents import why_not_text
from trainer.tools.corpus.writer import MANIFEST_NAME, StreamEntry, read_manifest
from trainer.tools.inspection.survey import each_stream, token_chunks
from trainer.wording import counted, few

AGAIN = "build the corpus again, or remove manifest.json"


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
            errors.append(UserError(stream.path, f"cannot be read ({error.strerror or error})", "check the file"))
    errors += [UserError(f"{root}/{path}", f"is in {MANIFEST_NAME}, but not here", AGAIN) for path in sorted(entries)]
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
                if why := why_not_text(content):
                    found.append(f"{stream.relative_path} ({why})")
    return found


def describe(found: Sequence[str], num_files: int) -> str:
    """A sentence on what `not_text` found among so many files, and what to do."""
    verb = "is" if len(found) == 1 else "are"
    what = f"{len(found):,} of {counted(num_files, 'file')} {verb} not UTF-8 text"
    fix = "convert to UTF-8, or copy the other files with train data build text, which skips such ones"
    return f"{what}: {few(found)}; a run would read the bytes as they are; {fix}"
