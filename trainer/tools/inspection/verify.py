"""Reading everything once, to find damaged files before a run does, and files of a text format that are not UTF-8 text."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer.data.documents import ReadOptions
from trainer.data.formats import format_name, load_documents
from trainer.data.layout import Stream
from trainer.errors import UserError
from trainer.metrics.progress_bar import Report
from trainer.tools.corpus.writer import MANIFEST_NAME, StreamEntry, read_manifest
from trainer.tools.inspection.survey import each_stream, token_chunks
from trainer.wording import counted, few

CHUNK_BYTES = 1 << 20
AGAIN = "build the corpus again, or remove manifest.json"


@dataclass(frozen=True)
class Verification:
    """What was read, and one error per damaged file; `is_hashed`: hashes of a manifest were compared.

    `not_text` has the files of a text format that are not UTF-8 text, with the reason; the bytes tokenizer reads them.
    """

    streams: int
    documents: int
    tokens: int
    errors: list[UserError]
    is_hashed: bool
    not_text: list[str] = field(default_factory=list)


def verify(
    streams: Sequence[Stream],
    options: ReadOptions,
    *,
    root: Path | None = None,
    report: Report | None = None,
) -> Verification:
    """Read every stream completely.

    Args:
        streams: from `discover_nested` or `discover_direct`.
        options: how files are read.
        root: of a NESTED layout; if it has a corpus manifest, sizes and hashes are compared too.
        report: see `each_stream`.

    Raises:
        UserError: the manifest itself is damaged. Damaged streams are in the result.
    """
    entries: dict[str, StreamEntry] | None = None
    if root is not None and (root / MANIFEST_NAME).exists():
        manifest = read_manifest(root)
        entries = {entry.path: entry for each in manifest.modalities.values() for entry in each}
    errors: list[UserError] = []
    strange: list[str] = []
    num_documents = num_tokens = 0
    for stream in each_stream(streams, report):
        try:
            if entries is not None:
                _compare(Path(stream.path), entries.pop(stream.relative_path, None))
            documents = load_documents(stream.path, options)
            num_tokens += sum(len(chunk) for chunk in token_chunks(documents))
            num_documents += documents.num_documents
            strange += not_text([stream], options.format)
        except UserError as error:
            errors.append(error)
        except OSError as error:
            errors.append(UserError(stream.path, f"cannot be read ({error.strerror or error})", "check the file"))
    errors += [
        UserError(f"{root}/{path}", f"is in {MANIFEST_NAME}, but not here", AGAIN) for path in sorted(entries or ())
    ]
    return Verification(len(streams), num_documents, num_tokens, errors, entries is not None, strange)


def _compare(path: Path, entry: StreamEntry | None) -> None:
    """Raise UserError unless the file matches the manifest."""
    found = ""
    if entry is not None:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    if entry is None or found != entry.sha256:
        raise UserError(
            str(path), f"differs from what {MANIFEST_NAME} says" if entry else f"is not in {MANIFEST_NAME}", AGAIN
        )


def why_not_text(path: Path) -> str:
    """Why the file is not UTF-8 text, by its first wrong byte; empty if it is.

    Raises:
        OSError: it cannot be read.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = 0  # of the chunk
    with path.open("rb") as file:
        while True:
            chunk = file.read(CHUNK_BYTES)
            begun = len(decoder.getstate()[0])  # bytes of a character that the last chunk cut
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                return f"not UTF-8: byte {error.object[error.start]:#04x} at offset {position - begun + error.start}"
            if "\0" in text:
                return f"binary: a NUL byte at offset {position + chunk.index(0)}"
            if not chunk:
                return ""
            position += len(chunk)


def not_text(streams: Sequence[Stream], format: str) -> list[str]:
    """`FILE (why)` of each stream that is read as plain text and is not UTF-8 text, which the bytes tokenizer would not notice.

    Args:
        format: as `data.source.format`.

    Raises:
        OSError: a file cannot be read.
    """
    return [
        f"{stream.relative_path} ({why})"
        for stream in streams
        if format_name(Path(stream.path), format) == "text" and (why := why_not_text(Path(stream.path)))
    ]


def describe(found: Sequence[str], num_files: int) -> str:
    """A sentence on what `not_text` found among so many files, and what to do."""
    what = f"{len(found):,} of {counted(num_files, 'file')} {'is' if len(found) == 1 else 'are'} not UTF-8 text"
    fix = "convert to UTF-8, or copy the other files with train data build text, which skips such ones"
    return f"{what}: {few(found)}; a run would read the bytes as they are; {fix}"
