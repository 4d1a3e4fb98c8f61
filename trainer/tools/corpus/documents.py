"""Documents before they are written: found and checked, known by size and digest, with the text left on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from trainer.data.text_formats import text_of
from trainer.metrics.progress_bar import Report
from trainer.tools.corpus.manifest import SAME_TEXT, Skipped


@dataclass(frozen=True)
class Line:
    """A line of a JSON lines file, left on disk: such files may be larger than memory.

    Args:
        number: of the line, from 1.
        start, num_bytes: where it lies in the file.
    """

    path: Path
    number: int
    start: int
    num_bytes: int

    def text(self) -> str:
        """Its field `text`.

        Raises:
            UserError: it is not such a line.
            OSError: the file cannot be read.
        """
        with self.path.open("rb") as file:
            file.seek(self.start)
            return text_of(file.read(self.num_bytes), f"{self.path}: line {self.number}")


Origin: TypeAlias = Path | Line | str
"""A file, a line of one, or the text itself."""


@dataclass(frozen=True)
class Candidate:
    """A potential document."""

    source: str
    """Its origin relative to its package or root, with forward slashes; the directory determines the stream."""
    origin: Origin


@dataclass(frozen=True)
class Document:
    """A candidate that passed: size and digest of its text as UTF-8."""

    source: str
    origin: Origin
    num_bytes: int
    digest: str

    def text(self) -> str:
        """Read the text (again)."""
        return _raw(self.origin).decode("utf-8-sig")


def _raw(origin: Origin) -> bytes:
    if isinstance(origin, Path):
        return origin.read_bytes()
    return (origin if isinstance(origin, str) else origin.text()).encode("utf-8", "surrogatepass")


def _size(origin: Origin) -> int:
    if isinstance(origin, Path):
        return origin.stat().st_size
    return len(origin) if isinstance(origin, str) else origin.num_bytes


def check(candidate: Candidate, *, max_bytes: int, forbidden: Iterable[str] = ()) -> Document | Skipped:
    """Read a candidate once and check that it is text.

    Args:
        candidate: what to read.
        max_bytes: a larger file or line is skipped unread.
        forbidden: strings that must not enter the corpus, such as absolute paths of this machine.

    Raises:
        UserError: a line of a JSON lines file is damaged.
    """
    try:
        size = _size(candidate.origin)
        if size > max_bytes:
            return Skipped(candidate.source, f"{size} bytes, more than the limit of {max_bytes}")
        text = _raw(candidate.origin).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return Skipped(candidate.source, f"not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}")
    except OSError as error:
        return Skipped(candidate.source, f"cannot be read: {error.strerror or type(error).__name__}")
    if "\0" in text:
        return Skipped(candidate.source, f"binary: a NUL character at offset {text.index(chr(0))}")
    if not text.strip():
        return Skipped(candidate.source, "empty")
    if any(word in text for word in forbidden):
        return Skipped(candidate.source, "holds an absolute path of this machine")
    encoded = text.encode("utf-8")
    return Document(candidate.source, candidate.origin, len(encoded), hashlib.sha256(encoded).hexdigest())


def check_all(
    candidates: Iterable[Candidate],
    *,
    what: str,
    max_bytes: int,
    forbidden: Iterable[str] = (),
    progress: Report | None = None,
) -> tuple[list[Document], list[Skipped]]:
    """Check the candidates of the modality `what`, sorted by source, and skip all but the first of exact duplicates."""
    ordered = sorted(candidates, key=lambda candidate: candidate.source)
    words = tuple(forbidden)
    documents: list[Document] = []
    skipped: list[Skipped] = []
    first_source: dict[str, str] = {}
    for done, candidate in enumerate(ordered):
        if progress is not None and done % 100 == 0:
            progress(done, len(ordered), f"reading {what}")
        result = check(candidate, max_bytes=max_bytes, forbidden=words)
        if isinstance(result, Document) and result.digest in first_source:
            result = Skipped(result.source, f"{SAME_TEXT}{first_source[result.digest]}")
        if isinstance(result, Skipped):
            skipped.append(Skipped(f"{what}/{result.source}", result.reason))
            continue
        first_source[result.digest] = result.source
        documents.append(result)
    return documents, skipped
