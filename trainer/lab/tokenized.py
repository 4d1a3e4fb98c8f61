"""Tokenizes text once for all ranks of a node, with many processes, into a cache: always the same
bytes. Ids in files that cannot be mapped, compressed ones and Arrow's, are copied there, too.

CACHE/<key>/000000.bin, .idx    tokens of a source's files (`load_megatron`)
CACHE/<key>.making/             the same, before all are there
CACHE/<key>.lock                held by the process that makes them

A run does so as it starts, and `train data tokenize` ahead of runs. Each file is tokenized by one
process and renamed into place, so a second call leaves out what a first one has finished.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.arrays import Ints
from trainer.data.documents import DTYPES, HEADER, MAGIC, ReadOptions, damaged, read_index
from trainer.data.formats import FORMATS, format_name, is_copied
from trainer.data.layout import Stream
from trainer.errors import UserError
from trainer.files import discard, open_plain, remove_leftovers, replacing, write_file
from trainer.import_path import users_code
from trainer.lab.loss_mask import LossMask
from trainer.lab.weights import tokenizer_mark
from trainer.metrics.logger import get_logger
from trainer.wording import printable

if TYPE_CHECKING:  # what starts each of the processes imports little
    from trainer.config.data_tables import DataTable
    from trainer.distributed.env import RankInfo
    from trainer.training.plan import Plan, Source

logger = get_logger(__name__)
LEAST_BYTES = 4_000_000  # less text, two seconds of work, is tokenized where it is read
DTYPE_BITS = {"u1": 8, "<u2": 16, "<i4": 31}  # of ids, the smallest first
POLL_SEC, HEAD_START_SEC, SECONDS_PER_LINE = 0.2, 5.0, 30.0


def tokenize_files(files: Mapping[str, Path], options: ReadOptions, *, workers: int, look: Callable[[], None]) -> None:
    """Write the tokens of the files that have none yet, in a pool of processes.

    `files`: path -> the `.bin` to write; its index is last. `look` is called at least once a
    second; every half minute a line says how far it is. Raises UserError: a file is damaged. What
    was finished stays.
    """
    sizes = {path: os.path.getsize(path) for path in files}
    missing = [path for path, target in files.items() if not _is_whole(target)]
    said, last, total = time.monotonic(), "", sum(sizes.values())
    done = total - sum(sizes[path] for path in missing)
    # With fewer files than processes, each has the tokenizer's threads.
    settings = (options, len(missing) < workers)
    others = {*multiprocessing.active_children()}
    # Not forked: a process that has run torch's or a tokenizer's threads cannot be forked safely.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_begin, initargs=settings) as pool:
        try:
            futures = {pool.submit(_tokenize_file, path, files[path]): path for path in missing}
            while futures:
                ended, _ = wait(futures, timeout=1.0, return_when=FIRST_COMPLETED)
                for future in ended:
                    last = futures.pop(future)
                    future.result()
                    done += sizes[last]
                look()
                if time.monotonic() - said >= SECONDS_PER_LINE:
                    said = time.monotonic()
                    logger.info("tokenizing, in MB: %.0f of %.0f: %s", done / 1e6, total / 1e6, printable(last))
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in {*multiprocessing.active_children()} - others:  # not worth waiting for
                process.terminate()
            if isinstance(error, BrokenExecutor):
                problem = "a process ended in the middle of its work, perhaps for want of memory"
                raise UserError("data.tokenizer", problem, "run it again; it continues") from None
            raise


_options: ReadOptions  # of a process of the pool


def _begin(options: ReadOptions, has_threads: bool) -> None:
    """Keep in a process of the pool what all of its files need."""
    global _options
    _options = options
    # A terminal sends it to all processes: the first one decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = str(has_threads).lower()


def _end_with_parent() -> None:
    """End when the first process was killed: another call would write the same files."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _tokenize_file(path: str, target: Path) -> None:
    """Write a file's tokens, and their index."""
    lengths = array("q")
    pieces: Any = FORMATS[format_name(Path(path), _options.format)].pieces  # see `is_copied`
    vocab_size = _options.tokenizer.vocab_size
    if _options.loss_mask is not None:
        pieces, vocab_size = _options.loss_mask.pieces, 2 * vocab_size
    dtype = next(np.dtype(name) for name, bits in DTYPE_BITS.items() if vocab_size <= 1 << bits)
    if not os.path.getsize(path):  # which cannot be mapped
        raise damaged(path, "the file is empty", "remove it")
    with replacing(target) as file:
        for piece in _documents(pieces(Path(path), _options), path):
            lengths.append(len(piece))
            file.write(piece.astype(dtype).tobytes())
    if not lengths:
        raise damaged(path, "has no documents", "remove the file")
    if (longest := max(lengths)) >= 1 << 31:
        raise damaged(path, f"a document of {longest:,} tokens is too long", "cut the document")
    write_index(target.with_suffix(".idx"), np.array(lengths, dtype=np.int64), dtype)


def _documents(pieces: Iterator[Any], path: str) -> Iterator[Any]:
    """The documents of a file. Raises UserError: it cannot be read."""
    try:
        yield from pieces
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error})"
        raise damaged(path, problem, "check the path and its mode") from error


