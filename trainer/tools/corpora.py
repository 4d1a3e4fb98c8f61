"""Corpora in the NESTED layout, as JSON lines: of own text, of what every installation has, and
key recall.

Documents are found and checked first, with the text of files left on disk; then they are put into
streams and written to a directory next to the corpus's place, which is renamed at the end.
"""

from __future__ import annotations

import codecs
import filecmp
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from pathlib import Path, PurePosixPath
from pydoc_data import topics
from typing import Any, cast

from trainer.arrays import keyed_generator
from trainer.data.formats import INDEX_SUFFIXES, SUFFIXES, TEXT_SUFFIXES
from trainer.data.layout import find_files, fixed_part
from trainer.errors import UserError
from trainer.files import read_json, replacing, write_file
from trainer.wording import counted, few, printable

MANIFEST_NAME = "manifest.json"
MIN_STREAM_BYTES = 65_536
LONGEST_NAME = 200  # bytes, of the 255 that a file's name may have
MAX_FILE_BYTES = 64 * 2**20
MISC = "misc"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")

PYTEXT_BYTES: Mapping[str, int] = {"python": 18_000_000, "cpp": 10_000_000, "prose": 5_000_000}
_PYTEXT_FILE_BYTES = 2_000_000
# pydoc_data is the prose modality's.
_NOT_SOURCES = {"site-packages", "dist-packages", "__pycache__", "pydoc_data"}
_LICENCE_WORDS = ("LICENSE", "LICENCE", "COPYING", "NOTICE")

NUM_SYMBOLS = 8
REVEALED = "ABCDEFGH"
ANSWERS = "01234567"
MIN_SEQ_LEN = 5

Candidate = tuple[str, Path | str]
"""Its origin below its package or root, whose directory gives the stream; and a file or a text."""


@dataclass(frozen=True)
class Document:
    """A candidate that is text."""

    source: str
    place: Path | str
    num_bytes: int  # of the text as UTF-8
    digest: str = ""  # of the same, by which copies are found


Streams = dict[str, list[Document]]


def why_not_text(content: bytes, *, is_whole: bool = True) -> str:
    """Why it is not UTF-8 text, or (not `is_whole`) the beginning of such; empty if it is."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(content, final=is_whole)
    except UnicodeDecodeError as error:
        return f"not UTF-8: byte {content[error.start]:#04x} at offset {error.start}"
    if b"\0" in content:
        return f"binary: a NUL byte at offset {content.index(0)}"
    return ""


def _content(place: Path | str) -> bytes:
    return place.read_bytes() if isinstance(place, Path) else place.encode("utf-8", "surrogatepass")


def _checked(source: str, place: Path | str, max_bytes: int, forbidden: Sequence[str]) -> Document | str:
    """The document, or why it is none."""
    try:
        size = place.stat().st_size if isinstance(place, Path) else len(_content(place))
        if size > max_bytes:
            return f"too large: {size} bytes, at most {max_bytes} are read"
        content = _content(place)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if why := why_not_text(content):
        return why
    text = content.decode("utf-8-sig")
    if not text.strip():
        return "empty"
    if any(word in text for word in forbidden):
        return "holds an absolute path of this machine"
    content = text.encode("utf-8")  # without a byte order mark
    return Document(source, place, len(content), hashlib.sha256(content).hexdigest())


def check_all(
    candidates: Iterable[Candidate], *, what: str, max_bytes: int, forbidden: Sequence[str] = ()
) -> tuple[list[Document], dict[str, str]]:
    """The candidates of the modality `what` that are text, by source, each once; and why others
    are none. `forbidden`: strings that must not enter the corpus, such as this machine's paths."""
    skipped: dict[str, str] = {}
    documents: dict[str, Document] = {}
    for source, place in sorted(candidates, key=lambda candidate: candidate[0]):
        found = _checked(source, place, max_bytes, forbidden)
        if isinstance(found, Document) and found.digest in documents:
            found = f"a copy: of {documents[found.digest].source}"
        if isinstance(found, str):
            skipped[f"{what}/{source}"] = found
        else:
            documents[found.digest] = found
    return list(documents.values()), skipped


