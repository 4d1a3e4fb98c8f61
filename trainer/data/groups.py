"""Cutting a stream's documents into groups of cells.

A cell k of a document covers its target tokens [k T, (k + 1) T), T = seq_len. A group is a run of at most
`max_group_cells` cells of one document, or, with packing, one row of several documents that are shorter than a cell.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainer.data.keyed import IntArray, mix64, stable_hash
from trainer.data.packing import pack_rows


@dataclass(frozen=True)
class GroupTable:
    """The groups of a stream in file order; G groups, C cells.

    Args:
        group_ids: stable 63-bit ids, int64 [G].
        documents: the group's document (of a packed row: its first), int64 [G].
        first_cells: the document's cell at which the group begins, int64 [G].
        num_cells: int64 [G].
        cell_offsets: the stream's cell at which the group begins, int64 [G + 1].
        segment_offsets: where a packed row's documents lie in `segment_documents`, int64 [G + 1]; empty runs for
            groups that are not packed.
        segment_documents: int64 [packed documents].
    """

    group_ids: IntArray
    documents: IntArray
    first_cells: IntArray
    num_cells: IntArray
    cell_offsets: IntArray
    segment_offsets: IntArray
    segment_documents: IntArray

    @property
    def num_groups(self) -> int:
        """G."""
        return len(self.group_ids)


def group_ids(namespace: str, relative_path: str, documents: IntArray, first_cells: IntArray) -> IntArray:
    """Ids in [0, 2^63) from the source's name, the stream's relative path, the document index and the run's start.

    Other streams do not enter, so adding one never renames a group.
    """
    base = np.uint64(stable_hash("group", namespace, relative_path))
    mixed = mix64(documents.astype(np.uint64) ^ base)
    mixed = mix64(mixed + mix64(first_cells.astype(np.uint64)))
    return (mixed >> np.uint64(1)).astype(np.int64)


def _offsets(counts: IntArray) -> IntArray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def _runs(documents: IntArray, lengths: IntArray, seq_len: int, max_cells: int) -> tuple[IntArray, IntArray, IntArray]:
    """(document, first cell, number of cells) of each run of the documents' cells."""
    cells = -(-lengths // seq_len)
    counts = -(-cells // max_cells)
    owner = np.repeat(np.arange(len(documents)), counts)
    first = (np.arange(len(owner)) - np.repeat(_offsets(counts)[:-1], counts)) * max_cells
    return documents[owner], first, np.minimum(max_cells, cells[owner] - first)


def build_groups(
    lengths: IntArray,
    kept: IntArray,
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
        kept: indices of the documents to use, ascending; those without tokens are left out.
        namespace: the source's name; two sources that read the same file do not share groups.
        relative_path: the stream's.
        seq_len: target tokens a cell.
        max_group_cells: most cells a group.
        pack: put documents shorter than a cell together.
    """
    kept = kept[lengths[kept] > 0]
    is_short = (lengths[kept] < seq_len) & pack
    documents, first, cells = _runs(kept[~is_short], lengths[kept[~is_short]], seq_len, max_group_cells)
    short = kept[is_short]
    row_of = pack_rows(lengths[short], seq_len)
    segments = short[np.argsort(row_of, kind="stable")]
    row_sizes = np.bincount(row_of, minlength=0).astype(np.int64)
    leaders = segments[_offsets(row_sizes)[:-1]]

    documents = np.concatenate([documents, leaders])
    first = np.concatenate([first, np.zeros(len(leaders), np.int64)])
    cells = np.concatenate([cells, np.ones(len(leaders), np.int64)])
    sizes = np.concatenate([np.zeros(len(documents) - len(leaders), np.int64), row_sizes])
    # The packed rows are in the order of their leaders, and sorting keeps that: `segments` needs no reordering.
    order = np.lexsort((first, documents))
    documents, first, cells, sizes = documents[order], first[order], cells[order], sizes[order]
    return GroupTable(
        group_ids=group_ids(namespace, relative_path, documents, first),
        documents=documents,
        first_cells=first,
        num_cells=cells,
        cell_offsets=_offsets(cells),
        segment_offsets=_offsets(sizes),
        segment_documents=segments,
    )
