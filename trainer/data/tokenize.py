"""Tokenizes text once, into indexed token files: with many processes, the same bytes whatever their number, and after an
interruption where it stopped.

A file is cut into spans, each tokenized by some process into a part of its own below `.parts`. When all parts of a file are
there, they are put together in order as `NAME.bin` and `NAME.idx` (`formats.megatron`), and removed. What exists is whole,
since every file is renamed into place; so a second call leaves out what a first one has finished.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer.data.documents import ReadOptions, Span
from trainer.data.formats import FORMATS, format_name, is_import_path
from trainer.data.layout import Stream
from trainer.data.token_formats import load_megatron, write_index
from trainer.data.tokenizer import Tokenizer, load_tokenizer
from trainer.errors import UserError
from trainer.files import remove_leftovers, replacing, write_file
from trainer.metrics.progress_bar import Report
from trainer.wording import few

SPAN_BYTES = 2_000_000  # a second or two of work, which an interruption loses
PARTS = ".parts"
RECORD = ".tokenize.json"


@dataclass(frozen=True)
class Tokenized:
    """What `tokenize` has made, and how much of it an earlier call had made already."""

    files: int
    documents: int
    tokens: int
    bytes_read: int
    kept_files: int


@dataclass(frozen=True)
class _Source:
    """A file to tokenize, and its outcome."""

    path: str
    format: str
    target: Path
    spans: list[Span]

    def part(self, out: Path, number: int) -> Path:
        """Tokens of a span; the lengths of its documents are beside it."""
        name = hashlib.sha256(str(self.target.relative_to(out)).encode()).hexdigest()[:16]
        return out / PARTS / f"{name}_{number:06d}.bin"


@dataclass(frozen=True)
class Job:
    """One span of a file, for a process of the pool: its tokens go to `part`."""

    path: str
    format: str
    span: Span
    part: Path


class _Settings(NamedTuple):
    """What every process of the pool needs."""

    tokenizer: str
    text_split: str
    dtype: str


def tokenize(
    streams: Sequence[Stream],
    out: Path,
    *,
    tokenizer: str,
    format: str = "auto",
    text_split: str = "file",
    workers: int = 1,
    span_bytes: int = SPAN_BYTES,
    report: Report | None = None,
) -> Tokenized:
    """Write `out/<name of the stream>.bin` and `.idx` for each stream.

    Args:
        streams: from `discover_nested` or `discover_direct`, in a format that holds text.
        tokenizer: as `data.tokenizer`.
        format, text_split: as those of a source.
        workers: processes. The result does not depend on their number.
        report: told (megabytes done, of, file).

    Raises:
        UserError: a file is damaged or holds no text; or `out` is in use, or holds tokens of other files, or made otherwise.
            What was finished stays.
    """
    if tokenizer == "ids":
        raise UserError("--tokenizer", '"ids" has nothing to tokenize text with', "name a tokenizer.json")
    words = load_tokenizer(tokenizer)
    settings = _Settings(tokenizer, text_split, _dtype(words))
    for root in {Path(stream.root).absolute() for stream in streams}:
        if out.absolute().is_relative_to(root):
            problem = f"lies in {root}, where the text is: its files would be input the next time"
            raise UserError(str(out), problem, "name a directory beside it")
    sources = [_source(stream, out, format, span_bytes) for stream in streams]
    _refuse_one_name(sources, out)
    identity = (
        hashlib.sha256(Path(tokenizer).read_bytes()).hexdigest()[:16] if tokenizer.endswith(".json") else tokenizer
    )
    with _alone(out):
        _claim(out, sources, tokenizer=identity, text_split=text_split, span_bytes=span_bytes)
        for folder in {out, *(source.target.parent for source in sources)}:
            remove_leftovers(folder)
        kept = sum(_is_whole(source.target) for source in sources)
        _make(sources, out, settings, workers, report)
    lengths = [load_megatron(source.target, ReadOptions(words)).lengths for source in sources]
    documents, tokens = sum(map(len, lengths)), sum(int(each.sum()) for each in lengths)
    return Tokenized(len(sources), documents, tokens, sum(os.path.getsize(source.path) for source in sources), kept)


def tokenize_files(
    files: Sequence[tuple[str, str]],
    out: Path,
    *,
    tokenizer: str,
    text_split: str,
    workers: int,
    report: Report,
) -> None:
    """Write `out/<number>.bin` and `.idx` for each of the files, of (path, format): six digits, from 0.

    Raises:
        UserError: a file is damaged, or holds no text. What was finished stays.
    """
    sources = [
        _Source(path, name, out / f"{number:06d}.bin", FORMATS[name].spans(Path(path), SPAN_BYTES))  # type: ignore[misc]
        for number, (path, name) in enumerate(files)
    ]
    _make(sources, out, _Settings(tokenizer, text_split, _dtype(load_tokenizer(tokenizer))), workers, report)


def _dtype(words: Tokenizer) -> str:
    return np.dtype("u1" if words.vocab_size <= 1 << 8 else "<u2" if words.vocab_size <= 1 << 16 else "<i4").str


def _make(sources: Sequence[_Source], out: Path, settings: _Settings, workers: int, report: Report | None) -> None:
    """Make what is not there yet."""
    (out / PARTS).mkdir(parents=True, exist_ok=True)
    jobs = {
        Job(source.path, source.format, span, source.part(out, number)): source
        for source in sources
        if not _is_whole(source.target)
        for number, span in enumerate(source.spans)
    }
    _run(jobs, sources, out, settings, workers, report)
    shutil.rmtree(out / PARTS)


def _run(
    jobs: Mapping[Job, _Source],
    sources: Sequence[_Source],
    out: Path,
    settings: _Settings,
    workers: int,
    report: Report | None,
) -> None:
    """Tokenize the spans in a pool of processes, and join the parts of each file as soon as they are there."""
    sizes = {source.path: os.path.getsize(source.path) for source in sources}
    total = sum(sizes.values())
    waiting = {source.path: len(source.spans) for source in jobs.values()}
    done = total - sum(sizes[path] for path in waiting)
    # Not forked: a process that has run torch's or a tokenizer's threads cannot be forked safely.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_begin, initargs=settings) as pool:
        futures: dict[Future[None], Job] = {}
        try:
            for job in jobs:
                futures[pool.submit(_tokenize_span, job)] = job
            for future in as_completed(futures):
                future.result()
                job = futures.pop(future)
                source = jobs[job]
                waiting[source.path] -= 1
                done += sizes[source.path] // len(source.spans)
                if not waiting[source.path]:
                    _join(source, out, np.dtype(settings.dtype))
                if report is not None:
                    report(done // 1_000_000, total // 1_000_000, source.path)
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():  # what they are at is not worth waiting for
                process.terminate()
            if isinstance(error, BrokenProcessPool):
                problem = "a process ended in the midst of its work, killed for want of memory perhaps"
                raise UserError("--workers", problem, "run it again with fewer; it continues") from None
            raise


def _source(stream: Stream, out: Path, format: str, span_bytes: int) -> _Source:
    path = Path(stream.path)
    name = format_name(path, format)
    if is_import_path(name) or FORMATS[name].spans is None:
        problem = f"is of the format {name}, which cannot be tokenized"
        raise UserError(stream.path, problem, "name files of text, .jsonl or .parquet")
    spans = FORMATS[name].spans(path, span_bytes)  # type: ignore[misc]
    # Read as root/<modality>/..., the output has the input's modalities. The whole name: a.txt and a.md may lie side by side.
    # Relative to what the user named, not to what the files have in common: a file that is added later renames no other.
    relative = path.relative_to(stream.root)
    folder = relative.parent if relative.parts[0] == stream.modality else Path(stream.modality) / relative.parent
    return _Source(stream.path, name, out / folder / f"{path.name}.bin", spans)


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Keep another call from writing there meanwhile; the lock is the directory's own, which leaves nothing behind.

    Raises:
        UserError: another one does.
    """
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


