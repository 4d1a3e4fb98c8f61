"""The rows of a reader's batches: which cell each row is, and where its tokens are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trainer.arrays import Flags, Ints
from trainer.data.streams.lanes import LanePlan
from trainer.data.streams.open_stream import OpenStream

_NONE: list[int] = []


class Rows(NamedTuple):
    """The rows of one batch, B of them. The arrays are views of memory that no other batch shares.

    Attributes:
        owners: the stream's group of each row, int64 [B].
        group_ids: int64 [B].
        cell_index: int64 [B].
        windows: where each row's window (the token before its first target, and its targets) begins, int64 [B].
        is_last: bool [B].
        firsts: rows that begin a document.
        odd: rows whose window is not entirely of one document, or extends past either end of the array.
        ids_text, cells_text: `group_ids` and `cell_index` as JSON, without brackets.
    """

    owners: Ints
    group_ids: Ints
    cell_index: Ints
    windows: Ints
    is_last: Flags
    firsts: list[int]
    odd: list[int]
    ids_text: str
    cells_text: str


def rows_of_batches(source: OpenStream, plan: LanePlan, groups: Ints, start: int, stop: int) -> list[Rows]:
    """The rows of the batches [start, stop) of a plan, computed together so that each batch costs a few slices.

    Args:
        source: the open stream.
        plan: lays groups on L lanes.
        groups: the stream's group at each position that the plan counts, int64.
        start, stop: a range of the plan's batches.
    """
    table, documents = source.groups, source.documents
    cells, positions = plan.rows(start, stop)
    is_row = cells >= 0
    owners = groups[positions]  # [N, L]; arbitrary where a lane has ended
    cell_index = cells - table.cell_offsets[owners]
    first_cells, owner_documents = table.first_cells[owners], table.documents[owners]
    is_first = (cell_index == 0) & (first_cells == 0)
    windows = np.zeros_like(owners)
    is_odd = np.zeros(is_first.shape, dtype=np.bool_)
    if source.windows is not None:
        begins = documents.starts[owner_documents]
        wanted = begins + (first_cells + cell_index) * source.seq_len - 1
        windows = wanted.clip(0, len(source.windows) - 1)
        left = begins + documents.lengths[owner_documents] - (wanted + 1)
        is_odd = (left < source.seq_len) | (windows != wanted)
    is_last = cell_index == table.num_cells[owners] - 1
    group_ids = table.ids_of(owners)
    columns = [owners, group_ids, cell_index, windows, is_last]
    sizes: list[int] = is_row.sum(axis=1).tolist()
    full = sizes.count(cells.shape[1])  # after these, lanes end one by one; those that still run come first
    ragged = sizes[full:]
    if ragged:
        columns = [[*c[:full], *(row[:n] for row, n in zip(c[full:], ragged, strict=True))] for c in columns]
    texts = [_texts(group_ids, sizes, full), _texts(cell_index, sizes, full)]
    return list(map(Rows, *columns, _by_batch(is_first & is_row), _by_batch(is_odd & is_row), *texts))


def _by_batch(flags: Flags) -> list[list[int]]:
    """The flagged lanes of each batch; batches without any share one empty list."""
    found = [_NONE] * len(flags)
    for place in np.flatnonzero(flags.ravel()).tolist():
        batch, lane = divmod(place, flags.shape[1])
        found[batch] = [*found[batch], lane]
    return found


def _texts(numbers: Ints, sizes: list[int], full: int) -> list[str]:
    """Each batch's numbers as JSON, without brackets; the first `full` batches have a number on every lane.

    Those are rendered at once and split at the brackets; a batch with the same numbers as the one before shares its text.
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
