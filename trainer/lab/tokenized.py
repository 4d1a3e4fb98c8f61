"""Tokenizes text once for all ranks of a node, with many processes, into a cache: always the same
bytes.

CACHE/<key>/000000.bin, .idx    tokens of a source's files (`load_megatron`)
CACHE/<key>.making/             the same, before all are there
CACHE/<key>.lock                held by the process that makes them

A run does so as it starts, and `train data tokenize` ahead of runs. Each file is tokenized by one
process. What exists is whole, since every file is renamed into place; so a second call leaves out
what a first one has finished.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import signal
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, ProcessPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from trainer.arrays import Ints
from trainer.data.documents import DTYPES, HEADER, MAGIC, ReadOptions, damaged
from trainer.data.formats import FORMATS, format_name
from trainer.data.layout import Stream
from trainer.data.tokenizer import load_tokenizer
from trainer.errors import UserError
from trainer.files import open_plain, remove_leftovers, replacing, write_file
from trainer.metrics.logger import Report, get_logger, progress_bar, silent

if TYPE_CHECKING:  # what starts each of the processes imports little
    from trainer.config.data_tables import SourceTable
    from trainer.distributed.env import RankInfo
    from trainer.training.plan import Plan
    from trainer.training.sources import Source

logger = get_logger(__name__)
LEAST_BYTES = 4_000_000  # less text, two seconds of work, is tokenized where it is read
DTYPE_BITS = {"u1": 8, "<u2": 16, "<i4": 31}  # of ids, the smallest first
POLL_SEC, HEAD_START_SEC = 0.2, 5.0


class How(NamedTuple):
    """How text is tokenized, for the processes."""

    tokenizer: str
    text_split: Any
    column: str | None
    text_eod: int | None


def tokenize_files(files: Mapping[str, Path], format: str, how: How, *, workers: int, report: Report = silent) -> None:
    """Write the tokens of the files that have none yet, in a pool of processes.

    `files`: path -> the `.bin` to write; its index is last. `report` gets (megabytes done, of,
    file), at least once a second. Raises UserError: a file is damaged. What was finished stays.
    """
    sizes = {path: os.path.getsize(path) for path in files}
    missing = [path for path, target in files.items() if not target.with_suffix(".idx").is_file()]
    done, total, last = sum(sizes.values()) - sum(sizes[path] for path in missing), sum(sizes.values()), ""
    # With fewer files than processes, each has the tokenizer's threads.
    settings = (how, len(missing) < workers)
    # Not forked: a process that has run torch's or a tokenizer's threads cannot be forked safely.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_begin, initargs=settings) as pool:
        try:
            futures = {pool.submit(_tokenize_file, path, format, files[path]): path for path in missing}
            while futures:
                ended, _ = wait(futures, timeout=1.0, return_when=FIRST_COMPLETED)
                for future in ended:
                    last = futures.pop(future)
                    future.result()
                    done += sizes[last]
                report(done // 1_000_000, total // 1_000_000, last)
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():  # their work is not worth waiting for
                process.terminate()
            if isinstance(error, BrokenExecutor):
                problem = "a process ended in the middle of its work, perhaps killed for want of memory"
                raise UserError("data.tokenizer", problem, "run it again; it continues") from None
            raise


_options: ReadOptions  # of a process of the pool


def _begin(how: How, has_threads: bool) -> None:
    """Load in a process of the pool what all of its files need."""
    global _options
    # A terminal sends it to all processes: the first one decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = str(has_threads).lower()
    name, text_split, column, text_eod = how
    _options = ReadOptions(load_tokenizer(name), text_split=text_split, column=column, text_eod=text_eod)


def _end_with_parent() -> None:
    """End when the first process was killed: another call would write the same files."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _tokenize_file(path: str, format: str, target: Path) -> None:
    """Write a file's tokens, and their index."""
    pieces, lengths = FORMATS[format_name(Path(path), format)].pieces, array("q")
    assert pieces is not None
    vocab_size = _options.tokenizer.vocab_size
    dtype = next(np.dtype(name) for name, bits in DTYPE_BITS.items() if vocab_size <= 1 << bits)
    with replacing(target) as file:
        for piece in pieces(Path(path), _options):
            lengths.append(len(piece))
            file.write(piece.astype(dtype).tobytes())
    if not lengths:
        raise UserError(path, "has no documents", "remove the file")
    write_index(target.with_suffix(".idx"), np.array(lengths, dtype=np.int64), dtype)


