"""Opening a stream: its documents, those of the split, and the groups of cells that they are cut into.

A cell k of a document covers its target tokens [k T, (k + 1) T), T = seq_len. A group is a document, or a run of cells of one
that is cut. Which documents are held out from training is a pure function of a stable hash.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import repeat
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from trainer.arrays import Flags, Ints
from trainer.data.documents import ReadOptions, TokenArray, TokenTable
from trainer.data.formats import format_name, load_documents, takes_option
from trainer.data.layout import Stream
from trainer.errors import UserError
from trainer.hashing import splitmix64, stable_hash
from trainer.options import Limits, Options, part_options
from trainer.wording import counted, few, printable

Split: TypeAlias = Literal["train", "holdout", "all"]
SAMPLE_BYTES = 1 << 16  # at either end of a file whose dtype is doubted
logger = logging.getLogger("trainer.data")


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


@dataclass(frozen=True)
class GroupTable:
    """The groups of a stream in file order, G of them.

    Args:
        namespace, relative_path: ids are made of them, see `ids_of`.
        documents: the group's document, int64 [G].
        first_cells: the document's cell at which the group begins, int64 [G].
        num_cells: int64 [G].
    """

    namespace: str
    relative_path: str
    documents: Ints
    first_cells: Ints
    num_cells: Ints

    @property
    def num_groups(self) -> int:
        """G."""
        return len(self.documents)

    def ids_of(self, groups: Ints, epoch: int = 0) -> Ints:
        """Ids in [0, 2^63) of some groups, in their shape: of the source's name, the stream's path, document and first cell.

        They do not depend on other streams, so adding one never changes an id. Where epochs overlap, a group has another id in
        each.
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
    """The source's name, part of every group id: two sources that read the same file do not share groups."""
    seq_len: Annotated[int, Limits(ge=1)]
    """Target tokens per cell, T."""
    max_group_cells: Annotated[int, Limits(ge=0)] = 0
    """Most cells per group; 0: documents are not cut."""
    split: Split = "train"
    holdout_fraction: Annotated[float, Limits(ge=0, lt=1)] = 0.0
    """With the split, which documents are used."""