def _size(documents: Sequence[Document]) -> int:
    return sum(document.num_bytes for document in documents)


def group_by_directory(documents: Sequence[Document], *, min_bytes: int) -> Streams:
    """One stream per directory; one below `min_bytes`, or of too long a name, joins its parent.

    Top directories below `min_bytes` form the stream `misc`. Streams are named after the directory,
    with dots: `numpy.linalg`, without `_` or `.` at its beginning, which hide a file from runs.
    """
    by_directory: dict[tuple[str, ...], list[Document]] = {}
    for document in documents:
        by_directory.setdefault(PurePosixPath(document.source).parts[:-1], []).append(document)
    # The deepest first, so that small directories gather in a parent before that is judged.
    deepest = max((len(parts) for parts in by_directory), default=0)
    for depth in range(deepest, 0, -1):
        for parts in sorted(key for key in by_directory if len(key) == depth):
            if _size(by_directory[parts]) < min_bytes or len(".".join(parts).encode()) > LONGEST_NAME:
                by_directory.setdefault(parts[:-1], []).extend(by_directory.pop(parts))
    streams: Streams = {}
    for parts, members in by_directory.items():
        streams.setdefault(".".join(parts).lstrip("._") or MISC, []).extend(members)
    return {name: sorted(streams[name], key=lambda each: each.source) for name in sorted(streams)}


def cap_evenly(streams: Mapping[str, Sequence[Document]], max_bytes: int) -> Streams:
    """At most `max_bytes` of text, in even shares; what small streams leave goes to the others.

    Of a stream those documents are taken that fit, in the order of the SHA-256 of their source.
    """
    chosen: Streams = {}
    left = max_bytes
    # The smallest first: what they leave is shared by those that come later.
    by_size = sorted(streams, key=lambda name: (_size(streams[name]), name))
    for position, name in enumerate(by_size):
        room = left // (len(by_size) - position)
        taken: list[Document] = []
        for document in sorted(streams[name], key=lambda each: hashlib.sha256(each.source.encode()).digest()):
            if document.num_bytes <= room:
                taken.append(document)
                room -= document.num_bytes
        left -= _size(taken)
        if taken:
            chosen[name] = sorted(taken, key=lambda document: document.source)
    return {name: chosen[name] for name in sorted(chosen)}


