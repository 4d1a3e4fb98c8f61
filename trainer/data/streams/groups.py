"""Cutting a stream's documents into groups of cells.

A cell k of a document covers its target tokens [k T, (k + 1) T), T = seq_len. A group is a run of at most
`max_group_cells` cells of one document, or, with packing, one row of several documents that are shorter than a cell.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trainer.arrays import Ints
from trainer.data.keyed import stable_hash
from trainer.data.streams.packing import pack_rows
from trainer.hashing import splitmix64


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
