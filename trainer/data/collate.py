"""Lanes, and the micro-batches that are read from them, plain dicts of arrays."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from trainer.arrays import IGNORED, Ints
from trainer.data.documents import IdBounds, Mask, TokenArray, reader_of
from trainer.data.groups import Handed, OpenStream
from trainer.data.tokenizer import Tokenizer
from trainer.errors import UserError
from trainer.wording import printable

TRAINED = "data/trained"  # a metric, and the key of a masked batch's (trained, all) tokens

Batch = dict[str, Any]


def check_size(source: OpenStream) -> None:
    """Refuse, before it is read from, a file that is shorter than it was."""
    try:
        size = os.stat(source.stream.tokens or source.stream.path).st_size
    except OSError:  # a file that is gone stays readable where it is mapped
        return
    # To touch a mapped page that was cut off ends the process (SIGBUS).
    if size < source.num_bytes:
        problem = f"was cut from {source.num_bytes} to {size} bytes during the run"
        raise UserError(printable(source.stream.path), problem, "put the file back, and resume")


class Place(NamedTuple):
    source: str
    epoch: int
    stream: int
    group: int
    group_id: int
    offset: int = 0  # tokens read
    rows: int = 0  # rows that it was in


# The group to look up, its cell, its depth; the group behind the row, its cell; segments.
ROW_KEYS = ("group_ids", "cell_index", "depth", "end_ids", "end_cell_index", "pack_num_samples")
Read = tuple[Handed, int, int]  # a segment: its group, that group's tokens before it, its own


class Located:
    """The content of a micro-batch's rows, as JSON once it is asked for."""

    def __init__(self, rows: Sequence[Sequence[Read]], group_ids: Ints, cell_index: Ints) -> None:
        self.reads, self._group_ids, self._cell_index = rows, group_ids, cell_index
        self.documents: set[tuple[str, int, int]] = set()  # of the rows: source, stream and number
        self.origin: dict[str, Any] = {}  # more of it, where all rows are of one stream

    @property
    def rows(self) -> list[list[dict[str, Any]]]:
        """The segments of each row: a document, and the tokens [start, stop) of it."""
        found: list[list[dict[str, Any]]] = []
        for row in self.reads:
            found.append([])
            for of, offset, size in row:
                start, table = of.first + offset, of.source.groups
                names = {"source": table.namespace, "stream": table.relative_path}
                place = {"document": of.document, "start": start, "stop": start + size}
                found[-1].append({**names, "epoch": of.epoch, **place})
        return found

    def __str__(self) -> str:
        ids = {"group_ids": self._group_ids.tolist(), "cell_indices": self._cell_index.tolist()}
        return json.dumps({**self.origin, "rows": self.rows, **ids})


class Lane:
    """A row position, and the group that it reads."""

    __slots__ = ("groups", "offset", "rows")

    def __init__(self) -> None:
        self.groups: list[Handed] = []  # what it reads, the next one last; between rows at most one
        self.offset = self.rows = 0  # of the next one: tokens read, and rows that it was in

    @property
    def place(self) -> Place | None:
        if not self.groups:
            return None
        (of,) = self.groups
        name, stream = of.source.groups.namespace, of.source.stream.stream_id
        return Place(name, of.epoch, stream, of.group, of.group_id, self.offset, self.rows)


Refill = Callable[[Lane, int, int], bool]
"""Gives a lane, at this position of a row, groups of at least so many tokens; False: none now."""


class Gathered(NamedTuple):
    """The content of the next rows, before it is copied: segments and gaps, in order."""

    pieces: list[TokenArray]  # their tokens, of a gap 0
    inputs: list[int]  # the first one of each
    segments: list[int]  # their numbers, -1: a gap
    gaps: list[slice]  # positions, counted through all rows
    begun: list[int]  # positions at which a group begins
    labels: list[str]  # the source of each segment
    modalities: list[str]  # and its modality
    rows: list[list[Read]]  # segments by row
    groups: list[int]  # `ROW_KEYS` of each row