def write_corpus(
    out: Path, modalities: Mapping[str, Streams], skipped: Mapping[str, str], *, force: bool
) -> dict[str, Any]:
    """Write `out/<modality>/<stream>.jsonl`, one document per line, and the manifest returned.

    An equal corpus that is there is left untouched. Raises UserError: `out` holds another one, or a
    damaged one, and `force` is not given, or it holds files that are no part of one.
    """
    out = Path(os.path.realpath(out))
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as work:
        new, old = Path(work, "new"), Path(work, "old")
        manifest: dict[str, Any] = {"modalities": {}, "streams": {}, "skipped": dict(skipped)}
        for modality, streams in modalities.items():
            (new / modality).mkdir(parents=True)
            for stream, documents in streams.items():
                name = f"{modality}/{stream}.jsonl"
                manifest["streams"][name] = _write_stream(new / name, documents)
            counts = {"streams": len(streams), "documents": sum(map(len, streams.values()))}
            manifest["modalities"][modality] = {**counts, "text_bytes": sum(map(_size, streams.values()))}
        write_file(new / MANIFEST_NAME, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
        if out.exists() and any(out.iterdir()):
            is_equal = _written(out) == manifest
            _, *others = filecmp.cmpfiles(new, out, manifest["streams"], shallow=False)
            if is_equal and not any(others):
                return manifest
            if not force:
                what = "a damaged" if is_equal else "another"
                raise UserError(str(out), f"holds {what} corpus", "name another, or --force")
        # Two renames: for a moment there is no corpus, but never half of one.
        if out.exists():
            out.rename(old)
        new.rename(out)
    return manifest


def _written(out: Path) -> dict[str, Any]:
    """The manifest of a corpus. Raises UserError: files would be lost with it."""
    try:
        manifest = read_json(out / MANIFEST_NAME)
        own = {MANIFEST_NAME, *manifest["streams"]}
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(str(out), "is not empty and holds no corpus", "name a new directory for the corpus") from None
    files = [path.relative_to(out) for path in sorted(out.rglob("*")) if not path.is_dir()]
    if others := {path.as_posix() for path in files} - own:
        problem = f"holds {few(sorted(others))}, no part of the corpus"
        raise UserError(str(out), problem, "move it away, or name another directory")
    return manifest


def _write_stream(path: Path, documents: Sequence[Document]) -> str:
    """Write a stream; the digest of the file."""
    digest = hashlib.sha256()
    with replacing(path) as file:
        for document in documents:
            row = {"text": _content(document.place).decode("utf-8-sig"), "source": document.source}
            line = json.dumps(row, ensure_ascii=False).encode("utf-8") + b"\n"
            file.write(line)
            digest.update(line)
    return digest.hexdigest()


def build_text(out: Path, modalities: Mapping[str, Sequence[str]], *, force: bool = False) -> dict[str, Any]:
    """Build a corpus of text, a document per file, at `out/<modality>/<stream>.jsonl`.

    `modalities`: modality -> globs (with `**` and `~`), whose wildcards match no hidden file. Files
    in `out` are left out. Raises UserError: a glob matches no file, nothing of a modality can be
    used, or `out` cannot be replaced; see `write_corpus`.
    """
    chosen: dict[str, Streams] = {}
    skipped: dict[str, str] = {}
    for name, patterns in modalities.items():
        if not _NAME.fullmatch(name):
            raise UserError("--modality", f"{name!r} is not a plain name", "use letters, digits, - and _")
        refused = {}
        candidates: list[Candidate] = []
        others = {*SUFFIXES, *INDEX_SUFFIXES}.difference(TEXT_SUFFIXES)
        for source, path in _files(name, patterns).items():
            if Path(os.path.abspath(out)) in path.parents:
                continue
            suffix = path.suffix.lower()
            if suffix in others:
                refused[f"{name}/{source}"] = f"no plain text: {suffix}"
            else:
                candidates.append((source, path))
        documents, unusable = check_all(candidates, what=name, max_bytes=MAX_FILE_BYTES)
        refused |= unusable
        if not documents:
            examples = few([f"{name}: {why}" for name, why in refused.items()]) or "all lie in it"
            problem = f"none of {counted(len(refused), 'file')} outside {out} is usable: {examples}"
            raise UserError(f"--modality {name}", problem, "name files of UTF-8 text outside it; .jsonl needs no build")
        chosen[name] = group_by_directory(documents, min_bytes=MIN_STREAM_BYTES)
        skipped |= refused
    return write_corpus(out, chosen, skipped, force=force)


def _files(modality: str, patterns: Sequence[str]) -> dict[str, Path]:
    """All files that the globs match, by their path relative to the directory that is searched."""
    files: set[Path] = set()
    globs = [os.path.expanduser(pattern) for pattern in patterns]
    for pattern in globs:
        matched = [Path(os.path.abspath(path)) for path in find_files(pattern)]
        if not matched:
            fix = f"write '{Path(pattern)}/**/*'" if Path(pattern).is_dir() else "check it with ls"
            raise UserError(f"--modality {modality}", f"the glob {pattern!r} matches no file", fix)
        files.update(matched)
    # Not of the files: one that is added would rename the streams of others.
    roots = [each if each.is_dir() else each.parent for each in map(fixed_part, globs)]
    root = os.path.commonpath(map(os.path.abspath, roots))
    return {printable(os.path.relpath(path, root)): path for path in sorted(files)}


def build_pytext(out: Path, *, max_bytes: Mapping[str, int] = PYTEXT_BYTES, force: bool = False) -> dict[str, Any]:
    """Build the corpus that needs no download: the same installation gives the same bytes.

    `out/python`: `.py` files of the standard library and of numpy; `cpp`: the C++ and CUDA headers
    in torch's package; `prose`: descriptions and licences of the installed distributions, and the
    language reference behind `help()`. `max_bytes`: modality -> cap on its text; see `cap_evenly`.
    """
    stdlib, numpy = Path(sysconfig.get_paths()["stdlib"]), _package("numpy")
    sources = {
        "python": [*_walk(stdlib, (".py",), "stdlib/"), *_walk(numpy, (".py",), "numpy/")],
        "cpp": [*_walk(_package("torch") / "include", (".h", ".hpp", ".cuh"))],
        "prose": [*_prose()],
    }
    machine = sorted({str(stdlib), str(numpy.parent)})
    modalities: dict[str, Streams] = {}
    skipped: dict[str, str] = {}
    for name, candidates in sources.items():
        documents, refused = check_all(candidates, what=name, max_bytes=_PYTEXT_FILE_BYTES, forbidden=machine)
        streams = group_by_directory(documents, min_bytes=MIN_STREAM_BYTES)
        modalities[name] = cap_evenly(streams, max_bytes[name])
        skipped |= refused
    return write_corpus(out, modalities, skipped, force=force)


def _package(name: str) -> Path:
    """The directory of an installed package, which is not imported."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _walk(root: Path, suffixes: tuple[str, ...], prefix: str = "") -> Iterator[Candidate]:
    for directory, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in _NOT_SOURCES)
        for file in sorted(files):
            if file.endswith(suffixes):
                path = Path(directory, file)
                yield prefix + path.relative_to(root).as_posix(), path


def _prose() -> Iterator[Candidate]:
    for topic, text in topics.topics.items():
        yield f"python/topics/{topic}", text
    seen = {"trainer"}  # ours would change the corpus with every commit
    for distribution in importlib.metadata.distributions():
        metadata = cast(Message, distribution.metadata)
        name = str(metadata["Name"]).lower()
        if name in seen:  # of two installed versions, the one that imports find
            continue
        seen.add(name)
        yield f"{name}/METADATA", str(metadata.get_payload() or metadata["Description"] or "")
        for file in distribution.files or []:
            is_text = file.suffix.lower() in ("", ".txt", ".md", ".rst")
            if is_text and any(word in file.name.upper() for word in _LICENCE_WORDS):
                # The name of this directory has the version in it.
                _, _, inside = file.as_posix().rpartition(".dist-info/")
                yield f"{name}/{inside}", Path(str(file.locate()))


def build_key_recall(
    out: Path,
    *,
    groups: int = 1024,
    cells: int = 16,
    seq_len: int = 6,
    streams: int = 8,
    force: bool = False,
) -> dict[str, Any]:
    """Write a corpus that can only be learned with carried state, as `out/recall/stream<k>.jsonl`.

    A group is a document of `cells` cells of `seq_len` bytes, each ending in a newline. Its first
    cell reveals two of eight symbols, drawn independently; every later cell asks for both
    (docs/ledger.md). With 6 bytes per cell:

        <CF>.        the symbols are 2 (C) and 5 (F)
        a2b5.        asked for the first symbol: 2; for the second: 5; and so on

    `groups`: documents over all `streams`, which are files. `seq_len`: bytes per cell, at least 5;
    train with this `data.seq_len`. Raises UserError: fewer groups than streams; see `write_corpus`.
    """
    if groups < streams:
        raise UserError("--groups", f"must be at least the streams, {streams}; got {groups}")
    digits = len(str(streams - 1))
    end = "." * (seq_len - MIN_SEQ_LEN) + "\n"
    documents: Streams = {}
    for stream in range(streams):
        name = f"stream{stream:0{digits}}"
        draw = keyed_generator("key-recall", 0, stream)
        size = len(range(stream, groups, streams)), 2
        documents[name] = []
        for index, (first, second) in enumerate(draw.integers(NUM_SYMBOLS, size=size).tolist()):
            text = f"<{REVEALED[first]}{REVEALED[second]}>{end}"
            text += f"a{ANSWERS[first]}b{ANSWERS[second]}{end}" * (cells - 1)
            documents[name].append(Document(f"{name}/{index}", text, len(text)))
    return write_corpus(out, {"recall": documents}, {}, force=force)
