"""Lanes, and the micro-batches that are read from them, plain dicts of arrays."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from itertools import chain, starmap
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from trainer.arrays import IGNORED, Ints
from trainer.data.documents import TokenArray
from trainer.data.groups import Handed, OpenStream
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
    offset: int = 0  # tokens read
    rows: int = 0  # rows that it was in


class Segment(NamedTuple):
    """What a row holds of a document: target tokens [start, stop) of it."""

    source: str
    stream: str
    epoch: int
    document: int
    start: int
    stop: int


# The group to look up, its cell, its tokens before the row; the group that continues after it, its cell; segments.
ROW_KEYS = ("group_ids", "cell_index", "depth", "end_ids", "end_cell_index", "pack_num_samples")
Read = tuple[Handed, int, int]  # a segment: its group, that group's tokens before it, its own


def _segment(of: Handed, offset: int, size: int) -> Segment:
    name, path, start = of.source.groups.namespace, of.source.stream.relative_path, of.first + offset
    return Segment(name, path, of.epoch, of.document, start, start + size)


class Located:
    """What the rows of a micro-batch hold, as JSON once it is asked for."""

    def __init__(self, rows: Sequence[Sequence[Read]], group_ids: Ints, cell_index: Ints) -> None:
        self._rows, self._group_ids, self._cell_index = rows, group_ids, cell_index
        self.origin: dict[str, Any] = {}  # more of it, where all rows are of one stream

    @property
    def rows(self) -> list[list[Segment]]:
        """The segments of each row."""
        return [[*starmap(_segment, row)] for row in self._rows]

    def __str__(self) -> str:
        rows = [[segment._asdict() for segment in row] for row in self.rows]
        ids = {"group_ids": self._group_ids.tolist(), "cell_indices": self._cell_index.tolist()}
        return json.dumps({**self.origin, "rows": rows, **ids})


class Lane:
    """A row position, and the group that it reads."""

    __slots__ = ("groups", "offset", "rows")

    def __init__(self) -> None:
        self.groups: list[Handed] = []  # what it reads, the next one last; between rows at most one
        self.offset = self.rows = 0  # of the next one: tokens read, and rows that it was in

    @property
    def place(self) -> Place | None:
        """Where it is."""
        if not self.groups:
            return None
        (of,) = self.groups
        name, stream = of.source.groups.namespace, of.source.stream.stream_id
        return Place(name, of.epoch, stream, of.group, of.group_id, self.offset, self.rows)


Refill = Callable[[Lane, int, int], bool]
"""Gives a lane its next groups, at this position of a row, of so many tokens, if not more; False if there is none now."""


class Gathered(NamedTuple):
    """What the next rows hold, before it is copied: segments, and the gaps behind them, in order."""

    pieces: list[TokenArray]  # their tokens, of a gap 0
    inputs: list[int]  # the first one of each
    segments: list[int]  # their numbers, -1: a gap
    gaps: list[slice]  # positions, counted through all rows
    begun: list[int]  # positions at which a group begins
    labels: list[str]  # the source of each segment
    modalities: list[str]  # and its modality
    rows: list[list[Read]]  # segments by row
    groups: list[int]  # `ROW_KEYS` of each row
    opened: dict[int, OpenStream]  # what is read from, by identity
    num_read: dict[int, int]  # target tokens that are read from it


class Collator:
    """Builds micro-batches from the next rows of lanes; `runs_on`: documents begin within rows.

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
    """

    def __init__(self, tokenizer: Tokenizer, *, row_tokens: int, runs_on: bool) -> None:
        self._row_tokens, self._runs_on = row_tokens, runs_on
        self._bos = tokenizer.bos_id
        self._nothing = np.zeros(row_tokens, np.int64)
        types = tokenizer.token_type_table
        # Extended so that index IGNORED (from the end) is -1: one take then serves all targets.
        self._types = None if types is None else np.concatenate([types, np.full(-IGNORED, -1, dtype=np.int8)])

    def batch(self, lanes: Sequence[Lane], refill: Refill, tokens_before: int = 0) -> Batch:
        """The next row of each lane, with so many tokens before it. UserError: a file was cut, or has an id that is unknown."""
        count, length, runs_on = len(lanes), self._row_tokens, self._runs_on
        kinds = {"tokens_before": np.int64, "resets_before": np.bool_} if runs_on else {"tokens_before": np.int64}
        before: Batch = {key: np.zeros((count, tokens_before), kind) for key, kind in kinds.items() if tokens_before}
        found = self._gather(lanes, refill, before)
        # All segments are copied together: for each by itself, that would cost more than all else.
        tokens, targets = np.empty((2, count * length), np.int64)
        np.concatenate(found.pieces, out=targets, casting="unsafe")
        self._check_ids(found, targets)
        sizes = np.array(list(map(len, found.pieces)))
        tokens[1:] = targets[:-1]
        tokens[sizes.cumsum() - sizes] = found.inputs
        for gap in found.gaps:
            tokens[gap], targets[gap] = 0, IGNORED
        segment_ids = np.array(found.segments, np.int32).repeat(sizes)
        flat: Batch = {"tokens": tokens, "targets": targets, "segment_ids": segment_ids}
        if runs_on:
            flat["resets"] = np.zeros(count * length, np.bool_)
            flat["resets"][found.begun] = True
        batch: Batch = {key: value.reshape(count, length) for key, value in flat.items()} | before
        columns = np.array(found.groups, np.int64).reshape(count, len(ROW_KEYS)).T.copy()
        batch |= dict(zip(ROW_KEYS, columns, strict=True))
        batch["is_last"] = (batch["group_ids"] >= 0) & (batch["group_ids"] != batch["end_ids"])
        if not runs_on:
            del batch["end_ids"], batch["end_cell_index"]
        if self._types is not None:
            batch["token_types"] = self._types.take(batch["targets"])
        for key, source in found.opened.items():
            source.epochs.read += found.num_read[key] * source.epochs_per_token
        # Tuples: they have no entry for each row.
        batch["dataset_labels"], batch["dataset_segments"] = tuple(found.labels), tuple(found.modalities)
        batch["instability_meta_json"] = Located(found.rows, batch["group_ids"], batch["cell_index"])
        return batch

    def _gather(self, lanes: Sequence[Lane], refill: Refill, before: Batch) -> Gathered:
        """Move each lane on by a row, and fill in the tokens before it."""
        length, runs_on, bos = self._row_tokens, self._runs_on, self._bos
        found = Gathered([], [], [], [], [], [], [], [], [], {}, {})
        pieces, inputs, segments, gaps, begun, labels, modalities, rows, groups, opened, num_read = found
        last, room = None, length if runs_on else 1
        for row, lane in enumerate(lanes):
            at, read, lookup, end = 0, [], (-1, 0, 0), (-1, 0)
            while at < length and (lane.groups or refill(lane, at, room - at)):
                of, offset = lane.groups[-1], lane.offset
                _, source, _, group_id, _, first, size, begin = of
                if source is not last:
                    last, tokens = source, source.documents.tokens
                    label, modality, key = source.groups.namespace, source.stream.modality, id(source)
                    if key not in opened:
                        check_size(source)
                        opened[key], num_read[key] = source, 0
                if not offset:
                    begun.append(row * length + at)
                if not at and (offset or not runs_on):
                    lookup = (group_id, lane.rows, offset)
                    if before and offset:
                        self._put_before(of, offset, row, before)
                begin += offset
                size -= offset
                if size > length - at:  # the rest in later rows
                    size = length - at
                    end = (group_id, lane.rows)
                    lane.offset += size
                    lane.rows += 1
                else:
                    lane.groups.pop()
                    lane.offset = lane.rows = 0
                pieces.append(tokens[begin : begin + size])
                inputs.append(tokens.item(begin - 1) if first or offset else bos)
                segments.append(len(labels))
                labels.append(label)
                modalities.append(modality)
                read.append((of, offset, size))
                num_read[key] += size
                at += size
                if not runs_on:
                    break
            if at < length:
                pieces.append(self._nothing[at:])
                inputs.append(0)
                segments.append(-1)
                gaps.append(slice(row * length + at, (row + 1) * length))
            rows.append(read)
            groups += (*lookup, *end, len(read))
        return found

    def _put_before(self, of: Handed, offset: int, row: int, batch: Batch) -> None:
        """The inputs of the last of a group's first `offset` tokens, as many as there is room for."""
        inputs, stop = batch["tokens_before"][row], of.first + offset
        start = stop - min(len(inputs), offset)
        inputs[start - stop] = self._bos  # of a document's first token; written over behind it
        read = of.source.documents.read(of.document, max(start - 1, 0), stop - 1)
        inputs[len(inputs) - len(read) :] = read
        if self._runs_on and start == of.first:
            batch["resets_before"][row, start - stop] = True

    def _check_ids(self, found: Gathered, targets: Ints) -> None:
        """Raises UserError at an id outside the vocabulary. `targets`: the pieces, copied."""
        # Of the files whose ids are not known to be in range.
        bounds = [*filter(None, map(attrgetter("documents.bounds"), found.opened.values()))]
        if not bounds:
            return
        # Nobody may have looked at what is before a group that begins behind a cut. As unsigned, a negative id is a large one.
        inputs = np.array(found.inputs, np.int64)
        before = inputs[inputs != self._bos].view(np.uint64).max(initial=0)
        if max(before, targets.view(np.uint64).max()) >= min(map(attrgetter("num_ids"), bounds)):
            for of, offset, size in chain.from_iterable(found.rows):
                start = of.first + offset
                of.source.documents.read(of.document, max(start - 1, 0), start + size)
