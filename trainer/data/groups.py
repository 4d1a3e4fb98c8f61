"""Which documents are held out from training: a pure function of a stable hash.

Packing several documents that are shorter than a cell into one row.

Cutting a stream's documents into groups of cells.

A cell k of a document covers its target tokens [k T, (k + 1) T), T = seq_len. A group is a run of at most
`max_group_cells` cells of one document, or, with packing, one row of several documents that are shorter than a cell.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from trainer.arrays import Ints
from trainer.data.keyed import stable_hash
from trainer.errors import UserError
from trainer.hashing import splitmix64

Split: TypeAlias = Literal["train", "holdout", "all"]
SPLITS: tuple[Split, ...] = ("train", "holdout", "all")


def check_split(split: str, fraction: float) -> None:
    """Raise UserError unless the split is known and the fraction lies in [0, 1)."""
    if split not in SPLITS:
        raise UserError("split", f"must be one of {', '.join(SPLITS)}; got {split!r}")
    if not 0.0 <= fraction < 1.0:
        raise UserError("holdout_fraction", f"must be at least 0 and less than 1, got {fraction}")


def held_out(relative_path: str, num_documents: int, fraction: float) -> npt.NDArray[np.bool_]:
    """For each document of a stream, whether it is held out; bool [num_documents].

    This depends only on the stream's relative path, the document's index and the fraction. A document that is held out
    at one fraction is also held out at every larger one.
    """
    base = np.uint64(stable_hash("holdout", relative_path))
    hashes = splitmix64(splitmix64(np.arange(num_documents, dtype=np.uint64)) ^ base)
    uniforms = (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return uniforms < fraction


def documents_of(split: Split, relative_path: str, num_documents: int, fraction: float) -> npt.NDArray[np.bool_]:
    """The documents of a split; bool [num_documents]."""
    if split == "all" or (split == "train" and fraction == 0.0):
        return np.ones(num_documents, dtype=np.bool_)
    held = held_out(relative_path, num_documents, fraction)
    return held if split == "holdout" else ~held


def pack_rows(lengths: Ints, capacity: int) -> Ints:
    """Best-fit decreasing: the row of each document, int64 [n]; no row holds more than `capacity` tokens.

    Rows are numbered in the order of their first documents. The free room of all open rows is one bit set, so that the
    fullest row that still fits is found in a few machine operations.
    """
    rows_with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r is set where a row with room r is open
    row_of = np.empty(len(lengths), dtype=np.int64)
    num_rows = 0
    order = np.argsort(-lengths, kind="stable")
    for document, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = rows_with_room[room].pop()
            if not rows_with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, row = capacity, num_rows
            num_rows += 1
        row_of[document] = row
        left = room - length
        if left:
            rows_with_room[left].append(row)
            rooms |= 1 << left
    first = np.full(num_rows, len(lengths), dtype=np.int64)
    np.minimum.at(first, row_of, np.arange(len(lengths)))
    number = np.empty(num_rows, dtype=np.int64)
    number[np.argsort(first)] = np.arange(num_rows)
    return number[row_of]


@dataclass(frozen=True)
class GroupTable:
    """The groups of a stream in file order, G of them.

    Args:
        namespace, relative_path: ids are made of them, see `group_ids`.
        documents: the group's document (of a packed row: its first), int64 [G].
        first_cells: the document's cell at which the group begins, int64 [G].
        num_cells: int64 [G].
        cell_offsets: the stream's cell at which the group begins, int64 [G + 1].
        segment_offsets: where a packed row's documents are in `segment_documents`, int64 [G + 1]; an empty range for
            groups that are not packed.
        segment_documents: int64 [packed documents].
    """

    namespace: str
    relative_path: str
    documents: Ints
    first_cells: Ints
    num_cells: Ints
    cell_offsets: Ints
    segment_offsets: Ints
    segment_documents: Ints

    @property
    def num_groups(self) -> int:
        """G."""
        return len(self.documents)

    def ids_of(self, groups: Ints) -> Ints:
        """Stable 63-bit ids of some groups, in the shape of `groups`."""
        return group_ids(self.namespace, self.relative_path, self.documents[groups], self.first_cells[groups])

    @cached_property
    def group_ids(self) -> Ints:
        """The ids of all groups, int64 [G]."""
        return self.ids_of(np.arange(self.num_groups))


def group_ids(namespace: str, relative_path: str, documents: Ints, first_cells: Ints) -> Ints:
    """Ids in [0, 2^63) from the source's name, the stream's relative path, the document index and the first cell.

    They do not depend on other streams, so adding one never changes an id.
    """
    base = np.uint64(stable_hash("group", namespace, relative_path))
    mixed = splitmix64(documents.astype(np.uint64) ^ base)
    mixed = splitmix64(mixed + splitmix64(first_cells.astype(np.uint64)))
    return (mixed >> np.uint64(1)).astype(np.int64)


def _offsets(counts: Ints) -> Ints:
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def _runs(documents: Ints, lengths: Ints, seq_len: int, max_cells: int) -> tuple[Ints, Ints, Ints]:
    """(document, first cell, number of cells) of each run of the documents' cells."""
    cells = -(-lengths // seq_len)
    if cells.max(initial=0) <= max_cells:
        return documents, np.zeros(len(documents), np.int64), cells
    counts = -(-cells // max_cells)
    owner = np.repeat(np.arange(len(documents)), counts)
    first = (np.arange(len(owner)) - np.repeat(_offsets(counts)[:-1], counts)) * max_cells
    return documents[owner], first, np.minimum(max_cells, cells[owner] - first)


def build_groups(
    lengths: Ints,
    kept: Ints,
    *,
    namespace: str,
    relative_path: str,
    seq_len: int,
    max_group_cells: int,
    pack: bool,
) -> GroupTable:
    """Cut documents into groups.

    Args:
        lengths: tokens of every document of the stream, int64 [num_documents].
        kept: indices of the documents to use, ascending; those without tokens are skipped.
        namespace: the source's name; two sources that read the same file do not share groups.
        relative_path: the stream's.
        seq_len: target tokens per cell.
        max_group_cells: most cells per group.
        pack: put documents shorter than a cell together.
    """
    # A gather over millions of documents costs more than the check that it is not needed.
    sizes = lengths if len(kept) == len(lengths) else lengths[kept]
    if sizes.min(initial=1) == 0:
        kept, sizes = kept[sizes > 0], sizes[sizes > 0]
    segments = sizes_of_rows = np.empty(0, np.int64)
    if pack and (is_short := sizes < seq_len).any():
        short, kept, sizes = kept[is_short], kept[~is_short], sizes[~is_short]
        row_of = pack_rows(lengths[short], seq_len)
        segments = short[np.argsort(row_of, kind="stable")]
        sizes_of_rows = np.bincount(row_of).astype(np.int64)
    documents, first, cells = _runs(kept, sizes, seq_len, max_group_cells)
    segment_offsets = np.zeros(len(documents) + 1, np.int64)
    if len(segments):
        leaders = segments[_offsets(sizes_of_rows)[:-1]]
        documents = np.concatenate([documents, leaders])
        first = np.concatenate([first, np.zeros(len(leaders), np.int64)])
        cells = np.concatenate([cells, np.ones(len(leaders), np.int64)])
        num_segments = np.concatenate([np.zeros(len(documents) - len(leaders), np.int64), sizes_of_rows])
        # Packed rows are in the order of their leaders, which sorting keeps: `segments` needs no reordering.
        order = np.lexsort((first, documents))
        documents, first, cells = documents[order], first[order], cells[order]
        segment_offsets = _offsets(num_segments[order])
    return GroupTable(
        namespace=namespace,
        relative_path=relative_path,
        documents=documents,
        first_cells=first,
        num_cells=cells,
        cell_offsets=_offsets(cells),
        segment_offsets=segment_offsets,
        segment_documents=segments,
    )
