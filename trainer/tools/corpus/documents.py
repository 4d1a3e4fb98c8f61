"""Documents before they are written: found and checked, with their text left on disk."""

from __future__ import annotations

import codecs
import glob
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path, PurePosixPath

from trainer.data.documents import damaged
from trainer.data.layout import (
    Discovery,
    Stream,
    discover_direct,
    discover_nested,
    loose_files,
    refuse_empty_files,
    sort_of,
)
from trainer.data.text_formats import document_of
from trainer.errors import UserError
from trainer.metrics.logger import Report, silent

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Skipped:
    """A candidate that was not used, and why."""

    source: str
    reason: str


@dataclass(frozen=True)
class Candidate:
    # Its origin below its package or root, with forward slashes; the directory gives the stream.
    source: str
    size: Callable[[], int]  # the bytes to read at most, without reading them
    read: Callable[[], bytes]


def of_file(source: str, path: Path) -> Candidate:
    return Candidate(source, lambda: path.stat().st_size, path.read_bytes)


def of_text(source: str, text: str) -> Candidate:
    return Candidate(source, lambda: len(text), lambda: text.encode("utf-8", "surrogatepass"))


def of_lines(source: str, path: Path) -> list[Candidate]:
    """The lines of a JSON lines file, left on disk: it may be larger than memory.

    Reading one raises UserError if it is damaged or holds token ids.

    Raises:
        OSError: the file cannot be read.
    """
    places, start = [], 0
    with path.open("rb") as lines:
        for number, text in enumerate(lines, start=1):
            if text.strip():
                places.append((number, start, len(text)))
            start += len(text)
    width = len(str(places[-1][0])) if places else 0  # sources sort as the lines

    def line(number: int, start: int, num_bytes: int) -> Candidate:
        def read() -> bytes:
            with path.open("rb") as file:
                file.seek(start)
                text = _text_of(file.read(num_bytes), f"{path}: line {number}")
                return text.encode("utf-8", "surrogatepass")

        return Candidate(f"{source}:{number:0{width}d}", lambda: num_bytes, read)

    return [line(*place) for place in places]


def _text_of(line: bytes, where: str) -> str:
    """The text of one line."""
    text = document_of(line, where)
    if not isinstance(text, str):
        fix = "leave the file out: a run reads it as it is"
        raise damaged(where, "holds token ids, not text", fix)
    return text


@dataclass(frozen=True)
class Document:
    """A candidate that passed: size and digest of its text as UTF-8."""

    source: str
    read: Callable[[], bytes]
    num_bytes: int
    digest: str

    def text(self) -> str:
        """Read the text (again)."""
        return self.read().decode("utf-8-sig")


def document(candidate: Candidate, text: str) -> Document:
    """The document that a candidate with this text is."""
    encoded = text.encode("utf-8")
    digest = hashlib.sha256(encoded).hexdigest()
    return Document(candidate.source, candidate.read, len(encoded), digest)


