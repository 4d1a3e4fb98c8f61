"""Lanes, and the micro-batches that are read from them, plain dicts of arrays."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter, not_
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
    """A row position, and the groups that it reads."""

    __slots__ = ("groups", "offset", "rows")

    def __init__(self) -> None:
        self.groups: list[Handed] = []  # the next one last; between rows at most one
        self.offset = self.rows = 0  # of the next one: tokens read, and rows that it was in

    @property
    def place(self) -> Place | None:
        if not self.groups:
            return None
        (of,) = self.groups
        name, stream = of.source.groups.namespace, of.source.stream.stream_id
        return Place(name, of.epoch, stream, of.group, of.group_id, self.offset, self.rows)

    def read(self, row_tokens: int, *, runs_on: bool) -> tuple[list[Read], tuple[int, ...]]:
        """Move on by a row: its segments, and its `ROW_KEYS`."""
        at, found, lookup, end = 0, [], (-1, 0, 0), (-1, 0)
        while at < row_tokens and self.groups:
            of, offset = self.groups[-1], self.offset
            if not at and (offset or not runs_on):
                lookup = (of.group_id, self.rows, offset)
            size = of.num_tokens - offset
            if size > row_tokens - at:  # the rest in later rows
                size = row_tokens - at
                end = (of.group_id, self.rows)
                self.offset += size
                self.rows += 1
            else:
                self.groups.pop()
                self.offset = self.rows = 0
            found.append((of, offset, size))
            at += size
            if not runs_on:
                break
        return found, (*lookup, *end, len(found))


class Pieces(NamedTuple):
    """The next rows, before they are copied: segments, and the gaps behind the last ones."""

    reads: list[Read | None]  # None: a gap
    tokens: list[TokenArray]  # of a gap 0
    inputs: list[int]  # the first one of each; of a gap 0


class Collator:
    """Builds micro-batches from the next rows of lanes; `runs_on`: documents begin within rows.

    Keys (B rows of T = `row_tokens`): `tokens`, `targets` int64 [B, T]; `group_ids`, `cell_index`
    int64 [B], the group that the row continues or begins with, and its cell; `depth` int64 [B],
    tokens of that group before the row; `is_last` bool [B]; `segment_ids` int32 [B, T], the segment
    of each target, -1 where there is none; `dataset_labels`, `dataset_segments`, the source and the
    modality of each segment; `token_types` int8 [B, T] (only if the tokenizer has types);
    `pack_num_samples` int64 [B]; `instability_meta_json`.

    With `runs_on`: `resets` bool [B, T], and `end_ids`, `end_cell_index` int64 [B], the group that
    continues behind the row, -1 for none, and its cell; a row that begins a group looks up none.
    """

    _unknown: float = IGNORED  # the target of a gap

    def __init__(self, tokenizer: Tokenizer, *, row_tokens: int, runs_on: bool) -> None:
        self._row_tokens, self._runs_on = row_tokens, runs_on
        self._bos, self._tokenizer = tokenizer.bos_id, tokenizer
        self._num_ids = IdBounds.of("", tokenizer).num_ids
        self._nothing = np.zeros(row_tokens, np.int64)
        self._types = tokenizer.token_type_table
        if self._types is not None:
            # Extended so that index IGNORED (from the end) is -1: one take then serves all targets.
            self._types = np.concatenate([self._types, np.full(-IGNORED, -1, dtype=np.int8)])

    def batch(self, lanes: Sequence[Lane]) -> Batch:
        """The next row of each lane. UserError: a file was cut, or has an unknown id."""
        shape, runs_on = (len(lanes), self._row_tokens), self._runs_on
        rows, keys = [], []
        for lane in lanes:
            row, of_row = lane.read(self._row_tokens, runs_on=runs_on)
            rows.append(row)
            keys.append(of_row)
        found = self._pieces(rows)
        sizes = np.array(list(map(len, found.tokens)))
        begins = sizes.cumsum() - sizes
        flat = self._content(found, begins)
        is_gap = np.fromiter(map(not_, found.reads), np.bool_)
        flat["targets"][is_gap.repeat(sizes)] = self._unknown
        segments = (~is_gap).cumsum() - 1
        segments[is_gap] = -1
        flat["segment_ids"] = segments.astype(np.int32).repeat(sizes)
        if runs_on:
            offsets = np.fromiter(map(itemgetter(1), chain.from_iterable(rows)), np.int64)
            flat["resets"] = np.zeros(len(lanes) * self._row_tokens, np.bool_)
            flat["resets"][begins[~is_gap][offsets == 0]] = True
        batch: Batch = {key: value.reshape(*shape, *value.shape[1:]) for key, value in flat.items()}
        batch |= dict(zip(ROW_KEYS, np.array(keys, np.int64).T.copy(), strict=True))
        batch["is_last"] = (batch["group_ids"] >= 0) & (batch["group_ids"] != batch["end_ids"])
        if not runs_on:
            del batch["end_ids"], batch["end_cell_index"]
        if self._types is not None:
            batch["token_types"] = self._types.take(batch["targets"])
        located = Located(rows, batch["group_ids"], batch["cell_index"])
        labels, modalities = [], []
        for of, _, _ in chain.from_iterable(rows):
            name, stream = of.source.groups.namespace, of.source.stream
            located.documents.add((name, stream.stream_id, of.document))
            labels.append(name)
            modalities.append(stream.modality)
        # Tuples: they have no entry for each row.
        batch["dataset_labels"], batch["dataset_segments"] = tuple(labels), tuple(modalities)
        batch["instability_meta_json"] = located
        return batch

    def _pieces(self, rows: Sequence[Sequence[Read]]) -> Pieces:
        found, checked, last = Pieces([], [], []), set(), None
        reads, pieces, inputs = found  # in local names: this loop runs for every document
        for row in rows:
            gap = self._row_tokens
            for read in row:
                of, offset, size = read
                if of.source is not last:
                    last, tokens = of.source, of.source.documents.tokens
                    if id(last) not in checked:
                        check_size(last)
                        checked.add(id(last))
                begin = of.begin + offset
                pieces.append(tokens[begin : begin + size])
                # A document's first token is predicted from the id that begins documents.
                inputs.append(tokens.item(begin - 1) if of.first or offset else self._bos)
                gap -= size
            reads += row
            if gap:
                reads.append(None)
                pieces.append(self._nothing[:gap])
                inputs.append(0)
        return found

    def _content(self, found: Pieces, begins: Ints) -> Batch:
        """Inputs and targets, row behind row. Raises UserError at an id outside the vocabulary."""
        # All segments are copied together: for each by itself, that would cost more than all else.
        targets = np.concatenate(found.tokens, dtype=np.int64, casting="unsafe")
        # Nobody may have checked the token before a group that begins behind a cut.
        # As unsigned, a negative id is a large one; one of 64 bits without a sign becomes negative.
        inputs = np.array(found.inputs).astype(np.int64)
        before = inputs[inputs != self._bos].view(np.uint64).max(initial=0)
        if max(before, targets.view(np.uint64).max()) >= self._num_ids:
            self._refuse_ids(found)
        # A token is predicted from the one before it, the first of a segment from its first input.
        tokens = np.empty_like(targets)
        tokens[1:] = targets[:-1]
        tokens[begins] = inputs
        return {"tokens": tokens, "targets": targets}

    def _refuse_ids(self, found: Pieces) -> None:
        for of, offset, size in filter(None, found.reads):
            documents, start = of.source.documents, max(of.first + offset - 1, 0)
            tokens = documents.read(of.document, start, of.first + offset + size)
            bounds = IdBounds.of(of.source.stream.path, self._tokenizer)
            bounds.check(tokens, int(documents.starts[of.document]) + start)


def make_collator(tokenizer: Tokenizer, mask: Mask | None = None, *, row_tokens: int, runs_on: bool) -> Collator:
    """Of what the documents are: tokens, tokens with a mask, or what a `Reader` reads."""
    make: type[Collator] = getattr(reader_of(tokenizer, mask), "collator", Collator)
    return make(tokenizer, row_tokens=row_tokens, runs_on=runs_on)
