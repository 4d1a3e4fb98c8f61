"""Building a micro-batch, a plain dict of arrays, from the cells of one stream."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from trainer.arrays import IGNORED, Ints
from trainer.data.documents import IdBounds, TokenArray
from trainer.data.groups import OpenStream
from trainer.data.reader import Rows, StreamReader
from trainer.data.tokenizer import Tokenizer

Batch = dict[str, Any]


class Collator:
    """Builds the micro-batches of one source.

    Keys (B rows of T tokens): `tokens`, `targets` int64 [B, T]; `group_ids`, `cell_index` int64 [B]; `is_last` bool [B];
    `token_types` int8 [B, T] (only if the tokenizer has types); `dataset_labels`, `dataset_segments` lists of B names;
    `pack_num_samples` int64 [B]; `instability_meta_json`.

    Where n tokens before each cell are asked for: `tokens_before` int64 [B, n], the inputs of the row's earlier cells in
    its group, right-aligned, 0 where the group begins less than n tokens before the cell. Every cell before a group's last
    is full: the last min(n, cell_index * T) count.
    """

    def __init__(self, *, name: str, tokenizer: Tokenizer, seq_len: int) -> None:
        self._name = name
        self._bos = tokenizer.bos_id
        table = tokenizer.token_type_table
        # Extended so that index IGNORED (from the end) is -1: one take then serves all targets.
        self._types = None if table is None else np.concatenate([table, np.full(-IGNORED, -1, dtype=np.int8)])
        self._seq_len = seq_len

    def batch(
        self, reader: StreamReader, rows: Rows | None, *, epoch: int, position: int, num_before: int = 0
    ) -> Batch:
        """The micro-batch of a reader's rows; without rows, one fully masked row.

        Args:
            epoch, position: of the reader before the pick (for `instability_meta_json`).
            num_before: n, columns of `tokens_before`; 0: the batch has none.
        """
        source = reader.source
        if rows is None:
            return self.masked(source.stream.modality, source.stream.relative_path, epoch, position, num_before)
        batch: Batch = {"group_ids": rows.group_ids, "cell_index": rows.cell_index, "is_last": rows.is_last}
        if source.windows is None:
            self._fill_row_by_row(batch, source, rows)
        else:
            self._fill_together(batch, source, source.windows, rows)
        if num_before:
            self._fill_before(batch, source, rows, num_before)
        cut = {} if source.cut_documents is None else {"cut_documents": source.cut_documents[rows.owners].tolist()}
        return self._complete(batch, source.stream.modality, source.stream.relative_path, epoch, position, **cut)

    def masked(self, modality: str, stream: str | None, epoch: int, position: int, num_before: int = 0) -> Batch:
        """One row without targets, for a rank that has nothing to read while others do."""
        batch: Batch = {
            **self._blank(1),
            "group_ids": np.full(1, -1, dtype=np.int64),
            "cell_index": np.zeros(1, dtype=np.int64),
            "is_last": np.zeros(1, dtype=np.bool_),
            "pack_num_samples": np.zeros(1, dtype=np.int64),
        }
        if num_before:
            batch["tokens_before"] = np.zeros((1, num_before), dtype=np.int64)
        return self._complete(batch, modality, stream, epoch, position)

    def _complete(
        self, batch: Batch, modality: str, stream: str | None, epoch: int, position: int, **located: list[int]
    ) -> Batch:
        rows = len(batch["group_ids"])
        if self._types is not None:
            batch["token_types"] = self._types.take(batch["targets"])
        batch["dataset_labels"] = [self._name] * rows
        batch["dataset_segments"] = [modality] * rows
        origin = {"source": self._name, "stream": stream, "epoch": epoch, "position": position}
        rows_of = {"group_ids": batch["group_ids"].tolist(), "cell_indices": batch["cell_index"].tolist()}
        batch["instability_meta_json"] = json.dumps({**origin, **rows_of, **located})
        return batch

    def _blank(self, rows: int) -> Batch:
        shape = (rows, self._seq_len)
        return {
            "tokens": np.zeros(shape, dtype=np.int64),
            "targets": np.full(shape, IGNORED, dtype=np.int64),
            "pack_num_samples": np.ones(rows, dtype=np.int64),
        }

    def _fill_together(self, batch: Batch, source: OpenStream, windows: TokenArray, rows: Rows) -> None:
        """All rows in one gather; then fix the rows that begin or end a document."""
        documents = source.documents
        block = windows[rows.windows]  # [B, T + 1]
        if documents.bounds is not None:
            _check(documents.bounds, block, rows.windows)
        tokens, targets = block[:, :-1].astype(np.int64), block[:, 1:].astype(np.int64)
        tokens[rows.is_first, 0] = self._bos
        for row in np.flatnonzero(rows.is_odd).tolist():
            tokens[row], targets[row] = 0, IGNORED
            self._fill_row(source, rows, row, tokens[row], targets[row])
        batch["tokens"], batch["targets"] = tokens, targets
        batch["pack_num_samples"] = np.ones(len(tokens), dtype=np.int64)

    def _fill_row_by_row(self, batch: Batch, source: OpenStream, rows: Rows) -> None:
        """For files that are shorter than a window."""
        batch.update(self._blank(len(rows.owners)))
        for row in range(len(rows.owners)):
            self._fill_row(source, rows, row, batch["tokens"][row], batch["targets"][row])

    def _fill_before(self, batch: Batch, source: OpenStream, rows: Rows, num_before: int) -> None:
        """The inputs of earlier cells, in one gather: a group is a run of one document's tokens."""
        documents, groups = source.documents, source.groups
        columns = np.arange(num_before)
        of_document = groups.documents[rows.owners]
        begins = documents.starts[of_document]
        ends = begins + (groups.first_cells[rows.owners] + rows.cell_index) * self._seq_len  # of the earlier targets
        # An input is the token before its target: there is none before the first, whose input is `bos`.
        places = (ends - num_before - 1)[:, None] + columns
        is_earlier = columns >= (num_before - rows.cell_index * self._seq_len)[:, None]
        is_token = is_earlier & (places >= begins[:, None])
        read = documents.tokens[np.where(is_token, places, 0)]  # [B, n]
        read[~is_token] = 0
        if documents.bounds is not None:
            _check(documents.bounds, read, places[:, 0])
        tokens = read.astype(np.int64)
        tokens[is_earlier & ~is_token] = self._bos
        batch["tokens_before"] = tokens

    def _fill_row(self, source: OpenStream, rows: Rows, row: int, tokens: Ints, targets: Ints) -> None:
        """Write the cell of a row to the beginning of its arrays."""
        documents, owner = source.documents, rows.owners[row]
        document = source.groups.documents[owner]
        cell = int(source.groups.first_cells[owner] + rows.cell_index[row])
        start = cell * self._seq_len
        stop = min(start + self._seq_len, int(documents.lengths[document]))
        size = stop - start
        if cell == 0:
            tokens[0] = self._bos
            targets[:size] = documents.read(document, 0, stop)
            tokens[1:size] = targets[: size - 1]
        else:
            read = documents.read(document, start - 1, stop)
            tokens[:size], targets[:size] = read[:-1], read[1:]


def _check(bounds: IdBounds, block: TokenArray, begins: Ints) -> None:
    """Check the ids of rows that begin at these positions of the file."""
    if bounds.is_broken_by(block):
        for row, begin in zip(block, begins.tolist(), strict=True):
            bounds.check(row, begin)
