"""Reading everything once, to find damaged files before a run does."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer.data.documents import ReadOptions
from trainer.data.formats import load_documents
from trainer.data.layout import Stream
from trainer.errors import UserError
from trainer.metrics.progress_bar import Report
from trainer.tools.corpus.manifest import MANIFEST_NAME, StreamEntry, read_manifest
from trainer.tools.inspection.encoding import not_text
from trainer.tools.inspection.survey import each_stream, token_chunks


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


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _compare(path: Path, entry: StreamEntry | None) -> None:
    """Raise UserError unless the file matches the manifest."""
    again = "build the corpus again, or remove manifest.json"
    if entry is None:
        raise UserError(str(path), f"is not in {MANIFEST_NAME}", again)
    try:
        size = path.stat().st_size
        found = _sha256(path) if size == entry.file_bytes else ""
    except OSError as error:
        raise UserError(str(path), f"cannot be read ({error.strerror or error})", again) from error
    if size != entry.file_bytes:
        raise UserError(str(path), f"has {size} bytes, {MANIFEST_NAME} says {entry.file_bytes}", again)
    if found != entry.sha256:
        raise UserError(str(path), f"its sha256 is {found}, {MANIFEST_NAME} says {entry.sha256}", again)


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
    absent = f"is in {MANIFEST_NAME}, but not here"
    errors += [UserError(f"{root}/{path}", absent, "build the corpus again") for path in sorted(entries or ())]
    return Verification(len(streams), num_documents, num_tokens, errors, entries is not None, strange)
