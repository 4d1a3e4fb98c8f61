"""A corpus of a user's own files: modalities by name, each a list of globs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.data.corpus.documents import Candidate, ReportProgress, check_all
from trainer.data.corpus.manifest import Manifest, Skipped
from trainer.data.corpus.selection import MIN_STREAM_BYTES, Streams, group_by_directory
from trainer.data.corpus.writer import write_corpus
from trainer.data.streams.globs import find_files
from trainer.errors import UserError
from trainer.wording import EXAMPLES, printable

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
MAX_FILE_BYTES = 64 * 2**20


def build_text(
    out: Path,
    modalities: Mapping[str, Sequence[str]],
    *,
    min_stream_bytes: int = MIN_STREAM_BYTES,
    max_file_bytes: int = MAX_FILE_BYTES,
    force: bool = False,
    progress: ReportProgress | None = None,
) -> Manifest:
    """Build a corpus of text files, one document per file, at `out/<modality>/<stream>.jsonl`.

    Args:
        out: the corpus directory; see `write_corpus` for what may be there already.
        modalities: modality -> globs (`**` crosses directories, `~` is the home directory). Hidden files are skipped.
            Names that cannot be printed (not UTF-8, control characters) are written as escapes.
        min_stream_bytes: a directory becomes a stream; one with less text joins its parent.
        max_file_bytes: larger files are skipped.
        force: replace another corpus in `out`.
        progress: gets (done, total, what).

    Raises:
        UserError: a modality's name is not a plain name, a glob matches no file, or no matched file is usable.
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
        candidates = _candidates(name, patterns)
        documents, refused = check_all(candidates, what=name, max_bytes=max_file_bytes, progress=progress)
        if not documents:
            examples = "; ".join(f"{each.source}: {each.reason}" for each in refused[:EXAMPLES])
            problem = f"none of the {len(candidates)} files can be used: {examples}"
            raise UserError(f"--modality {name}", problem, "name text files in UTF-8")
        chosen[name] = group_by_directory(documents, min_bytes=min_stream_bytes)
        skipped.extend(refused)
    rules = {
        "streams": f"a directory is a stream; one with less than {min_stream_bytes} bytes of text joins its parent",
        "files": f"larger than {max_file_bytes} bytes, empty, binary and not UTF-8 are skipped; duplicates once",
    }
    return write_corpus(out, chosen, builder="text", rules=rules, skipped=skipped, force=force, progress=progress)


def _candidates(modality: str, patterns: Sequence[str]) -> list[Candidate]:
    """All files that the globs match, with sources relative to their common directory."""
    files: set[Path] = set()
    for pattern in patterns:
        matched = [Path(path).absolute() for path in find_files(os.path.expanduser(pattern))]
        if not matched:
            raise UserError(f"--modality {modality}", f"the glob {pattern!r} matches no file", "check it with ls")
        files.update(matched)
    if not files:
        raise UserError(f"--modality {modality}", "no glob is given", "write --modality NAME=GLOB")
    root = Path(os.path.commonpath([path.parent for path in files]))
    return [Candidate(printable(path.relative_to(root).as_posix()), path) for path in files]