class Collator:
    """Builds micro-batches from the next rows of lanes; `runs_on`: documents begin within rows.

    Keys (B rows of T = `row_tokens`): `tokens`, `targets` int64 [B, T]; `group_ids`, `cell_index`
    int64 [B], the group that the row continues or begins with, and its cell; `depth` int64 [B],
    tokens of that group before the row; `is_last` bool [B]; `segment_ids` int32 [B, T], the segment
    of each target, -1 where there is none; `dataset_labels`, `dataset_segments`, the source and the
    modality of each segment; `token_types` int8 [B, T] (only if the tokenizer has types);
    `pack_num_samples` int64 [B]; `instability_meta_json`.

    With `runs_on`: `resets` bool [B, T], and `end_ids`, `end_cell_index` int64 [B], the group that
    continues behind the row, -1 for none, and its cell; a row that begins with a new group looks up
    none.
    """

    def __init__(self, tokenizer: Tokenizer, *, row_tokens: int, runs_on: bool) -> None:
        self._row_tokens, self._runs_on = row_tokens, runs_on
        self._bos, self._tokenizer = tokenizer.bos_id, tokenizer
        self._num_ids = IdBounds.of("", tokenizer).num_ids
        self._nothing = np.zeros(row_tokens, np.int64)
        self._types = tokenizer.token_type_table
        if self._types is not None:
            # Extended so that index IGNORED (from the end) is -1: one take then serves all targets.
            self._types = np.concatenate([self._types, np.full(-IGNORED, -1, dtype=np.int8)])

    def batch(self, lanes: Sequence[Lane], refill: Refill) -> Batch:
        """The next row of each lane. UserError: a file was cut, or has an unknown id."""
        count, length = len(lanes), self._row_tokens
        found = self._gather(lanes, refill)
        sizes = np.array(list(map(len, found.pieces)))
        flat = self._content(found, sizes)
        flat["segment_ids"] = np.array(found.segments, np.int32).repeat(sizes)
        if self._runs_on:
            flat["resets"] = np.zeros(count * length, np.bool_)
            flat["resets"][found.begun] = True
        batch: Batch = {key: value.reshape(count, length, *value.shape[1:]) for key, value in flat.items()}
        columns = np.array(found.groups, np.int64).reshape(count, len(ROW_KEYS)).T.copy()
        batch |= dict(zip(ROW_KEYS, columns, strict=True))
        batch["is_last"] = (batch["group_ids"] >= 0) & (batch["group_ids"] != batch["end_ids"])
        if not self._runs_on:
            del batch["end_ids"], batch["end_cell_index"]
        if self._types is not None:
            batch["token_types"] = self._types.take(batch["targets"])
        located = Located(found.rows, batch["group_ids"], batch["cell_index"])
        for of, _, _ in chain.from_iterable(found.rows):
            located.documents.add((of.source.groups.namespace, of.source.stream.stream_id, of.document))
        # Tuples: they have no entry for each row.
        batch["dataset_labels"] = tuple(found.labels)
        batch["dataset_segments"] = tuple(found.modalities)
        batch["instability_meta_json"] = located
        return batch

    def _gather(self, lanes: Sequence[Lane], refill: Refill) -> Gathered:
        """Move each lane on by a row."""
        length, runs_on, bos = self._row_tokens, self._runs_on, self._bos
        found = Gathered([], [], [], [], [], [], [], [], [])
        # In local names: this loop runs for every document.
        pieces, inputs, segments, gaps, begun, labels, modalities, rows, groups = found
        last, checked = None, set()
        room = length if runs_on else 1  # how much of a row the next groups may fill
        for row, lane in enumerate(lanes):
            at, read, lookup, end = 0, [], (-1, 0, 0), (-1, 0)
            while at < length and (lane.groups or refill(lane, at, room - at)):
                of, offset = lane.groups[-1], lane.offset
                _, source, _, group_id, _, first, size, begin = of
                if source is not last:
                    last, tokens = source, source.documents.tokens
                    label, modality = source.groups.namespace, source.stream.modality
                    if id(source) not in checked:
                        check_size(source)
                        checked.add(id(source))
                if not offset:
                    begun.append(row * length + at)
                if not at and (offset or not runs_on):
                    lookup = (group_id, lane.rows, offset)
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
                # A document's first token is predicted from the id that begins documents.
                inputs.append(tokens.item(begin - 1) if first or offset else bos)
                segments.append(len(labels))
                labels.append(label)
                modalities.append(modality)
                read.append((of, offset, size))
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

    def _content(self, found: Gathered, sizes: Ints) -> Batch:
        """Inputs and targets, row behind row. Raises UserError at an id outside the vocabulary."""
        # All segments are copied together: for each by itself, that would cost more than all else.
        tokens, targets = np.empty((2, int(sizes.sum())), np.int64)
        np.concatenate(found.pieces, out=targets, casting="unsafe")
        # Nobody may have checked the token before a group that begins behind a cut.
        # As unsigned, a negative id is a large one.
        inputs = np.array(found.inputs, np.int64)
        before = inputs[inputs != self._bos].view(np.uint64).max(initial=0)
        if max(before, targets.view(np.uint64).max()) >= self._num_ids:
            self._refuse_ids(found)
        # A token is predicted from the one before it, the first of a segment from its first input.
        tokens[1:] = targets[:-1]
        tokens[sizes.cumsum() - sizes] = found.inputs
        for gap in found.gaps:
            tokens[gap], targets[gap] = 0, IGNORED
        return {"tokens": tokens, "targets": targets}

    def _refuse_ids(self, found: Gathered) -> None:
        for of, offset, size in chain.from_iterable(found.rows):
            documents, start = of.source.documents, max(of.first + offset - 1, 0)
            tokens = documents.read(of.document, start, of.first + offset + size)
            bounds = IdBounds.of(of.source.stream.path, self._tokenizer)
            bounds.check(tokens, int(documents.starts[of.document]) + start)


def make_collator(tokenizer: Tokenizer, mask: Mask | None = None, *, row_tokens: int, runs_on: bool) -> Collator:
    """That of the source's documents."""
    make: type[Collator] = getattr(reader_of(tokenizer, mask), "collator", Collator)
    return make(tokenizer, row_tokens=row_tokens, runs_on=runs_on)
