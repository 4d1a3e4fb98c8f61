"""Opening a stream: the documents of a split, and the groups of cells that they are cut into.

A cell k of a document covers its target tokens [k T, (k + 1) T), T = seq_len. A group is a document,
or a run of cells of one that is cut.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
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

    A pure function of the stream's relative path, the document's index and the fraction. A document
    that is held out at one fraction is also held out at every larger one.
    """
    base = np.uint64(stable_hash("holdout", relative_path))
    hashes = splitmix64(splitmix64(np.arange(num_documents, dtype=np.uint64)) ^ base)
    uniforms = (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return uniforms < fraction


def documents_of(split: Split, relative_path: str, num_documents: int, fraction: float) -> npt.NDArray[np.bool_]:
    if split == "all" or (split == "train" and fraction == 0.0):
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
    seq_len: Annotated[int, Limits(ge=1)]
    """Target tokens per cell, T."""
    max_group_cells: Annotated[int, Limits(ge=0)] = 0
    """Most cells per group; 0: documents are not cut."""
    split: Split = "train"
    holdout_fraction: Annotated[float, Limits(ge=0, lt=1)] = 0.0
    """With the split, which documents are used."""


def build_groups(lengths: Ints, kept: Ints, relative_path: str, cut: CutOptions) -> GroupTable:
    """Cut the `kept` documents of a stream, ascending, into groups; those without tokens are skipped.

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


@dataclass
class EpochCount:
    """Epochs of a source that were read since the last report."""

    read: float = 0.0
    is_known: bool = True  # whether nothing that was read is missing


@dataclass(frozen=True)
class OpenStream:
    """A stream, its documents, and the groups they are cut into."""

    stream: Stream
    documents: TokenTable
    groups: GroupTable
    seq_len: int
    num_bytes: int  # of its file, when it was opened
    epochs: EpochCount = field(default_factory=EpochCount)  # of its source
    epochs_per_token: float = 0.0  # of its source; without a token: of the file

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
        columns = groups, table.ids_of(groups, epoch), owners, first, sizes, begins
        lists = [column.tolist() for column in columns]
        return [*map(_new_handed, zip(repeat(epoch), repeat(self), *lists, strict=False))]

    @property
    def tokens_behind_cuts(self) -> tuple[int, int]:
        """(target tokens that follow a cut of their document, all target tokens)."""
        tokens = self.num_tokens()
        return int(tokens[self.groups.first_cells > 0].sum()), int(tokens.sum())


NOTHING: Mapping[str, OpenStream] = MappingProxyType({})  # by relative path


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
    path, count = stream.relative_path, documents.num_documents
    kept = np.flatnonzero(documents_of(cut.split, path, count, cut.holdout_fraction))
    groups = build_groups(documents.lengths, kept, path, cut)
    return OpenStream(stream, documents, groups, cut.seq_len, num_bytes)


def has_zero_halves(tokens: TokenArray) -> bool:
    """Whether nearly every second value is 0 and others are not: ids read with half their width."""
    if len(tokens) < 64 or tokens.itemsize == 8:
        return False
    size = SAMPLE_BYTES // tokens.itemsize
    # Both ends of the array, the second from an even place on.
    end = max((len(tokens) - size) // 2 * 2, size)
    sample = np.concatenate([tokens[:size], tokens[end:]])
    return bool((sample[1::2] == 0).mean() >= 0.99 and (sample[0::2] == 0).mean() <= 0.9)


class StreamOpener:
    """Opens the streams of a source, and warns of files that `eod` or `dtype` do not fit.

    With `warns` false, `warn` reports all that were opened; otherwise each kind is reported once.
    `in_memory` has, by relative path, streams that are no files.
    """

    def __init__(
        self,
        options: ReadOptions,
        cut: CutOptions,
        *,
        warns: bool = True,
        in_memory: Mapping[str, OpenStream] = NOTHING,
    ) -> None:
        self._options, self._cut, self._warns, self._in_memory = options, cut, warns, in_memory
        # Of each stream that was opened; None once they are reported.
        self._behind_cuts: list[tuple[int, int]] | None = []
        self.current: Stream | None = None  # being opened, or read from
        self._num_documents: dict[Stream, int] = {}
        # Option -> stream that it does not fit -> its text in the warning.
        self._doubtful: dict[str, dict[str, str]] = {"eod": {}, "dtype": {}}
        self._warned: set[str] = set()

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
        documents, eod = opened.documents, self._options.eod
        self._num_documents[stream] = documents.num_documents
        format = format_name(Path(stream.path), self._options.format)
        shown = f"{printable(stream.relative_path)} ({counted(len(documents.tokens), 'token')})"
        is_whole = takes_option(format, "eod") and documents.num_documents == 1
        # Where it occurs, an id that ends documents ends each but perhaps the last.
        if eod is not None and is_whole and documents.tokens[-1] != eod:
            self._doubtful["eod"][stream.relative_path] = shown
        if takes_option(format, "dtype") and has_zero_halves(documents.tokens):
            self._doubtful["dtype"][stream.relative_path] = shown
        if self._behind_cuts is not None:
            self._behind_cuts.append(opened.tokens_behind_cuts)
        if self._warns:
            self.warn()
        return opened

    def report_cuts(self) -> None:
        """Log, once, which share of the tokens of the streams opened so far lies behind a cut."""
        found, self._behind_cuts = self._behind_cuts, None
        if found and self._warns and any(behind for behind, _ in found):
            behind, tokens = map(sum, zip(*found, strict=True))
            text = "source %s: of the tokens of %s opened first, %.1f %% follow a cut of their "
            text += "document: their state reaches back to the cut, at most %s tokens (data.max_group_cells)"
            reach = f"{self._cut.max_group_cells * self._cut.seq_len:,}"
            streams = counted(len(found), "stream")
            logger.info(text, self._cut.namespace, streams, 100 * behind / tokens, reach)

    def warn(self) -> None:
        """Warn, once of either, of the opened files that lack `eod` or have a doubtful `dtype`."""
        eod, dtype = self._options.eod, self._options.dtype
        texts = {
            "eod": f"eod = {eod} does not occur in %s: such a file is one document; check the id",
            "dtype": f'dtype = "{dtype}" gives 0 as every second id in %s: check whether it is wider',
        }
        for option, files in self._doubtful.items():
            if files and option not in self._warned:
                self._warned.add(option)
                place = f"{len(files):,} of {len(self._num_documents):,} files, {few(list(files.values()))}"
                logger.warning(f"source %s: {texts[option]}", self._cut.namespace, place)

    def nothing_left(self, key: str, problem: str) -> UserError:
        fix = "change holdout_fraction or the paths"
        are_whole = max(self._num_documents.values(), default=0) == 1
        if self._cut.holdout_fraction and are_whole:
            problem += ": each file is one document, and documents are held out whole"
            fix = f"set eod or text_split so that files are split, or {fix}"
        return UserError(key, problem, fix)
