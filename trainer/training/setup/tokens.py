"""Text is tokenized once per node, into the cache that has the local copies of URLs, before the ranks meet.

No rank waits in a collective meanwhile, so that it may take as long as it takes: a process that dies gives its lock up.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.data.formats import FORMATS, file_kind, format_name, is_import_path
from trainer.data.layout import Stream
from trainer.data.stored import ENTRY, Cache
from trainer.data.tokenize import TextFile, tokenize_files
from trainer.data.tokenizer import HuggingFaceTokenizer
from trainer.distributed.env import RankInfo
from trainer.errors import UserError
from trainer.files import write_json
from trainer.metrics.logger import get_logger
from trainer.metrics.progress_bar import Report, now_and_then, progress_bar

if TYPE_CHECKING:
    from trainer.training.setup.plan import Plan
    from trainer.training.setup.sources import Source

logger = get_logger(__name__)
LEAST_BYTES = 4_000_000
"""Less text than this, two seconds of work, is tokenized where it is read."""


class Stopped(Exception):
    """Somebody asked for a stop meanwhile."""


def tokenize_once(plan: Plan, info: RankInfo, is_stopped: Callable[[], bool]) -> Plan:
    """The plan, with the tokens of its text in files that are mapped.

    Where that is not possible (a full disk, a damaged file), every rank tokenizes what it reads, and says what is wrong.

    Raises:
        Stopped: a stop was asked for.
    """
    if not isinstance(plan.tokenizer, HuggingFaceTokenizer) or multiprocessing.current_process().daemon:
        return plan
    make = partial(_tokenized, plan, info, is_stopped)
    return replace(plan, sources=[*map(make, plan.sources)], eval_sources=[*map(make, plan.eval_sources)])


def _tokenized(plan: Plan, info: RankInfo, is_stopped: Callable[[], bool], source: Source) -> Source:
    streams = [] if source.is_off else [each for each in source.streams if _is_text(each, source.table.format)]
    size = sum(os.path.getsize(stream.path) for stream in streams)
    if size < LEAST_BYTES:
        return source
    data = plan.config.data
    cache = Cache.of(data.cache_dir, data.cache_gb)
    key = _key(streams, source, Path(data.tokenizer))
    place = cache.directory / key
    what = f"tokenizing source {source.name} ({size / 1e6:,.0f} MB of text) once, into {place}"

    def look(report: Report, done: int, total: int, path: str) -> None:
        if is_stopped():
            raise Stopped
        report(done, total, path)

    def make() -> None:
        logger.info("%s", what)
        with cache.alone():
            place.mkdir(exist_ok=True)
            write_json(place / "plan.json", {"url": f"the tokens of source {source.name}", "bytes": size})
            cache.make_room(f"source {source.name}", size, size, place)
        with progress_bar() as bar:
            tokenize_files(
                [
                    TextFile.cut(stream.path, source.table.format, place / "files" / f"{number:06d}.bin")
                    for number, stream in enumerate(streams)
                ],
                place / "files",
                tokenizer=data.tokenizer,
                text_split=source.table.text_split,
                workers=len(os.sched_getaffinity(0)),
                report=partial(look, bar or now_and_then(partial(logger.info, "tokenizing: %s"))),
            )
        write_json(place / ENTRY, {"url": f"the tokens of source {source.name}", "files": len(streams)})

    try:
        held = cache.hold(
            key,
            place / "files",
            is_whole=(place / ENTRY).is_file,
            make=make,
            waiting=f"waiting for another process that is {what}",
            is_first=info.local_rank == 0,
            on_wait=lambda: look(lambda *_: None, 0, 0, ""),
        )
    except UserError as error:
        logger.warning("source %s: every rank tokenizes its text itself: %s", source.name, error.message)
        return source
    tokens = {stream.path: str(held.directory / f"{index:06d}.bin") for index, stream in enumerate(streams)}
    return replace(
        source,
        streams=[replace(stream, tokens=tokens.get(stream.path, "")) for stream in source.streams],
        tokens=held,
    )


def _is_text(stream: Stream, format: str) -> bool:
    path = Path(stream.path)
    name = format_name(path, format)
    return not is_import_path(name) and FORMATS[name].pieces is not None and file_kind(path, name) == "text"


def _key(streams: Sequence[Stream], source: Source, tokenizer: Path) -> str:
    """Of the tokens of these files: another one for files that changed."""
    files = [
        (os.path.abspath(each.path), os.stat(each.path).st_size, os.stat(each.path).st_mtime_ns) for each in streams
    ]
    how = ["tokens", source.table.format, source.table.text_split, hashlib.sha256(tokenizer.read_bytes()).hexdigest()]
    return hashlib.sha256(json.dumps([how, files]).encode("utf-8", "surrogateescape")).hexdigest()[:24]
