"""Opening a stream: the documents of a split, and the groups of cells that they are cut into.

A cell k of a document covers its target tokens [k T, (k + 1) T), T = seq_len. A group is a
document, or a run of cells of one that is cut. Rows without gaps end anywhere in a cell.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Annotated, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field

from trainer.arrays import Flags, Ints, splitmix64, stable_hash
from trainer.data.documents import ReadOptions, TokenTable
from trainer.data.formats import load_documents
from trainer.data.layout import Stream
from trainer.errors import UserError
from trainer.options import Options, part_options

Split: TypeAlias = Literal["train", "holdout"]


def held_out(relative_path: str, num_documents: int, fraction: float) -> npt.NDArray[np.bool_]:
    """For each document of a stream, whether it is held out; bool [num_documents].

    A pure function of the stream's relative path, the document's index and the fraction. A document
    that is held out at one fraction is also held out at every larger one.
    """
    base = np.uint64(stable_hash("holdout", relative_path))
    hashes = splitmix64(splitmix64(np.arange(num_documents, dtype=np.uint64)) ^ base)
    return (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53 < fraction


def documents_of(split: Split, relative_path: str, num_documents: int, fraction: float) -> npt.NDArray[np.bool_]:
    """Which documents of a stream are of a split, bool [num_documents]; see `held_out`."""
    if split == "train" and fraction == 0.0:  # hashing millions of documents takes seconds
        return np.ones(num_documents, dtype=np.bool_)
    held = held_out(relative_path, num_documents, fraction)
    return held if split == "holdout" else ~held


@dataclass(frozen=True)
class GroupTable:
    """The G groups of a stream in file order; namespace and path are parts of their ids."""

    namespace: str
    relative_path: str
    documents: Ints  # int64 [G]
    first_cells: Ints  # the document's cell at which the group begins, int64 [G]
    num_cells: Ints  # int64 [G]

    @property
    def num_groups(self) -> int:
        return len(self.documents)

    def ids_of(self, groups: Ints, epoch: int = 0) -> Ints:
        """Ids in [0, 2^63) of some groups, in their shape: of names, document, cell and epoch.

        They do not depend on other streams, so adding one never changes an id.
        """
        base = np.uint64(stable_hash("group", self.namespace, self.relative_path))
        mixed = splitmix64(self.documents[groups].astype(np.uint64) ^ base)
        mixed = splitmix64(mixed + splitmix64(self.first_cells[groups].astype(np.uint64)))
        if epoch:
            mixed = splitmix64(mixed + np.uint64(epoch))
        return (mixed >> np.uint64(1)).astype(np.int64)


@part_options
class CutOptions(Options):
    """How documents become groups."""

    namespace: str
    """The source's name, part of group ids: two sources of the same file share no groups."""
    seq_len: Annotated[int, Field(ge=1)]
    """Target tokens per cell, T."""
    max_group_cells: Annotated[int, Field(ge=0)] = 0
    """Most cells per group; 0: documents are not cut."""
    split: Split = "train"
    holdout_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """With the split, which documents are used."""


def build_groups(lengths: Ints, kept: Ints, relative_path: str, cut: CutOptions) -> GroupTable:
    """Cut the `kept` documents of a stream, ascending, into groups, but for empty ones.

    `lengths`: tokens of every document of the stream, int64 [num_documents].
    """
    # A gather over millions of documents costs more than the check that it is not needed.
    sizes = lengths if len(kept) == len(lengths) else lengths[kept]
    if sizes.min(initial=1) == 0:
        kept, sizes = kept[sizes > 0], sizes[sizes > 0]
    first, cells = np.zeros(len(kept), np.int64), -(-sizes // cut.seq_len)
    most = cut.max_group_cells
    if most and cells.max(initial=0) > most:
        counts = -(-cells // most)
        owner = np.repeat(np.arange(len(kept)), counts)
        first = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * most
        kept, cells = kept[owner], np.minimum(most, cells[owner] - first)
    return GroupTable(cut.namespace, relative_path, kept, first, cells)


class Handed(NamedTuple):
    """A group for a lane to read."""

    epoch: int
    source: OpenStream
    group: int
    group_id: int
    document: int
    first: int  # its first token in the document
    num_tokens: int
    begin: int  # and in the stream


_new_handed = partial(tuple.__new__, Handed)  # in half the time of the class itself


@dataclass(frozen=True)
class OpenStream:
    """A stream, its documents, and the groups they are cut into."""

    stream: Stream
    documents: TokenTable
    groups: GroupTable
    seq_len: int
    num_bytes: int  # of its file, when it was opened

    def num_tokens(self, groups: Ints | Flags | slice = slice(None)) -> Ints:
        """Target tokens of some groups, or of all; int64 [n]."""
        table, lengths = self.groups, self.documents.lengths
        left = lengths[table.documents[groups]] - table.first_cells[groups] * self.seq_len
        found: Ints = np.minimum(left, table.num_cells[groups] * self.seq_len)
        return found

    def hand(self, groups: Ints, epoch: int) -> list[Handed]:
        """Some groups, in that order."""
        table = self.groups
        owners, first = table.documents[groups], table.first_cells[groups] * self.seq_len
        begins, sizes = self.documents.starts[owners] + first, self.num_tokens(groups)
        # In the order of `Handed`'s fields, behind epoch and source; nothing checks it.
        columns = groups, table.ids_of(groups, epoch), owners, first, sizes, begins
        lists = [column.tolist() for column in columns]
        return [*map(_new_handed, zip(repeat(epoch), repeat(self), *lists, strict=False))]


def file_bytes(stream: Stream) -> int:
    """The size of the file that is read; 0 if there is none."""
    path = stream.tokens or stream.path
    return os.stat(path).st_size if os.path.exists(path) else 0


def open_stream(stream: Stream, options: ReadOptions, cut: CutOptions) -> OpenStream:
    """Read a stream's file and cut it into groups; a UserError if it is unreadable or damaged."""
    if stream.tokens:
        options = replace(options, format="megatron")
    num_bytes = file_bytes(stream)  # before it is read, so that nothing is cut unseen
    try:
        documents = load_documents(stream.tokens or stream.path, options)
    except UserError as error:
        error.where = f"source {cut.namespace}"
        if stream.tokens:  # not the user's file
            error.fix = f"delete {os.path.dirname(stream.tokens)}: a run makes it again"
        raise
    path, count = stream.relative_path, documents.num_documents
    kept = np.flatnonzero(documents_of(cut.split, path, count, cut.holdout_fraction))
    groups = build_groups(documents.lengths, kept, path, cut)
    return OpenStream(stream, documents, groups, cut.seq_len, num_bytes)


def nothing_left(key: str) -> UserError:
    """The error for a source without a document to read."""
    fix = "change the paths or holdout_fraction, or set eod or text_split so that files are split"
    return UserError(key, "no document is left to read", fix)