class Stopped(Exception):
    """Somebody asked for a stop meanwhile."""


def tokenize_once(plan: Plan, info: RankInfo, is_stopped: Callable[[], bool]) -> Plan:
    """The plan, with the tokens of its text in mapped files. Raises as `tokenize_source`."""
    if multiprocessing.current_process().daemon:  # which may start no processes
        return plan  # it reads the text itself

    def with_tokens(source: Source) -> Source:
        found = tokenize_source(plan, source, info, is_stopped)
        return replace(source, streams=[replace(each, tokens=found.get(each.path, "")) for each in source.streams])

    sources, eval_sources = ([with_tokens(each) for each in own] for own in (plan.sources, plan.eval_sources))
    return replace(plan, sources=sources, eval_sources=eval_sources)


def tokenize_source(
    plan: Plan, source: Source, info: RankInfo, is_stopped: Callable[[], bool] = lambda: False
) -> dict[str, str]:
    """The file with the tokens of each of the source's text files, made unless they are there; none
    if it has little text. Raises UserError: a file is damaged, or the cache cannot be used;
    Stopped."""
    streams = [each for each in source.streams if not source.is_off and _is_text(each, source.table)]
    size = sum(os.path.getsize(stream.path) for stream in streams)
    if size < LEAST_BYTES:  # not worth a process
        return {}
    data, table = plan.config.data, source.table
    own = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "trainer", "data")
    cache = Path(data.cache_dir or own).expanduser().absolute()
    how = How(data.tokenizer, table.text_split, table.column, data.eod)
    place = cache / _key(streams, table.format, how)
    names = {each.path: f"{number:06d}.bin" for number, each in enumerate(streams)}
    what = f"tokenizing source {source.name} ({size / 1e6:,.0f} MB of text) once, into {place}"

    def look(report: Report, done: int, total: int, path: str) -> None:
        if is_stopped():
            raise Stopped
        report(done, total, path)

    def make() -> None:
        logger.info("%s", what)
        making = place.with_suffix(".making")
        making.mkdir(exist_ok=True)
        remove_leftovers(making)  # of a write that was killed
        files = {path: making / name for path, name in names.items()}
        with progress_bar(partial(logger.info, "tokenizing: %s")) as report:
            num_cores = len(os.sched_getaffinity(0))
            tokenize_files(files, table.format, how, workers=num_cores, report=partial(look, report))
        making.rename(place)

    try:
        cache.mkdir(parents=True, exist_ok=True)
        with open_plain(place.with_suffix(".lock"), "ab") as lock:
            waits_until = time.monotonic() + (HEAD_START_SEC if info.local_rank else 0)  # the first rank speaks
            has_said = False
            while not place.is_dir():
                if time.monotonic() >= waits_until and _try(lock):
                    if not place.is_dir():
                        make()
                    break
                if not has_said:
                    logger.info("waiting for another process that is %s", what)
                has_said = True
                look(silent, 0, 0, "")
                time.sleep(POLL_SEC)
    except OSError as error:
        fix = f"name another data.cache_dir; if it is full, delete what no run reads in {cache}"
        raise UserError(str(error.filename or cache), f"cannot be used: {error.strerror}", fix) from None
    return {path: str(place / name) for path, name in names.items()}


def _try(lock: BinaryIO) -> bool:
    """Take a lock, unless another process has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_text(stream: Stream, table: SourceTable) -> bool:
    """Whether a file may hold text; ids in it are copied."""
    row = FORMATS.get(format_name(Path(stream.path), table.format))
    return row is not None and row.pieces is not None


def _key(streams: Sequence[Stream], format: str, how: How) -> str:
    """The key of the tokens of these files: another one for files that changed."""
    found = [(os.path.abspath(each.path), os.stat(each.path)) for each in streams]
    files = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in found]
    digest = hashlib.sha256(Path(how.tokenizer).read_bytes()).hexdigest()
    text = json.dumps(["tokens", format, digest, *how[1:], files])
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
