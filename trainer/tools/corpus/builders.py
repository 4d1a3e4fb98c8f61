"""The corpora that can be built: of own text, of what every installation has, and key recall."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from email.message import Message
from pathlib import Path
from pydoc_data import topics
from typing import cast

from trainer.data.formats import FORMATS, index_suffixes, suffixes
from trainer.data.layout import COMPRESSED, find_files, named_directory
from trainer.errors import UserError
from trainer.hashing import keyed_generator
from trainer.metrics.logger import Report, silent
from trainer.tools.corpus.documents import (
    MIN_STREAM_BYTES,
    Candidate,
    Document,
    Skipped,
    Streams,
    cap_evenly,
    check_all,
    document,
    group_by_directory,
    of_file,
    of_lines,
    of_text,
)
from trainer.tools.corpus.writer import Manifest, write_corpus
from trainer.wording import EXAMPLES, counted, printable

MAX_FILE_BYTES = 64 * 2**20
RECORDS = (".json", ".ndjson", ".csv", ".tsv")
"""Files of many documents, or of none, that no format reads."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")

PYTEXT_BYTES: Mapping[str, int] = {"python": 18_000_000, "cpp": 10_000_000, "prose": 5_000_000}
_PYTEXT_FILE_BYTES = 2_000_000
# pydoc_data is the prose modality's.
_NOT_SOURCES = {"site-packages", "dist-packages", "__pycache__", "pydoc_data"}
_LICENCE_WORDS = ("LICENSE", "LICENCE", "COPYING", "NOTICE")
_OWN_DISTRIBUTION = "trainer"

NUM_SYMBOLS = 8
REVEALED = "ABCDEFGH"
ANSWERS = "01234567"
MIN_SEQ_LEN = 5


def build_text(
    out: Path,
    modalities: Mapping[str, Sequence[str]],
    *,
    min_stream_bytes: int = MIN_STREAM_BYTES,
    max_file_bytes: int = MAX_FILE_BYTES,
    force: bool = False,
    progress: Report = silent,
) -> Manifest:
    """Build a corpus of text, a document per file or line, at `out/<modality>/<stream>.jsonl`.

    Args:
        out: the corpus directory; see `write_corpus` for what may be there already, and `force`.
        modalities: modality -> globs (with `**` and `~`). Hidden files are skipped.
        min_stream_bytes: a directory becomes a stream; one with less text joins its parent.
        max_file_bytes: larger files, and larger lines of a `.jsonl` file, are skipped.

    Raises:
        UserError: a glob matches nothing usable, or a line of a `.jsonl` file is damaged.
        OSError: a `.jsonl` file cannot be read.
    """
    chosen: dict[str, Streams] = {}
    skipped: list[Skipped] = []
    for name, patterns in modalities.items():
        if not _NAME.fullmatch(name):
            problem = f"{name!r} is not a plain name"
            raise UserError("--modality", problem, "use letters, digits, - and _")
        files = _files(name, patterns)
        refused: list[Skipped] = []
        candidates: list[Candidate] = []
        for source, path in files.items():
            why = _why_no_text(path)
            if why:
                refused.append(Skipped(f"{name}/{source}", why))
            elif path.suffix.lower() in FORMATS["jsonl"].suffixes:
                candidates += of_lines(source, path)
            else:
                candidates.append(of_file(source, path))
        documents, unusable = check_all(candidates, what=name, max_bytes=max_file_bytes, progress=progress)
        refused += unusable
        if not documents:
            examples = "; ".join(f"{each.source}: {each.reason}" for each in refused[:EXAMPLES])
            problem = f"nothing in {counted(len(files), 'file')} can be used: {examples}"
            raise UserError(f"--modality {name}", problem, "name files of UTF-8 text, or .jsonl files")
        chosen[name] = group_by_directory(documents, min_bytes=min_stream_bytes)
        skipped.extend(refused)
    rules = _rules(min_stream_bytes, max_file_bytes)
    return write_corpus(out, chosen, builder="text", rules=rules, skipped=skipped, force=force, progress=progress)


