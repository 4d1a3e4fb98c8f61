"""What an epoch of the sources holds, for `train check`: counted, or by bytes if it is large."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from trainer.config.rules import reads_lanes
from trainer.data.formats import FORMATS, format_name, load_documents
from trainer.data.groups import file_bytes, nothing_left, open_stream
from trainer.errors import UserError
from trainer.training.setup.plan import Plan
from trainer.training.setup.sources import Source, reading
from trainer.wording import counted

OPENED_BYTES = 64_000_000  # of all sources together, which may have to be tokenized


@dataclass(frozen=True)
class Content:
    """An epoch of a source."""

    tokens: int  # of text that is not opened: its bytes
    documents: int = 0  # that are not held out, or their parts; 0: not opened
    longest: int = 0  # tokens of the longest of them


def contents(plan: Plan) -> dict[str, Content]:
    """The content of each source of files that is read. Raises UserError: a file is damaged, or no
    document of a source is left to train on."""
    read = [source for source in plan.sources if source.streams and not source.is_off]
    size = sum(file_bytes(stream) for source in read for stream in source.streams)
    measure = _opened if size <= OPENED_BYTES else _by_bytes
    return {source.name: measure(plan, source) for source in read}


def _opened(plan: Plan, source: Source) -> Content:
    cut, read, _ = reading(plan, source)
    opened = [open_stream(stream, read, cut) for stream in source.streams]
    sizes = np.concatenate([each.num_tokens() for each in opened])
    if not len(sizes):
        most = max(each.documents.num_documents for each in opened)
        raise nothing_left(f"source {source.name}", "has no document to train on", cut, most)
    return Content(int(sizes.sum()), len(sizes), int(sizes.max()))


def _by_bytes(plan: Plan, source: Source) -> Content:
    _, read, _ = reading(plan, source)
    tokens = 0
    for stream in source.streams:
        row = FORMATS.get(format_name(Path(stream.path), source.table.format))
        if row is None or row.pieces is not None:
            tokens += file_bytes(stream)
        else:  # ids, of which nothing is read without an id to look for
            tokens += len(load_documents(stream.path, replace(read, eod=None)).tokens)
    return Content(tokens)


def lane_doubts(plan: Plan, found: Mapping[str, Content]) -> Iterator[UserError]:
    """More rows than documents: a step has several rows of one."""
    rows = plan.config.data.mixing.batch_size * plan.facts.data_shards
    documents = sum(each.documents for each in found.values())
    if reads_lanes(plan.config) and 0 < documents < rows:
        problem = f"{counted(documents, 'document')} for {counted(rows, 'row')}: a step has several of one document"
        fix = f"set it to {max(documents // plan.facts.data_shards, 1)}, or add data"
        yield UserError("data.mixing.batch_size", problem, fix)
