"""Tokenizes a corpus of text into indexed token files; continues after an interruption."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.data.documents import ReadOptions, load_megatron
from trainer.data.layout import Stream
from trainer.data.tokenizer import load_tokenizer
from trainer.errors import UserError
from trainer.files import read_json, remove_leftovers, write_file
from trainer.lab.tokenized import PARTS, SPAN_BYTES, TextFile, tokenize_files
from trainer.metrics.logger import Report, silent
from trainer.wording import few

RECORD = ".tokenize.json"


@dataclass(frozen=True)
class Tokenized:
    """The result of `tokenize`, and how much of it an earlier call had made already."""

    files: int
    documents: int
    tokens: int
    bytes_read: int
    kept_files: int


def tokenize(
    streams: Sequence[Stream],
    out: Path,
    *,
    tokenizer: str,
    format: str = "auto",
    text_split: str = "file",
    column: str | None = None,
    workers: int = 1,
    span_bytes: int = SPAN_BYTES,
    report: Report = silent,
) -> Tokenized:
    """Write `out/<name of the stream>.bin` and `.idx` for each stream.

    Args:
        streams: from `discover_nested` or `discover_direct`, in a format that holds text.
        tokenizer: as `data.tokenizer`.
        format, text_split, column: as those of a source.
        workers: processes. The result does not depend on their number.
        report: told (megabytes done, of, file).

    Raises:
        UserError: a file is damaged or holds no text; or `out` is in use, or holds tokens of other
            files, or made otherwise. What was finished stays.
    """
    if tokenizer == "ids":
        problem = '"ids" has nothing to tokenize text with'
        raise UserError("--tokenizer", problem, "name a tokenizer.json")
    options = ReadOptions(load_tokenizer(tokenizer))
    for root in {Path(stream.root).absolute() for stream in streams}:
        if out.absolute().is_relative_to(root):
            problem = f"lies in {root}, where the text is: its files would be input the next time"
            raise UserError(str(out), problem, "name a directory beside it")
    files = [TextFile.cut(each.path, format, _target(each, out), span_bytes) for each in streams]
    first: dict[Path, str] = {}
    for file in files:
        if first.setdefault(file.target, file.path) != file.path:
            name = file.target.relative_to(out)
            problem = f"{name} would hold both {first[file.target]} and {file.path}"
            fix = "name them by one directory or one glob in quotes, whose names differ"
            raise UserError(str(out), problem, fix)
    identity = tokenizer
    if tokenizer.endswith(".json"):  # which may move, or change under its name
        identity = hashlib.sha256(Path(tokenizer).read_bytes()).hexdigest()[:16]
    how: dict[str, Any] = {"text_split": text_split, "column": column}
    with _alone(out):
        _claim(out, files, {"tokenizer": identity, **how, "span_bytes": span_bytes})
        for folder in {out, *(file.target.parent for file in files)}:
            remove_leftovers(folder)
        kept = sum(file.is_done for file in files)
        tokenize_files(files, out, tokenizer=tokenizer, workers=workers, report=report, **how)
    lengths = [load_megatron(file.target, options).lengths for file in files]
    # Read back, since files of an earlier call count too.
    documents, tokens = sum(map(len, lengths)), sum(int(each.sum()) for each in lengths)
    bytes_read = sum(os.path.getsize(file.path) for file in files)
    return Tokenized(len(files), documents, tokens, bytes_read, kept)


def _target(stream: Stream, out: Path) -> Path:
    # Read as root/<modality>/..., the output has the input's modalities. The whole name: a.txt and
    # a.md may lie side by side. Relative to what the user named, not to what the files have in
    # common: a file that is added later renames no other.
    relative = Path(stream.path).relative_to(stream.root)
    folder = relative.parent
    if relative.parts[0] != stream.modality:
        folder = Path(stream.modality) / folder
    return out / folder / f"{relative.name}.bin"


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Keep another call from writing there meanwhile; the lock is the directory's own, which leaves
    nothing behind. Raises UserError: another one does."""
    out.mkdir(parents=True, exist_ok=True)
    directory = os.open(out, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                problem = "is in use by another train data tokenize"
                raise UserError(str(out), problem, "wait for it, or stop it") from None
        yield
    finally:
        os.close(directory)


def _claim(out: Path, files: Sequence[TextFile], settings: dict[str, Any]) -> None:
    """Record in `out` what it is made of; tokens of a file that has changed since are made again.
    Raises UserError: `out` is made of other files, with other settings, or not by this."""
    now = {}
    for file in files:
        status = os.stat(file.path)
        now[file.target.relative_to(out).as_posix()] = [status.st_size, status.st_mtime_ns]
    path, before = out / RECORD, {}
    if any(out.iterdir()):
        try:
            found = read_json(path)
            before = found["files"]
            changed = [key for key in settings if found["settings"].get(key) != settings[key]]
            gone = [name for name in before if name not in now and (out / name).exists()]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            problem = "is not empty, and holds no tokens of this verb"
            raise UserError(str(out), problem, "name a new directory") from None
        if changed or gone:
            problem = f"holds tokens of other files or settings ({few([*changed, *gone])})"
            raise UserError(str(out), problem, "name a new directory, or remove these tokens")
    for file in files:
        name = file.target.relative_to(out).as_posix()
        if name in before and before[name] != now[name]:
            file.target.with_suffix(".idx").unlink(missing_ok=True)
            shutil.rmtree(out / PARTS, ignore_errors=True)  # some may be of the file as it was
    write_file(path, json.dumps({"settings": settings, "files": now}, indent=1))
