"""Tokenizes text into indexed token files with many processes: always the same bytes.

`train data tokenize` does so, and a run does it once for all of its ranks, into the cache.

A file is cut into spans, each tokenized by some process into a part of its own below `.parts`. When
all parts of a file are there, they are put together in order as `NAME.bin` and `NAME.idx`
(`load_megatron`), and removed. What exists is whole, since every file is renamed into place; so a
second call leaves out what a first one has finished. It could go if data were tokenized before a
run.
"""

from __future__ import annotations

import hashlib
import io
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.arrays import Ints
from trainer.data.documents import DTYPES, HEADER, MAGIC, ReadOptions, Span, damaged
from trainer.data.formats import FORMATS, file_kind, format_name, is_import_path
from trainer.data.layout import Stream
from trainer.data.text_formats import row_group_bytes
from trainer.data.tokenizer import load_tokenizer
from trainer.errors import UserError
from trainer.files import read_json, replacing, write_file, write_json
from trainer.lab.cache import ENTRY, FULL, Cache, has_size
from trainer.metrics.logger import Report, get_logger, now_and_then, progress_bar, silent
from trainer.wording import listed

if TYPE_CHECKING:  # what starts each of the processes imports little
    from trainer.config.data_tables import SourceTable
    from trainer.distributed.env import RankInfo
    from trainer.training.setup.plan import Plan
    from trainer.training.setup.sources import Source

logger = get_logger(__name__)
SPAN_BYTES = 2_000_000  # a second or two of work, which an interruption loses
LEAST_BYTES = 4_000_000  # less text, two seconds of work, is tokenized where it is read
PARTS = ".parts"
DTYPE_BITS = {"u1": 8, "<u2": 16, "<i4": 31}  # of ids, the smallest first


def _text_spans(path: Path, size: int) -> list[Span]:
    return [(0, path.stat().st_size)]  # documents may be as long as the file


def _jsonl_spans(path: Path, size: int) -> list[Span]:
    total = path.stat().st_size
    return [(start, min(start + size, total)) for start in range(0, total, size)]


def _parquet_spans(path: Path, size: int) -> list[Span]:
    groups = row_group_bytes(path)
    cuts, held = [0], 0
    for group, num_bytes in enumerate(groups):
        held += num_bytes
        if held >= size:
            cuts.append(group + 1)
            held = 0
    return list(pairwise(dict.fromkeys([*cuts, len(groups)])))


# By format: the parts of a file, of about so many bytes, that can be tokenized apart.
SPANS = {"text": _text_spans, "jsonl": _jsonl_spans, "parquet": _parquet_spans}


@dataclass(frozen=True)
class TextFile:
    """A file to tokenize, cut into spans, and the `.bin` to write; its index is last."""

    path: str
    format: str
    target: Path
    spans: list[Span]

    @classmethod
    def cut(cls, path: str, format: str, target: Path, span_bytes: int = SPAN_BYTES) -> TextFile:
        """A file, cut into spans. Raises UserError: it is damaged, or of no such format."""
        name = format_name(Path(path), format)
        if name not in SPANS:
            problem = f"is of the format {name}, which cannot be tokenized"
            raise UserError(path, problem, f"name files of {listed(list(SPANS))}")
        return cls(path, name, target, SPANS[name](Path(path), span_bytes))

    @property
    def is_done(self) -> bool:
        return self.target.with_suffix(".idx").is_file()

    def part(self, out: Path, number: int) -> Path:
        """Tokens of a span; the lengths of its documents are in a `.npy` of the same name."""
        name = hashlib.sha256(str(self.target.relative_to(out)).encode()).hexdigest()[:16]
        return out / PARTS / f"{name}_{number:06d}.bin"