def _rules(min_stream_bytes: int, max_file_bytes: int) -> dict[str, str]:
    return {
        "streams": f"a directory is a stream; one with less than {min_stream_bytes} bytes of text joins its parent",
        "files": f"larger than {max_file_bytes} bytes, empty, binary and not UTF-8 are skipped; duplicates once",
    }


def _files(modality: str, patterns: Sequence[str]) -> dict[str, Path]:
    """All files that the globs match, by their path relative to the directory that is searched."""
    files: set[Path] = set()
    globs = [os.path.expanduser(pattern) for pattern in patterns]
    for pattern in globs:
        matched = [Path(path).absolute() for path in find_files(pattern)]
        if not matched:
            fix = "check it with ls"
            if Path(pattern).is_dir():
                fix = f"write '{Path(pattern)}/**/*'"
            raise UserError(f"--modality {modality}", f"the glob {pattern!r} matches no file", fix)
        files.update(matched)
    # Not of the files: one that is added would rename the streams of others.
    root = os.path.commonpath([os.path.abspath(named_directory(pattern)) for pattern in globs])
    return {printable(os.path.relpath(path, root)): path for path in sorted(files)}


def _why_no_text(path: Path) -> str:
    """Why a file is no text and no JSON lines, as its name says; empty if it is."""
    suffix = path.suffix.lower()
    if suffix in COMPRESSED:
        return "compressed: unpack it"
    if suffix in RECORDS:
        return f'{suffix} is no plain text: write a .jsonl file with {{"text": ...}} on each line'
    of_text = (*FORMATS["text"].suffixes, *FORMATS["jsonl"].suffixes)
    if suffix in (*suffixes(), *index_suffixes()) and suffix not in of_text:
        return f"{suffix} is no plain text: a run reads the file as it is"
    return ""


def build_pytext(
    out: Path, *, max_bytes: Mapping[str, int] = PYTEXT_BYTES, force: bool = False, progress: Report = silent
) -> Manifest:
    """Build the corpus that needs no download, at `out/{python,cpp,prose}/<stream>.jsonl`.

    The same installation gives the same bytes.

    - python: `.py` files of the standard library and of numpy; - cpp: the C++ and CUDA headers in
    torch's package; - prose: descriptions and licences of the installed distributions, and the
    language reference behind `help()`.

    Args:
        out: the corpus directory; see `write_corpus` for what may be there already, and `force`.
        max_bytes: modality -> cap on its text; see `cap_evenly`.
    """
    stdlib, numpy = Path(sysconfig.get_paths()["stdlib"]), _package("numpy")
    sources = {
        "python": [*_walk(stdlib, (".py",), "stdlib/"), *_walk(numpy, (".py",), "numpy/")],
        "cpp": [*_walk(_package("torch") / "include", (".h", ".hpp", ".cuh"))],
        "prose": [*_prose()],
    }
    forbidden = sorted({str(stdlib), str(numpy.parent)})
    modalities: dict[str, Streams] = {}
    skipped: list[Skipped] = []
    for name, candidates in sources.items():
        documents, refused = check_all(
            candidates, what=name, max_bytes=_PYTEXT_FILE_BYTES, forbidden=forbidden, progress=progress
        )
        streams = group_by_directory(documents, min_bytes=MIN_STREAM_BYTES)
        modalities[name] = cap_evenly(streams, max_bytes[name], min_bytes=MIN_STREAM_BYTES)
        skipped.extend(refused)
    caps = ", ".join(f"{name} {max_bytes[name]}" for name in sources)
    even = "even shares per stream, within one by the order of the SHA-256 of the source"
    rules = {**_rules(MIN_STREAM_BYTES, _PYTEXT_FILE_BYTES), "cap": f"bytes of text: {caps}; {even}"}
    return write_corpus(out, modalities, builder="pytext", rules=rules, skipped=skipped, force=force, progress=progress)


