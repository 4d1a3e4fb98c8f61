"""A corpus of a user's own files: modalities by name, each a list of globs.

A file of text is a document; of a `.jsonl` file each line is one. Files that are named as neither are skipped with the reason.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trainer.data.formats import FORMATS, index_suffixes, suffixes
from trainer.data.layout import COMPRESSED, find_files, named_directory
from trainer.errors import UserError
from trainer.metrics.progress_bar import Report
from trainer.tools.corpus.documents import Candidate, Line, check_all
from trainer.tools.corpus.manifest import Manifest, Skipped
from trainer.tools.corpus.selection import MIN_STREAM_BYTES, Streams, group_by_directory
from trainer.tools.corpus.writer import write_corpus
from trainer.wording import EXAMPLES, counted, printable

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
MAX_FILE_BYTES = 64 * 2**20
RECORDS = (".json", ".ndjson", ".csv", ".tsv")
"""Files of many documents, or of none, that no format reads."""


def build_text(
    out: Path,
    modalities: Mapping[str, Sequence[str]],
    *,
    min_stream_bytes: int = MIN_STREAM_BYTES,
    max_file_bytes: int = MAX_FILE_BYTES,
    force: bool = False,
    progress: Report | None = None,
) -> Manifest:
    """Build a corpus of text, one document per file or per line of a `.jsonl` file, at `out/<modality>/<stream>.jsonl`.

    Args:
        out: the corpus directory; see `write_corpus` for what may be there already.
        modalities: modality -> globs (`**` crosses directories, `~` is the home directory). Hidden files are skipped.
            Names that cannot be printed (not UTF-8, control characters) are written as escapes.
        min_stream_bytes: a directory becomes a stream; one with less text joins its parent.
        max_file_bytes: larger files, and larger lines of a `.jsonl` file, are skipped.
        force: replace another corpus in `out`.
        progress: gets (done, total, what).

    Raises:
        UserError: a modality's name is not a plain name, a glob matches no file, no matched file is usable, or a line of a
            `.jsonl` file is damaged or holds token ids.
    """
    for name in modalities:
        if not _NAME.fullmatch(name):
            fix = "use letters, digits, - and _, as in --modality code=GLOB"
            raise UserError("--modality", f"{name!r} is not a plain name", fix)
    if not modalities:
        raise UserError("--modality", "no modality is named", "add --modality NAME=GLOB")
    chosen: dict[str, Streams] = {}
    skipped: list[Skipped] = []
    for name, patterns in modalities.items():
        files = _files(name, patterns)
        refused = [Skipped(f"{name}/{source}", why) for source, path in files.items() if (why := _why_no_text(path))]
        candidates = [each for source, path in files.items() for each in _candidates(source, path)]
        documents, unusable = check_all(candidates, what=name, max_bytes=max_file_bytes, progress=progress)
        refused += unusable
        if not documents:
            examples = "; ".join(f"{each.source}: {each.reason}" for each in refused[:EXAMPLES])
            problem = f"nothing in {counted(len(files), 'file')} can be used: {examples}"
            raise UserError(f"--modality {name}", problem, "name files of UTF-8 text, or .jsonl files")
        chosen[name] = group_by_directory(documents, min_bytes=min_stream_bytes)
        skipped.extend(refused)
    rules = {
        "streams": f"a directory is a stream; one with less than {min_stream_bytes} bytes of text joins its parent",
        "files": f"larger than {max_file_bytes} bytes, empty, binary and not UTF-8 are skipped; duplicates once",
    }
    return write_corpus(out, chosen, builder="text", rules=rules, skipped=skipped, force=force, progress=progress)


def _files(modality: str, patterns: Sequence[str]) -> dict[str, Path]:
    """All files that the globs match, by their path relative to the directory that the globs search."""
    files: set[Path] = set()
    searched: list[str] = []
    for pattern in map(os.path.expanduser, patterns):
        matched = [Path(path).absolute() for path in find_files(pattern)]
        if not matched:
            raise UserError(f"--modality {modality}", f"the glob {pattern!r} matches no file", "check it with ls")
        files.update(matched)
        searched.append(os.path.abspath(named_directory(pattern)))
    if not files:
        raise UserError(f"--modality {modality}", "no glob is given", "write --modality NAME=GLOB")
    root = os.path.commonpath(searched)  # not of the files: one that is added would rename the streams of others
    return {printable(os.path.relpath(path, root)): path for path in sorted(files)}


def _why_no_text(path: Path) -> str:
    """Why a file is no text and no JSON lines, as its name says; empty if it is."""
    suffix = path.suffix.lower()
    if suffix in COMPRESSED:
        return "compressed: unpack it"
    if suffix in RECORDS:
        return f'{suffix} is no plain text: write a .jsonl file with {{"text": ...}} on each line'
    read_as_is = {*suffixes(), *index_suffixes()} - {*FORMATS["text"].suffixes, *FORMATS["jsonl"].suffixes}
    return f"{suffix} is no plain text: a run reads the file as it is" if suffix in read_as_is else ""


def _candidates(source: str, path: Path) -> Iterator[Candidate]:
    """The documents of a file; none if it is not text."""
    if path.suffix.lower() in FORMATS["jsonl"].suffixes:
        lines = _lines(path)
        width = len(str(lines[-1].number)) if lines else 0  # so that sources sort in the order of the lines
        for line in lines:
            yield Candidate(f"{source}:{line.number:0{width}d}", line)
    elif not _why_no_text(path):
        yield Candidate(source, path)


def _lines(path: Path) -> list[Line]:
    """The lines of a file that are not blank.

    Raises:
        UserError: it cannot be read.
    """
    found, start = [], 0
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    found.append(Line(path, number, start, len(line)))
                start += len(line)
    except OSError as error:
        raise UserError(str(path), f"cannot be read: {error.strerror}", "check the path and its mode") from None
    return found
