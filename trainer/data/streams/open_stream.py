"""An open stream, and the rows of a reader's plan with everything that a batch needs to know of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from trainer.data.formats.documents import ArrayDocuments, Documents, TokenArray
from trainer.data.formats.id_bounds import IdBounds
from trainer.data.keyed import IntArray
from trainer.data.streams.groups import GroupTable
from trainer.data.streams.lanes import LanePlan
from trainer.data.streams.layout import Stream


@dataclass(frozen=True)
class OpenStream:
    """A stream, its documents and the groups they are cut into.

    The cached properties are what the hot path looks up again and again.
    """

    stream: Stream
    documents: Documents
    groups: GroupTable
    seq_len: int

    @cached_property
    def name_json(self) -> str:
        """The members of a JSON object that name the source and the stream."""
        return f'"source": {json.dumps(self.groups.namespace)}, "stream": {json.dumps(self.stream.relative_path)}'

    @cached_property
    def windows(self) -> TokenArray | None:
        """All windows of seq_len + 1 tokens, a view [n, seq_len + 1]; None unless the tokens are one such array."""
        if not isinstance(self.documents, ArrayDocuments):
            return None
        tokens = self.documents.table.tokens
        return sliding_window_view(tokens, self.seq_len + 1) if len(tokens) > self.seq_len else None

    @cached_property
    def bounds(self) -> IdBounds | None:
        """What ids that are read through `windows` have yet to be checked against."""
        return self.documents.table.bounds if isinstance(self.documents, ArrayDocuments) else None

    @cached_property
    def group_starts(self) -> IntArray:
        """Where each group's first target lies in that array, int64 [G]."""
        assert isinstance(self.documents, ArrayDocuments)
        return self.documents.table.starts[self.groups.documents] + self.groups.first_cells * self.seq_len

    @cached_property
    def group_ends(self) -> IntArray:
        """Where each group's document ends in that array, int64 [G]."""
        assert isinstance(self.documents, ArrayDocuments)
        table = self.documents.table
        return (table.starts + table.lengths)[self.groups.documents]


class Rows(NamedTuple):
    """The rows of one batch, B of them. The arrays are views of memory that no other batch shares.

    Attributes:
        owners: the stream's group of each row, int64 [B].
        group_ids: int64 [B].
        cell_index: int64 [B].
        windows: where each row's window (one token before its first target, and its targets) begins, int64 [B].
        is_last: bool [B].
        firsts: rows that begin a document.
        odd: rows whose window is not all of one document, or would reach over the array's ends.
        ids_text, cells_text: `group_ids` and `cell_index` as JSON, without the brackets.
    """

    owners: IntArray
    group_ids: IntArray
    cell_index: IntArray
    windows: IntArray
    is_last: npt.NDArray[np.bool_]
    firsts: list[int]
    odd: list[int]
    ids_text: str
    cells_text: str


ROWS_BLOCK = 512  # batches whose rows are worked out together
_NONE: list[int] = []


class RowTable:
    """The rows of a plan, worked out a block of batches at a time, so that a batch takes a few slices of it.

    Args:
        source: the open stream.
        plan: of N batches on L lanes.
        groups: the stream's group for each position that the plan counts in.
    """

    def __init__(self, source: OpenStream, plan: LanePlan, groups: IntArray) -> None:
        self._source = source
        self._plan = plan
        self._groups = groups
        self._start = self._stop = 0
        self._rows: list[Rows] = []

    def batch(self, index: int) -> Rows:
        """The rows of a batch; to be asked for once, since whoever gets them may change them."""
        if not self._start <= index < self._stop:
            self._work_out(index, min(index + ROWS_BLOCK, self._plan.num_batches))
        return self._rows[index - self._start]

    def _work_out(self, start: int, stop: int) -> None:
        source, table = self._source, self._source.groups
        cells, positions = self._plan.rows(start, stop)
        is_row = cells >= 0
        owners = self._groups[positions]  # [N, L]; lanes that ended: any group
        cell_index = cells - table.cell_offsets[owners]
        is_first = (cell_index == 0) & (table.first_cells[owners] == 0)
        windows = np.zeros_like(owners)
        is_odd = np.zeros(is_first.shape, dtype=np.bool_)
        if source.windows is not None:
            wanted = source.group_starts[owners] + cell_index * source.seq_len - 1
            windows = wanted.clip(0, len(source.windows) - 1)
            left = source.group_ends[owners] - (wanted + 1)
            is_odd = (left < source.seq_len) | (windows != wanted)
        is_last = cell_index == table.num_cells[owners] - 1
        group_ids = table.ids_of(owners)
        columns = [owners, group_ids, cell_index, windows, is_last]
        sizes: list[int] = is_row.sum(axis=1).tolist()
        full = sizes.count(cells.shape[1])  # then lanes end in turn, and those which still run come first
        ragged = sizes[full:]
        if ragged:
            columns = [[*c[:full], *(row[:n] for row, n in zip(c[full:], ragged, strict=True))] for c in columns]
        texts = [_texts(group_ids, sizes, full), _texts(cell_index, sizes, full)]
        self._rows = list(map(Rows, *columns, _by_batch(is_first & is_row), _by_batch(is_odd & is_row), *texts))
        self._start, self._stop = start, stop


def _by_batch(flags: npt.NDArray[np.bool_]) -> list[list[int]]:
    """The lanes that are flagged, for each batch; batches without any share one empty list."""
    found = [_NONE] * len(flags)
    for place in np.flatnonzero(flags.ravel()).tolist():
        batch, lane = divmod(place, flags.shape[1])
        found[batch] = [*found[batch], lane]
    return found


def _texts(numbers: IntArray, sizes: list[int], full: int) -> list[str]:
    """Each batch's numbers as JSON, without brackets; the first `full` batches have a number on every lane.

    One rendering of all of those, cut at the brackets; batches with the numbers of the one before share its text.
    """
    texts: list[str] = []
    if full:
        block = numbers[:full]
        is_new = np.ones(full, dtype=np.bool_)
        (block[1:] != block[:-1]).any(axis=1, out=is_new[1:])
        different = str(block[is_new].tolist())[2:-2].split("], [")
        texts = [different[at] for at in (np.cumsum(is_new) - 1).tolist()]
    ragged = zip(numbers[full:].tolist(), sizes[full:], strict=True)
    return texts + [str(row[:size])[1:-1] for row, size in ragged]