def _is_whole(tokens: Path) -> bool:
    """Whether tokens and their index are there, and fit each other."""
    try:
        read_index(tokens.with_suffix(".idx"), tokens.stat().st_size)
    except (OSError, ValueError):
        return False
    return True


class Stopped(Exception):
    """Somebody asked for a stop meanwhile."""


def tokenize_once(plan: Plan, info: RankInfo, is_stopped: Callable[[], bool]) -> Plan | None:
    """The plan with tokens of its text in mapped files; None: stopped. See `tokenize_source`."""
    if multiprocessing.current_process().daemon:  # which may start no processes
        return plan  # it reads the text itself

    def with_tokens(source: Source) -> Source:
        found = tokenize_source(plan, source, info, is_stopped)
        return replace(source, streams=[replace(each, tokens=found.get(each.path, "")) for each in source.streams])

    try:
        sources, eval_sources = ([with_tokens(each) for each in own] for own in (plan.sources, plan.eval_sources))
    except Stopped:
        return None
    return replace(plan, sources=sources, eval_sources=eval_sources)


def tokenize_source(
    plan: Plan, source: Source, info: RankInfo, is_stopped: Callable[[], bool] = lambda: False
) -> dict[str, str]:
    """The file with the tokens of each that `is_copied`, made unless it is there; none if these are
    small. Raises UserError: a file is damaged, or the cache cannot be used; and Stopped."""
    data, table = plan.config.data, source.table
    mask = table.loss_mask and LossMask(table.loss_mask)
    options = ReadOptions.of(table, tokenizer=plan.tokenizer, text_eod=data.eod, loss_mask=mask)
    streams = [
        each for each in source.streams if not source.is_off and is_copied(each.path, table.format, plan.tokenizer)
    ]
    size = sum(os.path.getsize(stream.path) for stream in streams)
    if size < LEAST_BYTES:  # not worth a process
        return {}
    own = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "trainer", "data")
    with users_code("data.cache_dir", "has no default", "name a directory"):  # without a home
        cache = Path(data.cache_dir or own).expanduser().absolute()
    place = cache / _key(streams, options, data)
    names = {each.path: f"{number:06d}.bin" for number, each in enumerate(streams)}
    what = f"tokenizing source {source.name} ({size / 1e6:,.0f} MB of text) once, into {place}"

    def look() -> None:
        if is_stopped():
            raise Stopped

    def is_made() -> bool:
        return all(_is_whole(place / name) for name in names.values())

    try:
        cache.mkdir(parents=True, exist_ok=True)
        with open_plain(place.with_suffix(".lock"), "ab") as lock:
            # The first rank begins: it alone logs.
            waits_until = time.monotonic() + HEAD_START_SEC * (info.local_rank > 0)
            has_said = False
            while not is_made():
                if time.monotonic() >= waits_until:
                    with suppress(BlockingIOError):  # another process has it
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        if not is_made():
                            logger.info("%s", what)
                            _make(place, names, options, look)
                        break
                if not has_said:
                    logger.info("waiting for another process that is %s", what)
                has_said = True
                look()
                time.sleep(POLL_SEC)
    except OSError as error:
        if not is_made():  # else another user has made it, who alone may write there
            fix = f"name another data.cache_dir; if it is full, delete what no run reads in {cache}"
            raise UserError(str(error.filename or cache), f"cannot be used: {error.strerror}", fix) from None
    # A file of empty documents has no tokens to map: it is read itself.
    return {path: str(place / name) for path, name in names.items() if os.path.getsize(place / name)}


def _make(place: Path, names: Mapping[str, str], options: ReadOptions, look: Callable[[], None]) -> None:
    """Make an entry of the cache, in the place of a damaged one."""
    if os.path.lexists(place):
        logger.warning("%s is damaged: it is made again", place)
        discard(place)
    making = place.with_suffix(".making")
    making.mkdir(exist_ok=True)
    remove_leftovers(making)  # of a write that was killed
    files = {path: making / name for path, name in names.items()}
    tokenize_files(files, options, workers=len(os.sched_getaffinity(0)), look=look)
    making.rename(place)


def _key(streams: Sequence[Stream], options: ReadOptions, data: DataTable) -> str:
    """The key of the tokens of these files: another one for files that changed."""
    found = [(os.path.abspath(each.path), os.stat(each.path)) for each in streams]
    files = [(path, status.st_size, status.st_mtime_ns) for path, status in found]
    settings = [data.parse_special, options.format, options.text_split, options.column]
    settings += [options.text_eod, *filter(None, (data.vocab_size, options.loss_mask))]
    text = json.dumps(["tokens 3", tokenizer_mark(data.tokenizer), *settings, files])
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:24]


def write_index(path: Path, lengths: Ints, dtype: np.dtype[Any]) -> None:
    """Write the index of a `.bin` of documents of these lengths below 2^31, one sequence each."""
    code = next(code for code, name in DTYPES.items() if np.dtype(name) == dtype)
    pointers = (np.cumsum(lengths) - lengths) * dtype.itemsize
    header = HEADER.pack(MAGIC, 1, code, len(lengths), len(lengths) + 1)
    documents = np.arange(len(lengths) + 1, dtype="<i8")
    tables = (lengths.astype("<i4"), pointers.astype("<i8"), documents)
    write_file(path, header + b"".join(table.tobytes() for table in tables))