def _package(name: str) -> Path:
    """The directory of an installed package, which is not imported."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations)))


def _walk(root: Path, suffixes: tuple[str, ...], prefix: str = "") -> Iterator[Candidate]:
    for directory, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in _NOT_SOURCES)
        for file in sorted(files):
            if file.endswith(suffixes):
                path = Path(directory, file)
                yield of_file(prefix + path.relative_to(root).as_posix(), path)


def _prose() -> Iterator[Candidate]:
    for topic, text in topics.topics.items():
        yield of_text(f"python/topics/{topic}", text)
    seen = {_OWN_DISTRIBUTION}  # ours would change the corpus with every commit
    for distribution in importlib.metadata.distributions():
        metadata = cast(Message, distribution.metadata)
        name = str(metadata["Name"]).lower()
        if name in seen:  # of two installed versions, the one that imports find
            continue
        seen.add(name)
        yield of_text(f"{name}/METADATA", str(metadata.get_payload() or metadata["Description"] or ""))
        for file in distribution.files or []:
            is_text = file.suffix.lower() in ("", ".txt", ".md", ".rst")
            if is_text and any(word in file.name.upper() for word in _LICENCE_WORDS):
                # The name of this directory has the version in it.
                _, _, inside = file.as_posix().rpartition(".dist-info/")
                yield of_file(f"{name}/{inside}", Path(str(file.locate())))


def build_key_recall(
    out: Path,
    *,
    groups: int = 1024,
    cells: int = 16,
    seq_len: int = 6,
    streams: int = 8,
    seed: int = 0,
    force: bool = False,
) -> Manifest:
    """Write a corpus that can only be learned with carried state, as `out/recall/stream<k>.jsonl`.

    A group is a document of `cells` cells of `seq_len` bytes, each ending in a newline. Its first
    cell reveals two of eight symbols, drawn independently; every later cell asks for both. With 6
    bytes per cell:

        <CF>.        the symbols are 2 (C) and 5 (F)
        a2b5.        asked for the first symbol: 2; for the second: 5
        a2b5.        ...

    The answers alone are digits: the loss of the token type `digit` is theirs. The last byte of a
    cell, which is the first input of the next one, is constant. So without carried state their loss
    cannot fall below ln 8 = 2.079 nats; with it they are certain, and over all bytes a perfect
    model reaches 2 ln 8 / (cells * seq_len), the revealed symbols.

    Args:
        out: the corpus directory; see `write_corpus` for what may be there already, and `force`.
        groups: documents over all `streams`, which are files.
        cells: cells per group; train with `max_group_cells` of at least this.
        seq_len: bytes per cell, at least 5; train with this `data.seq_len` and bytes.

    Raises:
        UserError: fewer groups than streams, or `out` cannot be used.
    """
    if groups < streams:
        problem = f"{groups} groups do not fill {counted(streams, 'stream')}"
        raise UserError("--groups", problem, "write more groups")
    digits = len(str(streams - 1))
    end = "." * (seq_len - MIN_SEQ_LEN) + "\n"
    documents: dict[str, list[Document]] = {}
    for stream in range(streams):
        name = f"stream{stream:0{digits}}"
        draw = keyed_generator("key-recall", seed, stream)
        size = len(range(stream, groups, streams)), 2
        symbols = draw.integers(NUM_SYMBOLS, size=size).tolist()
        documents[name] = []
        for index, (first, second) in enumerate(symbols):
            reveal = f"<{REVEALED[first]}{REVEALED[second]}>{end}"
            text = reveal + f"a{ANSWERS[first]}b{ANSWERS[second]}{end}" * (cells - 1)
            documents[name].append(document(of_text(f"{name}/{index}", text), text))
    nats = math.log(NUM_SYMBOLS)
    floor = 2 * nats / (cells * seq_len)
    rules = {
        "groups": f"{groups} documents of {cells} cells of {seq_len} bytes, seed {seed}",
        "answers": f"the digits; {nats:.4f} nats each without carried state, 0 with it",
        "floor": f"{floor:.4f} nats a byte with carried state: the two revealed symbols",
    }
    return write_corpus(out, {"recall": documents}, builder="key-recall", rules=rules, skipped=[], force=force)
