"""Lanes, and the micro-batches that are read from them, plain dicts of arrays."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from trainer.arrays import IGNORED, Ints
from trainer.data.groups import OpenStream
from trainer.data.tokenizer import Tokenizer
from trainer.errors import UserError
from trainer.wording import printable

Batch = dict[str, Any]


def check_size(source: OpenStream) -> None:
    """Refuse, before it is read from, a file that is shorter than it was: the pages of a mapped file that are cut off end
    the process at a touch (SIGBUS). A file that is gone stays readable where it is mapped."""
    try:
        size = os.stat(source.stream.tokens or source.stream.path).st_size
    except OSError:
        return
    if size < source.num_bytes:
        problem = f"was cut from {source.num_bytes} to {size} bytes during the run"
        raise UserError(printable(source.stream.path), problem, "put the file back, and resume")


class Place(NamedTuple):
    """Where a lane is in a group."""

    source: str
    epoch: int
    stream: int
    group: int
    group_id: int
    offset: int = 0
    """Tokens read."""
    rows: int = 0
    """Rows that it was in."""


class Segment(NamedTuple):
    """What a row holds of a document: target tokens [start, stop) of it."""

    source: str
    stream: str
    epoch: int
    document: int
    start: int
    stop: int


class Located:
    """What the rows of a micro-batch hold, as JSON once it is asked for."""

    def __init__(self, rows: Sequence[Sequence[Segment]], group_ids: Ints, cell_index: Ints) -> None:
        self.rows, self._group_ids, self._cell_index = rows, group_ids, cell_index
        self.origin: dict[str, Any] = {}
        """More of it, where all rows are of one stream."""

    def __str__(self) -> str:
        rows = [[segment._asdict() for segment in row] for row in self.rows]
        ids = {"group_ids": self._group_ids.tolist(), "cell_indices": self._cell_index.tolist()}
        return json.dumps({**self.origin, "rows": rows, **ids})


class Lane:
    """A row position, and the group that it reads."""

    def __init__(self) -> None:
        self.left = 0
        """Tokens of the group that are to be read; 0: there is none."""

    def begin(self, place: Place, opened: OpenStream) -> None:
        """Take up a group at its place."""
        table, documents = opened.groups, opened.documents
        self.opened, self.stream, self.modality = opened, opened.stream.relative_path, opened.stream.modality
        self.source, self.epoch, _, self.group, self.group_id, self.offset, self.rows = place
        self.document = int(table.documents[self.group])
        first = int(table.first_cells[self.group]) * opened.seq_len  # of the document's tokens
        length = int(documents.lengths[self.document]) - first
        self.left = min(length, int(table.num_cells[self.group]) * opened.seq_len) - self.offset
        self.at = first + self.offset
        """Tokens of the document before the next one that is read."""
        self._tokens = np.asarray(documents.tokens)  # of a mapped file without the price of a memmap's slices
        self._begin = int(documents.starts[self.document])
        self._bounds = documents.bounds

    @property
    def place(self) -> Place | None:
        """Where it is."""
        if not self.left:
            return None
        stream = self.opened.stream.stream_id
        return Place(self.source, self.epoch, stream, self.group, self.group_id, self.offset, self.rows)

    def read(self, tokens: Ints, targets: Ints, bos: int) -> Segment:
        """Fill these positions of a row, at most `left`, and move on.

        Raises:
            UserError: an id is outside the vocabulary.
        """
        size, at = len(targets), self.at
        begin = self._begin + at
        if at:
            read = self._tokens[begin - 1 : begin + size]
            tokens[:], targets[:] = read[:-1], read[1:]
        else:
            read = self._tokens[begin : begin + size]
            targets[:] = read
            tokens[0], tokens[1:] = bos, read[:-1]
        if self._bounds is not None:
            self._bounds.check(read, begin - (at > 0))
        self.left -= size
        self.offset += size
        self.at += size
        return Segment(self.source, self.stream, self.epoch, self.document, at, at + size)

    def before(self, num: int, bos: int) -> Ints:
        """The inputs of the last `num` of the group's tokens that were read, fewer at its beginning."""
        size = min(num, self.offset)
        start = self.at - size
        read = self.opened.documents.read(self.document, max(start - 1, 0), self.at - 1).astype(np.int64)
        return read if start else np.concatenate([[bos], read])


Refill = Callable[[Lane, int], bool]
"""Gives a lane its next group, at this position of a row; False if there is none now."""