def tokenize_files(
    files: Sequence[TextFile],
    out: Path,
    *,
    tokenizer: str,
    text_split: str,
    column: str | None,
    workers: int,
    text_eod: int | None = None,
    report: Report = silent,  # gets (megabytes done, of, file)
) -> None:
    """Write the tokens of the files that have none yet, in a pool of processes. Raises UserError: a
    file is damaged, or holds no text. What was finished stays."""
    vocab_size = load_tokenizer(tokenizer).vocab_size
    dtype = next(np.dtype(name) for name, bits in DTYPE_BITS.items() if vocab_size <= 1 << bits)
    (out / PARTS).mkdir(parents=True, exist_ok=True)
    missing = [file for file in files if not file.is_done]
    sizes = {file.path: os.path.getsize(file.path) for file in files}
    done, total = sum(sizes[file.path] for file in files if file.is_done), sum(sizes.values())
    waiting = {file.path: len(file.spans) for file in missing}
    # Not forked: a process that has run torch's or a tokenizer's threads cannot be forked safely.
    context = multiprocessing.get_context("spawn")
    settings = (tokenizer, text_split, column, dtype.str, text_eod)
    with ProcessPoolExecutor(workers, context, initializer=_begin, initargs=settings) as pool:
        futures: dict[Future[None], TextFile] = {}
        try:
            for file in missing:
                for number, span in enumerate(file.spans):
                    job = (file.path, file.format, span, file.part(out, number))
                    futures[pool.submit(_tokenize_span, *job)] = file
            for future in as_completed(futures):
                future.result()
                file = futures.pop(future)
                waiting[file.path] -= 1
                done += sizes[file.path] // len(file.spans)
                if not waiting[file.path]:
                    _join(file, out, dtype)
                report(done // 1_000_000, total // 1_000_000, file.path)
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():  # their work is not worth waiting for
                process.terminate()
            if isinstance(error, BrokenProcessPool):
                problem = "a process ended in the middle of its work, perhaps killed for want of memory"
                raise UserError("--workers", problem, "run it again with fewer; it continues") from None
            raise
    shutil.rmtree(out / PARTS)


def _join(file: TextFile, out: Path, dtype: np.dtype[Any]) -> None:
    """Put the parts of a file together, and remove them."""
    file.target.parent.mkdir(parents=True, exist_ok=True)
    parts = [file.part(out, number) for number in range(len(file.spans))]
    lengths = np.concatenate([np.load(part.with_suffix(".npy")) for part in parts])
    if not len(lengths):
        raise UserError(file.path, "has no documents", "remove the file")
    with replacing(file.target) as whole:
        for part in parts:
            with part.open("rb") as opened:
                shutil.copyfileobj(opened, whole, 1 << 20)
    write_index(file.target.with_suffix(".idx"), lengths, dtype)
    for part in parts:
        part.unlink()
        part.with_suffix(".npy").unlink()


# Of a process of the pool.
_options: ReadOptions
_written_as: np.dtype[Any]


def _begin(tokenizer: str, text_split: Any, column: str | None, dtype: str, text_eod: int | None) -> None:
    """Load in a process of the pool what all of its spans need."""
    global _options, _written_as
    # A terminal sends it to all processes: the first one decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    how: dict[str, Any] = {"text_split": text_split, "column": column, "text_eod": text_eod}
    _options = ReadOptions(load_tokenizer(tokenizer), **how)
    _written_as = np.dtype(dtype)  # the smallest type that has all ids


def _end_with_parent() -> None:
    """End when the first process was killed: another call would write the same files."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _tokenize_span(path: str, format: str, span: Span, part: Path) -> None:
    """Write a span's tokens and its documents' lengths, unless they are there."""
    lengths_file = part.with_suffix(".npy")
    if lengths_file.is_file():
        return
    pieces = FORMATS[format].pieces
    assert pieces is not None
    lengths: list[int] = []
    with replacing(part, sync=False) as file:
        for piece in pieces(Path(path), _options, span):
            lengths.append(len(piece))
            file.write(piece.astype(_written_as).tobytes())
    # Not saved to the file itself: numpy writes past Python, and says nothing of a full disk.
    content = io.BytesIO()
    np.save(content, np.array(lengths, dtype=np.int64))
    write_file(lengths_file, content.getvalue(), sync=False)


class Stopped(Exception):
    """Somebody asked for a stop meanwhile."""


def tokenize_once(plan: Plan, info: RankInfo, is_stopped: Callable[[], bool]) -> Plan:
    """The plan, with the tokens of its text in mapped files. Raises Stopped.

    Where that fails (a full disk), every rank tokenizes what it reads, with a warning.
    """
    if multiprocessing.current_process().daemon:  # which may start no processes
        return plan  # it reads the text itself

    def made(sources: Sequence[Source]) -> list[Source]:
        return [_tokenized(plan, info, is_stopped, source) for source in sources]

    return replace(plan, sources=made(plan.sources), eval_sources=made(plan.eval_sources))


def _tokenized(plan: Plan, info: RankInfo, is_stopped: Callable[[], bool], source: Source) -> Source:
    streams = [each for each in source.streams if not source.is_off and _is_text(each, source.table)]
    size = sum(os.path.getsize(stream.path) for stream in streams)
    if size < LEAST_BYTES:  # not worth a process
        return source

    def look(report: Report, done: int, total: int, path: str) -> None:
        if is_stopped():
            raise Stopped
        report(done, total, path)

    data = plan.config.data
    try:
        cache = Cache(data.cache_dir)
        key = _key(streams, source, Path(data.tokenizer), data.eod)
        place, files = cache.directory / key, cache.directory / key / "files"
        targets = {each.path: files / f"{i:06d}.bin" for i, each in enumerate(streams)}
        what = f"tokenizing source {source.name} ({size / 1e6:,.0f} MB of text) once, into {place}"

        def cut() -> list[str] | None:
            """The files that were cut or removed since; None: they were not all made yet."""
            try:
                sizes = read_json(place / ENTRY)["sizes"]
            except (OSError, ValueError, LookupError, TypeError):
                return None
            return [name for name, size in sizes.items() if not has_size(files / name, size)]

        def make() -> None:
            logger.info("%s", what)
            is_new = not files.exists()
            for name in cut() or []:
                (files / name).with_suffix(".idx").unlink(missing_ok=True)  # it is tokenized again
            left = [path for path, target in targets.items() if not target.with_suffix(".idx").exists()]
            cache.need(f"source {source.name}", sum(map(os.path.getsize, left)))
            try:
                with progress_bar(now_and_then(partial(logger.info, "tokenizing: %s"))) as report:
                    tokenize_files(
                        [TextFile.cut(path, source.table.format, target) for path, target in targets.items()],
                        files,
                        tokenizer=data.tokenizer,
                        text_split=source.table.text_split,
                        column=source.table.column,
                        workers=len(os.sched_getaffinity(0)),
                        text_eod=data.eod,
                        report=partial(look, report),
                    )
                sizes = {path.name: path.stat().st_size for path in files.glob("[0-9]*")}
                write_json(place / ENTRY, {"source": source.name, "sizes": sizes})
            except OSError as error:
                if error.errno in FULL and is_new:  # which the run itself may need
                    shutil.rmtree(place, ignore_errors=True)
                raise

        cache.hold(
            key,
            is_whole=lambda: cut() == [],
            make=make,
            waiting=f"waiting for another process that is {what}",
            is_first=info.local_rank == 0,
            on_wait=lambda: look(silent, 0, 0, ""),
        )
    except UserError as error:
        logger.warning("source %s: every rank tokenizes its text itself: %s", source.name, error.message)
        return source
    return replace(source, streams=[replace(s, tokens=str(targets.get(s.path, ""))) for s in source.streams])


def _is_text(stream: Stream, table: SourceTable) -> bool:
    path = Path(stream.path)
    name = format_name(path, table.format)
    is_built_in = not is_import_path(name) and FORMATS[name].pieces is not None
    return is_built_in and file_kind(path, name, table.column) == "text"


def _key(streams: Sequence[Stream], source: Source, tokenizer: Path, eod: int | None) -> str:
    """The key of the tokens of these files: another one for files that changed."""
    found = [(os.path.abspath(each.path), os.stat(each.path)) for each in streams]
    files = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in found]
    table = source.table
    digest = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
    how = ["tokens", table.format, table.text_split, table.column, digest]
    if eod is not None:
        how.append(str(eod))
    text = json.dumps([how, files])
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:24]


def write_index(path: Path, lengths: Ints, dtype: np.dtype[Any]) -> None:
    """Write the index of a `.bin` of documents of these lengths, one sequence each."""
    code = next(code for code, name in DTYPES.items() if np.dtype(name) == dtype)
    longest = int(lengths.max(initial=0))
    if longest >= 1 << 31:
        raise damaged(path, f"a document of {longest:,} tokens is too long for it", "cut the document")
    pointers = (np.cumsum(lengths) - lengths) * dtype.itemsize
    header = HEADER.pack(MAGIC, 1, code, len(lengths), len(lengths) + 1)
    documents = np.arange(len(lengths) + 1, dtype="<i8")
    tables = (lengths.astype("<i4"), pointers.astype("<i8"), documents)
    write_file(path, header + b"".join(table.tobytes() for table in tables))