def _runs(documents: Ints, lengths: Ints, cut: CutOptions) -> tuple[Ints, Ints, Ints]:
    """(document, first cell, number of cells) of each run of the documents' cells."""
    cells = -(-lengths // cut.seq_len)
    if not cut.max_group_cells or cells.max(initial=0) <= cut.max_group_cells:
        return documents, np.zeros(len(documents), np.int64), cells
    counts = -(-cells // cut.max_group_cells)
    owner = np.repeat(np.arange(len(documents)), counts)
    first = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * cut.max_group_cells
    return documents[owner], first, np.minimum(cut.max_group_cells, cells[owner] - first)


def build_groups(lengths: Ints, kept: Ints, relative_path: str, cut: CutOptions) -> GroupTable:
    """Cut the documents of a stream into groups.

    Args:
        lengths: tokens of every document of the stream, int64 [num_documents].
        kept: indices of the documents to use, ascending; those without tokens are skipped.
    """
    # A gather over millions of documents costs more than the check that it is not needed.
    sizes = lengths if len(kept) == len(lengths) else lengths[kept]
    if sizes.min(initial=1) == 0:
        kept, sizes = kept[sizes > 0], sizes[sizes > 0]
    documents, first, cells = _runs(kept, sizes, cut)
    return GroupTable(cut.namespace, relative_path, documents, first, cells)


class Handed(NamedTuple):
    """A group that a lane is to read: `num_tokens` tokens from `begin` on in the stream, from `first` on in its document."""

    epoch: int
    source: OpenStream
    group: int
    group_id: int
    document: int
    first: int
    num_tokens: int
    begin: int


_new_handed = partial(tuple.__new__, Handed)  # in half the time of the class itself


@dataclass
class EpochCount:
    """Epochs of a source that were read and not reported yet; see `OpenStream.epochs_per_token`."""

    read: float = 0.0


@dataclass(frozen=True)
class OpenStream:
    """A stream, its documents, and the groups they are cut into; `num_bytes` is the size of its file when it was opened,
    `file_share` that in the sizes of all files of its source, whose count is `epochs`."""

    stream: Stream
    documents: TokenTable
    groups: GroupTable
    seq_len: int
    num_bytes: int
    file_share: float = 0.0
    epochs: EpochCount = field(default_factory=EpochCount)

    @cached_property
    def epochs_per_token(self) -> float:
        """The part of an epoch of the source that is read with a token of this stream; 0 if it has none."""
        return self.file_share / max(int(self.num_tokens().sum()), 1)

    def num_tokens(self, groups: Ints | Flags | slice = slice(None)) -> Ints:
        """Target tokens of some groups, or of all; int64 [n]."""
        table, lengths = self.groups, self.documents.lengths
        left = lengths[table.documents[groups]] - table.first_cells[groups] * self.seq_len
        found: Ints = np.minimum(left, table.num_cells[groups] * self.seq_len)
        return found

    def hand(self, groups: Ints, epoch: int) -> list[Handed]:
        """Some groups, in that order."""
        owners, first = self.groups.documents[groups], self.groups.first_cells[groups] * self.seq_len
        begins = self.documents.starts[owners] + first
        columns = groups, self.groups.ids_of(groups, epoch), owners, first, self.num_tokens(groups), begins
        rows = zip(repeat(epoch), repeat(self), *(column.tolist() for column in columns), strict=False)
        return [*map(_new_handed, rows)]

    @property
    def tokens_behind_cuts(self) -> tuple[int, int]:
        """(target tokens that follow a cut of their document, all target tokens)."""
        tokens = self.num_tokens()
        return int(tokens[self.groups.first_cells > 0].sum()), int(tokens.sum())


def file_bytes(stream: Stream) -> int:
    """The size of the file that is read; 0 if there is none."""
    path = stream.tokens or stream.path
    return os.stat(path).st_size if os.path.exists(path) else 0


def open_stream(stream: Stream, options: ReadOptions, cut: CutOptions) -> OpenStream:
    """Read a stream's file and cut it into groups; a UserError if it is unreadable or damaged."""
    if stream.tokens:
        options = ReadOptions(options.tokenizer, format="megatron")
    num_bytes = file_bytes(stream)  # before it is read, so that nothing is cut unseen
    documents = load_documents(stream.tokens or stream.path, options)
    is_kept = documents_of(cut.split, stream.relative_path, documents.num_documents, cut.holdout_fraction)
    kept = np.flatnonzero(is_kept)
    groups = build_groups(documents.lengths, kept, stream.relative_path, cut)
    return OpenStream(stream, documents, groups, cut.seq_len, num_bytes)


def has_zero_halves(tokens: TokenArray) -> bool:
    """Whether nearly every second value is 0, and not nearly all others: as when ids are read with less than their width.

    Looks at both ends of the array. Values that are mostly 0 at odd and even places are no such case.
    """
    size = SAMPLE_BYTES // tokens.itemsize
    if len(tokens) < 64 or tokens.itemsize == 8:
        return False
    last = max(len(tokens) - size, 0) // 2 * 2
    sample = np.concatenate([tokens[:size], tokens[max(last, size) :] if last else tokens[:0]])
    return bool((sample[1::2] == 0).mean() >= 0.99 and (sample[0::2] == 0).mean() <= 0.9)


class StreamOpener:
    """Opens the streams of a source, counts their documents, and warns of files that `eod` or `dtype` do not fit.

    With `warns` false, `warn` reports all that were opened, otherwise the first of either kind is warned of.
    `in_memory` has, by relative path, streams that are no files.
    """

    def __init__(
        self,
        options: ReadOptions,
        cut: CutOptions,
        *,
        warns: bool = True,
        in_memory: Mapping[str, OpenStream] = MappingProxyType({}),
    ) -> None:
        self._options, self._cut, self._warns, self._in_memory = options, cut, warns, in_memory
        self._behind_cuts: list[tuple[int, int]] | None = []  # of each stream that was opened; None: it was said
        self.current: Stream | None = None  # being opened, or read from
        self._num_documents: dict[Stream, int] = {}
        # Option -> names of the streams that it does not fit, with their tokens.
        self._doubtful: dict[str, dict[str, int]] = {"eod": {}, "dtype": {}}
        self._has_said: set[str] = set()

    def __call__(self, stream: Stream) -> OpenStream:
        """The stream, opened; see `open_stream`."""
        self.current = stream
        if stream.relative_path in self._in_memory:
            return self._in_memory[stream.relative_path]
        try:
            opened = open_stream(stream, self._options, self._cut)
        except UserError as error:
            error.where = f"source {self._cut.namespace}"
            raise
        documents, name = opened.documents, format_name(Path(stream.path), self._options.format)
        self._num_documents[stream] = documents.num_documents
        # Where it occurs, an id that ends documents ends each but perhaps the last.
        eod, is_split = self._options.eod, takes_option(name, "eod")
        if eod is not None and is_split and documents.num_documents == 1 and documents.tokens[-1] != eod:
            self._doubtful["eod"][stream.relative_path] = len(documents.tokens)
        if takes_option(name, "dtype") and has_zero_halves(documents.tokens):
            self._doubtful["dtype"][stream.relative_path] = len(documents.tokens)
        if self._behind_cuts is not None:
            self._behind_cuts.append(opened.tokens_behind_cuts)
        if self._warns:
            self.warn()
        return opened

    def say_cuts(self) -> None:
        """Say, once, which share of the tokens of the streams opened so far lies behind a cut."""
        found, self._behind_cuts = self._behind_cuts, None
        if found and self._warns and any(behind for behind, _ in found):
            behind, tokens = map(sum, zip(*found, strict=True))
            text = "source %s: of the tokens of %s opened first, %.1f %% follow a cut of their document: "
            text += "their state reaches back to the cut, at most %s tokens (data.max_group_cells)"
            reach = f"{self._cut.max_group_cells * self._cut.seq_len:,}"
            logger.info(text, self._cut.namespace, counted(len(found), "stream"), 100 * behind / tokens, reach)

    def warn(self) -> None:
        """Warn of the opened files that `eod` does not occur in, and of those of a doubtful `dtype`; once of either."""
        texts = {
            "eod": f"eod = {self._options.eod} does not occur in %s: such a file is one document; check the id",
            "dtype": f'dtype = "{self._options.dtype}" gives 0 as every second id in %s: check whether it is wider',
        }
        for option, text in texts.items():
            if (files := self._doubtful[option]) and option not in self._has_said:
                self._has_said.add(option)
                names = few([f"{printable(name)} ({counted(tokens, 'token')})" for name, tokens in files.items()])
                place = f"{len(files):,} of {len(self._num_documents):,} files, {names}"
                logger.warning(f"source %s: {text}", self._cut.namespace, place)

    def nothing_left(self, key: str, problem: str) -> UserError:
        """The error for a split without documents."""
        fix = "change holdout_fraction or the paths"
        if self._cut.holdout_fraction and self._num_documents and max(self._num_documents.values()) == 1:
            problem += ": each file is one document, and documents are held out whole"
            fix = f"set eod or text_split so that files are split, or {fix}"
        return UserError(key, problem, fix)