class Collator:
    """Builds micro-batches from the next rows of lanes.

    Keys (B rows of T tokens): `tokens`, `targets` int64 [B, T]; `group_ids`, `cell_index` int64 [B], the group that the row
    continues or begins with, and its cell; `depth` int64 [B], tokens of that group before the row; `is_last` bool [B];
    `segment_ids` int32 [B, T], the segment of each target, -1 where there is none; `dataset_labels`, `dataset_segments`, the
    source and the modality of each segment; `token_types` int8 [B, T] (only if the tokenizer has types); `pack_num_samples`
    int64 [B]; `instability_meta_json`.

    With `runs_on`: `resets` bool [B, T], and `end_ids`, `end_cell_index` int64 [B], the group that continues behind the row, -1
    for none, and its cell there; a row that begins with a new group looks up none.

    Where n tokens before each row are asked for: `tokens_before` int64 [B, n], the inputs of the row's group before it,
    right-aligned, 0 where there are fewer; with `runs_on`, their `resets_before` bool [B, n].

    Args:
        row_tokens: T.
        runs_on: documents begin within rows.
    """

    def __init__(self, tokenizer: Tokenizer, *, row_tokens: int, runs_on: bool) -> None:
        self._row_tokens, self._runs_on = row_tokens, runs_on
        self._bos = tokenizer.bos_id
        types = tokenizer.token_type_table
        # Extended so that index IGNORED (from the end) is -1: one take then serves all targets.
        self._types = None if types is None else np.concatenate([types, np.full(-IGNORED, -1, dtype=np.int8)])

    def batch(self, lanes: Sequence[Lane], refill: Refill, tokens_before: int = 0) -> Batch:
        """The next row of each lane, with that many tokens of its group before it.

        Raises:
            UserError: a file was cut, or has an id outside the vocabulary.
        """
        count, length, runs_on = len(lanes), self._row_tokens, self._runs_on
        batch: Batch = {
            "tokens": np.zeros((count, length), np.int64),
            "targets": np.full((count, length), IGNORED, np.int64),
            "segment_ids": np.full((count, length), -1, np.int32),
        }
        if runs_on:
            batch["resets"] = np.zeros((count, length), np.bool_)
        if tokens_before:
            batch["tokens_before"] = np.zeros((count, tokens_before), np.int64)
            if runs_on:
                batch["resets_before"] = np.zeros((count, tokens_before), np.bool_)
        opened: dict[int, OpenStream] = {}
        for lane in lanes:
            if lane.left:
                opened[id(lane.opened)] = lane.opened
        for each in opened.values():
            check_size(each)
        segments: list[list[Segment]] = []
        labels: list[tuple[str, str]] = []
        rows = [self._fill_row(*each, refill, batch, segments, labels, tokens_before) for each in enumerate(lanes)]
        columns = np.array(rows, np.int64).T.copy()  # a row of it for each key
        batch |= dict(zip(("group_ids", "cell_index", "depth", "end_ids", "end_cell_index"), columns, strict=True))
        batch["is_last"] = (batch["group_ids"] >= 0) & (batch["group_ids"] != batch["end_ids"])
        if not runs_on:
            del batch["end_ids"], batch["end_cell_index"]
        if self._types is not None:
            batch["token_types"] = self._types.take(batch["targets"])
        # Tuples: they have no entry for each row.
        names = zip(*labels, strict=True) if labels else ((), ())
        batch["dataset_labels"], batch["dataset_segments"] = names
        batch["pack_num_samples"] = np.array(list(map(len, segments)), np.int64)
        batch["instability_meta_json"] = Located(segments, batch["group_ids"], batch["cell_index"])
        return batch

    def _fill_row(
        self,
        row: int,
        lane: Lane,
        refill: Refill,
        batch: Batch,
        segments: list[list[Segment]],
        labels: list[tuple[str, str]],
        tokens_before: int,
    ) -> tuple[int, int, int, int, int]:
        """Read the next window of a lane. Returns the group that is looked up, its cell and its tokens before the row, then the
        group that continues behind the row, and its cell."""
        found: list[Segment] = []
        group_id = end_id = -1
        cell_index = depth = end_cell = at = 0
        length, runs_on = self._row_tokens, self._runs_on
        tokens, targets, segment_ids = batch["tokens"][row], batch["targets"][row], batch["segment_ids"][row]
        while at < length and (lane.left or refill(lane, at)):
            is_begun = lane.offset > 0
            if not at and (is_begun or not runs_on):
                group_id, cell_index, depth = lane.group_id, lane.rows, lane.offset
                if tokens_before and is_begun:
                    self._put_before(lane, row, batch, tokens_before)
            if runs_on and not is_begun:
                batch["resets"][row, at] = True
            stop = min(at + lane.left, length)
            segment_ids[at:stop] = len(labels)
            labels.append((lane.source, lane.modality))
            found.append(lane.read(tokens[at:stop], targets[at:stop], self._bos))
            if lane.left:
                end_id, end_cell = lane.group_id, lane.rows
            lane.rows += 1
            at = stop if runs_on else length
        segments.append(found)
        return group_id, cell_index, depth, end_id, end_cell

    def _put_before(self, lane: Lane, row: int, batch: Batch, num: int) -> None:
        read = lane.before(num, self._bos)
        batch["tokens_before"][row, num - len(read) :] = read
        if self._runs_on and len(read) == lane.offset:
            batch["resets_before"][row, num - len(read)] = True
