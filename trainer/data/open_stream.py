"""An open stream, and the rows of a reader's plan with everything that a batch needs to know of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from trainer.data.documents import ArrayDocuments, Documents, TokenArray
from trainer.data.groups import GroupTable
from trainer.data.keyed import IntArray
from trainer.data.lanes import LanePlan
from trainer.data.layout import Stream


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
    def path_json(self) -> str:
        """The relative path as a JSON string."""
        return json.dumps(self.stream.relative_path)

    @cached_property
    def windows(self) -> TokenArray | None:
        """All windows of seq_len + 1 tokens, a view [n, seq_len + 1]; None unless the tokens are one such array."""
        if not isinstance(self.documents, ArrayDocuments):
            return None
        tokens = self.documents.table.tokens
        return sliding_window_view(tokens, self.seq_len + 1) if len(tokens) > self.seq_len else None

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
    """The rows of one batch, B of them.

    Args:
        owners: the stream's group of each row, int64 [B].
        group_ids: int64 [B].
        cell_index: int64 [B].
        windows: where each row's window (one token before its first target, and its targets) begins, int64 [B].
        is_last: bool [B].
        firsts: rows that begin a document.
        odd: rows whose window is not all of one document, or would reach over the array's ends.
    """

    owners: IntArray
    group_ids: IntArray
    cell_index: IntArray
    windows: IntArray
    is_last: npt.NDArray[np.bool_]
    firsts: list[int]
    odd: list[int]


_OWNER, _GROUP_ID, _CELL_INDEX, _WINDOW = range(4)
_NONE: list[int] = []


class RowTable:
    """All rows of a plan, worked out in one go, so that a batch takes a few slices of it.

    Args:
        source: the open stream.
        plan: of N batches on L lanes.
        groups: the stream's group for each position that the plan counts in.
    """

    def __init__(self, source: OpenStream, plan: LanePlan, groups: IntArray) -> None:
        table = source.groups
        owners = groups[plan.groups] if len(groups) else plan.groups  # [N, L]; lanes that ended: any group
        cell_index = plan.cells - table.cell_offsets[owners]
        first_cells = table.first_cells[owners]
        is_first = (cell_index == 0) & (first_cells == 0)
        self._is_last = cell_index == table.num_cells[owners] - 1
        self._columns = np.stack([owners, table.group_ids[owners], cell_index, np.zeros_like(owners)], axis=1)
        is_odd = np.zeros(is_first.shape, dtype=np.bool_)
        if source.windows is not None:
            wanted = source.group_starts[owners] + cell_index * source.seq_len - 1
            self._columns[:, _WINDOW] = wanted.clip(0, len(source.windows) - 1)
            sizes = source.group_ends[owners] - (wanted + 1)
            is_odd = (sizes < source.seq_len) | (self._columns[:, _WINDOW] != wanted)
        self._firsts = _by_batch(is_first & (plan.cells >= 0))
        self._odd = _by_batch(is_odd & (plan.cells >= 0))

    def batch(self, index: int, num_rows: int) -> Rows:
        """The rows of a batch."""
        columns = self._columns[index, :, :num_rows].copy()
        return Rows(
            columns[_OWNER],
            columns[_GROUP_ID],
            columns[_CELL_INDEX],
            columns[_WINDOW],
            self._is_last[index, :num_rows].copy(),
            self._firsts.get(index, _NONE),
            self._odd.get(index, _NONE),
        )


def _by_batch(flags: npt.NDArray[np.bool_]) -> dict[int, list[int]]:
    """The lanes that are flagged, for each batch that has some."""
    found: dict[int, list[int]] = {}
    for batch, lane in np.argwhere(flags).tolist():
        found.setdefault(batch, []).append(lane)
    return found