def _refuse_one_name(sources: Sequence[_Source], out: Path) -> None:
    """Refuse files of several directories whose tokens would be in one file.

    Raises:
        UserError: there are two.
    """
    first: dict[Path, str] = {}
    for source in sources:
        if first.setdefault(source.target, source.path) != source.path:
            both = f"{first[source.target]} and {source.path}"
            problem = f"{source.target.relative_to(out)} would hold both {both}"
            raise UserError(str(out), problem, "name them by one directory or one glob in quotes, whose names differ")


def _claim(out: Path, sources: Sequence[_Source], **settings: Any) -> None:
    """Record in `out` what it is made of; what was made of a file that has changed since is removed.

    Raises:
        UserError: `out` is made of other files, with other settings, or not by this.
    """
    files = {}
    for source in sources:
        status = os.stat(source.path)
        files[source.target.relative_to(out).as_posix()] = [status.st_size, status.st_mtime_ns]
    path, before = out / RECORD, {}
    if path.is_file():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            before = found["files"]
            changed = [key for key in settings if found["settings"].get(key) != settings[key]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(str(path), f"is damaged ({error!r})", "name a new directory, or remove this one") from None
        if changed:
            problem = f"holds tokens that were made with another {' and '.join(changed)}"
            raise UserError(str(out), problem, "name a new directory, or remove this one")
        gone = sorted(name for name in before.keys() - files.keys() if (out / name).exists())
        if gone:
            problem = f"holds tokens of other files ({few(gone)})"
            raise UserError(str(out), problem, "name these files, too, or remove what was made of them")
    elif out.exists() and any(out.iterdir()):
        raise UserError(str(out), "is not empty", "name a new directory")
    for source in sources:
        name = source.target.relative_to(out).as_posix()
        if name in before and before[name] != files[name]:
            source.target.with_suffix(".idx").unlink(missing_ok=True)
            for part in (out / PARTS).glob(source.part(out, 0).name.replace("_000000.bin", "_*")):
                part.unlink()
    write_file(path, json.dumps({"settings": settings, "files": files}, indent=1))


def _is_whole(target: Path) -> bool:
    """The index is written last."""
    return target.with_suffix(".idx").is_file()


_options: ReadOptions
_written_as: np.dtype[Any]


def _begin(tokenizer: str, text_split: str, dtype: str) -> None:
    """Load in a process of the pool what all of its spans need."""
    global _options, _written_as
    # A terminal sends it to all processes: the first one decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _options, _written_as = ReadOptions(load_tokenizer(tokenizer), text_split=text_split), np.dtype(dtype)


def _end_with_parent() -> None:
    """End when the first process is gone, which may be killed without a word: another call would write the same files."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _tokenize_span(job: Job) -> None:
    tokenize_span(job, _options, _written_as)


def tokenize_span(job: Job, options: ReadOptions, dtype: np.dtype[Any]) -> None:
    """Write a span's tokens, and beside them the lengths of its documents, unless they are there."""
    lengths_file = job.part.with_suffix(".npy")
    if lengths_file.is_file():
        return
    pieces = FORMATS[job.format].pieces
    assert pieces is not None
    lengths: list[int] = []
    with replacing(job.part, sync=False) as file:
        for piece in pieces(Path(job.path), options, job.span):
            lengths.append(len(piece))
            file.write(piece.astype(dtype).tobytes())
    # Not saved to the file itself: numpy writes past Python, and says nothing of a disk that is full.
    content = io.BytesIO()
    np.save(content, np.array(lengths, dtype=np.int64))
    write_file(lengths_file, content.getvalue(), sync=False)


def _join(source: _Source, out: Path, dtype: np.dtype[Any]) -> None:
    """Put the parts of a file together, and remove them."""
    source.target.parent.mkdir(parents=True, exist_ok=True)
    parts = [source.part(out, number) for number in range(len(source.spans))]
    lengths = np.concatenate([np.load(part.with_suffix(".npy")) for part in parts])
    if not len(lengths):
        raise UserError(source.path, "has no documents", "remove the file")
    with replacing(source.target) as whole:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, whole, 1 << 20)
    write_index(source.target.with_suffix(".idx"), lengths, dtype)
    for part in parts:
        part.unlink()
        part.with_suffix(".npy").unlink()
