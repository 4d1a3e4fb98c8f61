"""Making a micro-batch, a plain dict of arrays, from cells of one stream."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.formats.documents import TokenArray
from trainer.data.keyed import IntArray
from trainer.data.mixing.reader import StreamReader
from trainer.data.streams.open_stream import OpenStream, Rows
from trainer.data.tokenizer import Tokenizer

IGNORE = -100  # what a target is where there is nothing to predict
Batch = dict[str, Any]


def _type_table(tokenizer: Tokenizer) -> npt.NDArray[np.int8] | None:
    """The tokenizer's table with -1 at index IGNORE (counted from the end), so that one take serves all targets."""
    if tokenizer.token_type_table is None:
        return None
    return np.concatenate([tokenizer.token_type_table, np.full(-IGNORE, -1, dtype=np.int8)])


class Collator:
    """Builds the micro-batches of one source.

    Keys (B rows of T tokens): `tokens`, `targets` int64 [B, T]; `resets` bool [B, T] (only with `pack`); `group_ids`,
    `cell_index` int64 [B]; `is_last` bool [B]; `token_types` int8 [B, T] (only if the tokenizer knows types);
    `dataset_labels`, `dataset_segments` lists of B names; `pack_num_samples` int64 [B]; `instability_meta_json`.
    """

    def __init__(self, *, name: str, tokenizer: Tokenizer, seq_len: int, pack: bool, max_rows: int) -> None:
        self._name = name
        self._bos = tokenizer.bos_id
        self._types = _type_table(tokenizer)
        self._seq_len = seq_len
        self._pack = pack
        self._ones = np.ones(max_rows, dtype=np.int64)

    def batch(self, reader: StreamReader, rows: Rows | None, *, epoch: int, position: int) -> Batch:
        """The micro-batch of these rows; without any, one fully masked row.

        Args:
            reader: whose stream the rows are of.
            rows: what the reader gave, B rows.
            epoch, position: where the reader stood before the pick (for `instability_meta_json`).
        """
        source = reader.source
        if rows is None:
            return self.masked(source.stream.modality, source.name_json, epoch, position)
        batch: Batch = {"group_ids": rows.group_ids, "cell_index": rows.cell_index, "is_last": rows.is_last}
        if self._pack or source.windows is None:
            self._fill_one_by_one(batch, source, rows)
        else:
            self._fill_together(batch, source, source.windows, rows)
        self._add_extras(batch, source.stream.modality)
        batch["instability_meta_json"] = (
            f'{{{source.name_json}, "epoch": {epoch}, "position": {position}, '
            f'"group_ids": [{rows.ids_text}], "cell_indices": [{rows.cells_text}]}}'
        )
        return batch

    def masked(self, modality: str, name_json: str, epoch: int, position: int) -> Batch:
        """One row without any target, for a rank that has nothing to read while others do."""
        batch: Batch = {
            **self._blank(1),
            "group_ids": np.full(1, -1, dtype=np.int64),
            "cell_index": np.zeros(1, dtype=np.int64),
            "is_last": np.zeros(1, dtype=np.bool_),
            "pack_num_samples": np.zeros(1, dtype=np.int64),
        }
        self._add_extras(batch, modality)
        batch["instability_meta_json"] = (
            f'{{{name_json}, "epoch": {epoch}, "position": {position}, "group_ids": [-1], "cell_indices": [0]}}'
        )
        return batch

    def _blank(self, rows: int) -> Batch:
        shape = (rows, self._seq_len)
        blank: Batch = {
            "tokens": np.zeros(shape, dtype=np.int64),
            "targets": np.full(shape, IGNORE, dtype=np.int64),
            "pack_num_samples": np.ones(rows, dtype=np.int64),
        }
        if self._pack:
            blank["resets"] = np.zeros(shape, dtype=np.bool_)
        return blank

    def _add_extras(self, batch: Batch, modality: str) -> None:
        rows = len(batch["group_ids"])
        if self._types is not None:
            batch["token_types"] = self._types.take(batch["targets"])
        batch["dataset_labels"] = [self._name] * rows
        batch["dataset_segments"] = [modality] * rows

    def _fill_together(self, batch: Batch, source: OpenStream, windows: TokenArray, rows: Rows) -> None:
        """All rows in one gather; then the rows that begin or end a document are put right."""
        block = windows[rows.windows]  # [B, T + 1]
        if source.bounds is not None and source.bounds.is_broken_by(block):
            for row, begin in enumerate(rows.windows.tolist()):
                source.bounds.check(block[row], begin)
        tokens, targets = block[:, :-1].astype(np.int64), block[:, 1:].astype(np.int64)
        for row in rows.firsts:
            tokens[row, 0] = self._bos
        for row in rows.odd:
            tokens[row], targets[row] = 0, IGNORE
            self._fill_row(source, *_place(source, rows, row), tokens[row], targets[row])
        batch["tokens"], batch["targets"] = tokens, targets
        batch["pack_num_samples"] = self._ones[: len(tokens)].copy()

    def _fill_one_by_one(self, batch: Batch, source: OpenStream, rows: Rows) -> None:
        """Row by row: for packed rows, and for documents that are not one array."""
        groups = source.groups
        batch.update(self._blank(len(rows.owners)))
        for row, owner in enumerate(rows.owners.tolist()):
            packed = groups.segment_documents[groups.segment_offsets[owner] : groups.segment_offsets[owner + 1]]
            tokens, targets = batch["tokens"][row], batch["targets"][row]
            if not len(packed):
                self._fill_row(source, *_place(source, rows, row), tokens, targets)
                continue
            batch["pack_num_samples"][row] = len(packed)
            at = 0
            for document in packed.tolist():
                size = int(source.documents.lengths[document])
                self._fill_row(source, document, 0, tokens[at : at + size], targets[at : at + size])
                batch["resets"][row, at] = at > 0
                at += size

    def _fill_row(self, source: OpenStream, document: int, cell: int, tokens: IntArray, targets: IntArray) -> None:
        start = cell * self._seq_len
        stop = min(start + self._seq_len, int(source.documents.lengths[document]))
        size = stop - start
        if cell == 0:
            read = source.documents.read(document, 0, stop)
            tokens[0] = self._bos
            tokens[1:size] = read[:-1]
            targets[:size] = read
        else:
            read = source.documents.read(document, start - 1, stop)
            tokens[:size] = read[:-1]
            targets[:size] = read[1:]


def _place(source: OpenStream, rows: Rows, row: int) -> tuple[int, int]:
    """The document of a row, and which of its cells the row is."""
    owner = rows.owners[row]
    return int(source.groups.documents[owner]), int(source.groups.first_cells[owner] + rows.cell_index[row])