def why_not_text(content: bytes | mmap) -> str:
    """Why it is not UTF-8 text, by its first wrong byte; empty if it is."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(content), CHUNK_BYTES):
        chunk = content[start : start + CHUNK_BYTES]
        try:
            text = decoder.decode(chunk, final=start + len(chunk) == len(content))
        except UnicodeDecodeError as error:  # of the chunk, and the rest of a character before it
            offset = start + len(chunk) - len(error.object) + error.start
            return f"not UTF-8: byte {error.object[error.start]:#04x} at offset {offset}"
        if "\0" in text:
            return f"binary: a NUL byte at offset {start + chunk.index(0)}"
    return ""


def _checked(candidate: Candidate, max_bytes: int, forbidden: Iterable[str]) -> Document | str:
    """The document, or why it is none. Raises UserError: a line of a JSON lines file is damaged."""
    try:
        size = candidate.size()
        if size > max_bytes:
            return f"{size} bytes, more than the limit of {max_bytes}"
        content = candidate.read()
    except OSError as error:
        return f"cannot be read: {error.strerror or type(error).__name__}"
    why = why_not_text(content)
    if why:
        return why
    text = content.decode("utf-8-sig")
    if not text.strip():
        return "empty"
    if any(word in text for word in forbidden):
        return "holds an absolute path of this machine"
    return document(candidate, text)


def check_all(
    candidates: Iterable[Candidate],
    *,
    what: str,
    max_bytes: int,
    forbidden: Sequence[str] = (),
    progress: Report = silent,
) -> tuple[list[Document], list[Skipped]]:
    """The candidates of the modality `what` that are text, by source, each once; and the others.
    `max_bytes`: a larger file or line is skipped unread. `forbidden`: strings that must not enter
    the corpus, such as absolute paths of this machine."""
    ordered = sorted(candidates, key=lambda candidate: candidate.source)
    skipped: list[Skipped] = []
    documents: dict[str, Document] = {}
    for done, candidate in enumerate(ordered):
        if done % 100 == 0:
            progress(done, len(ordered), f"reading {what}")
        found = _checked(candidate, max_bytes, forbidden)
        if isinstance(found, Document) and found.digest in documents:
            found = f"the same text as {documents[found.digest].source}"
        if isinstance(found, str):
            skipped.append(Skipped(f"{what}/{candidate.source}", found))
        else:
            documents[found.digest] = found
    return list(documents.values()), skipped


MIN_STREAM_BYTES = 65_536
MISC = "misc"
MAX_NAME_BYTES = 200  # file systems allow 255, the extension included
Streams = dict[str, list[Document]]


def group_by_directory(documents: Sequence[Document], *, min_bytes: int) -> Streams:
    """One stream per directory; one with less than `min_bytes` joins its parent.

    Top directories below `min_bytes` form the stream `misc`; if that is too small itself it joins
    the smallest other stream. Streams are named after the directory, with dots: `numpy.linalg`; see
    `_stream_name`.
    """
    by_directory: dict[tuple[str, ...], list[Document]] = {}
    for document in documents:
        by_directory.setdefault(PurePosixPath(document.source).parts[:-1], []).append(document)
    # The deepest first, so that small directories gather in a parent before that is judged.
    deepest = max((len(parts) for parts in by_directory), default=0)
    for depth in range(deepest, 0, -1):
        for parts in sorted(key for key in by_directory if len(key) == depth):
            if _size(by_directory[parts]) < min_bytes:
                small = by_directory.pop(parts)
                by_directory.setdefault(parts[:-1], []).extend(small)
    streams: Streams = {}
    for parts in sorted(key for key in by_directory if key):
        streams[_free_name(_stream_name(parts), streams)] = by_directory[parts]
    left_over = by_directory.get((), [])
    if left_over and streams and _size(left_over) < min_bytes:
        smallest = min(streams, key=lambda name: (_size(streams[name]), name))
        streams[smallest] = streams[smallest] + left_over
    elif left_over:
        streams[_free_name(MISC, streams)] = left_over
    return {name: sorted(streams[name], key=lambda each: each.source) for name in sorted(streams)}


def cap_evenly(streams: Mapping[str, Sequence[Document]], max_bytes: int, *, min_bytes: int) -> Streams:
    """At most `max_bytes` of text, in even shares; what small streams leave goes to the others.

    Within a stream documents are considered in the order of the SHA-256 of their source, and those
    that fit are taken. A stream that stays below `min_bytes` because its documents are larger than
    its share takes its smallest ones too; if it still stays below (one small document and a huge
    one), it is dropped.
    """
    chosen: Streams = {}
    left = max_bytes
    # The smallest first: what they leave is shared by those that come later.
    by_size = sorted(streams, key=lambda name: (_size(streams[name]), name))
    for position, name in enumerate(by_size):
        room = left // (len(by_size) - position)
        taken: list[Document] = []
        rest: list[Document] = []
        size = 0
        for document in sorted(streams[name], key=_shuffled):
            if size + document.num_bytes > room:
                rest.append(document)
                continue
            taken.append(document)
            size += document.num_bytes
        for document in sorted(rest, key=lambda d: (d.num_bytes, d.source)):
            if size < min_bytes and size + document.num_bytes <= left:
                taken.append(document)
                size += document.num_bytes
        if taken and size >= min(min_bytes, _size(streams[name])):
            left -= size
            chosen[name] = sorted(taken, key=lambda document: document.source)
    return {name: chosen[name] for name in sorted(chosen)}


def _shuffled(document: Document) -> bytes:
    return hashlib.sha256(document.source.encode()).digest()


def _size(documents: Sequence[Document]) -> int:
    return sum(document.num_bytes for document in documents)


def _stream_name(parts: Sequence[str]) -> str:
    """`numpy.linalg`, without `_` or `.` at its beginning, which hide a file from runs."""
    name = ".".join(parts).lstrip("._") or MISC
    return name.encode()[:MAX_NAME_BYTES].decode(errors="ignore")


def _free_name(name: str, taken: Mapping[str, object]) -> str:
    while name in taken:
        name += "_"
    return name


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
