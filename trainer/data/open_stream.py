"""Opening streams: reading their documents and cutting them into groups.

Opening the streams of one source, with what is to be said of files that are one document each."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from trainer.data.documents import ReadOptions, TokenArray, TokenTable
from trainer.data.formats import format_name, load_documents, takes_option
from trainer.data.groups import GroupTable, Split, build_groups, documents_of
from trainer.data.layout import Stream
from trainer.data.token_formats import has_zero_halves
from trainer.errors import UserError
from trainer.wording import counted, few, printable


@dataclass(frozen=True)
class OpenStream:
    """A stream, its documents, and the groups they are cut into; `num_bytes` is the size of its file when it was opened."""

    stream: Stream
    documents: TokenTable
    groups: GroupTable
    seq_len: int
    num_bytes: int

    def check_size(self) -> None:
        """Check, before it is read from, that the file is as long as it was: the pages of a mapped file that are cut off end
        the process at a touch (SIGBUS). A file that is gone stays readable where it is mapped.

        Raises:
            UserError: the file is shorter.
        """
        size = _size(self.stream.tokens or self.stream.path)
        if size is not None and size < self.num_bytes:
            problem = f"was cut from {self.num_bytes} to {size} bytes during the run"
            raise UserError(printable(self.stream.path), problem, "put the file back, and resume")

    @cached_property
    def windows(self) -> TokenArray | None:
        """All windows of seq_len + 1 tokens, a view [N - seq_len, seq_len + 1]; None if the file has fewer tokens."""
        tokens = self.documents.tokens
        return sliding_window_view(tokens, self.seq_len + 1) if len(tokens) > self.seq_len else None


@dataclass(frozen=True)
class CutOptions:
    """How documents become groups.

    Args:
        namespace: the source's name, part of every group id.
        seq_len, max_group_cells, pack: see `build_groups`.
        split, holdout_fraction: which documents are used.
    """

    namespace: str
    seq_len: int
    max_group_cells: int
    pack: bool
    split: Split
    holdout_fraction: float


def open_stream(stream: Stream, *, format: str, options: ReadOptions, cut: CutOptions) -> OpenStream:
    """Read a stream's file and cut it into groups.

    Raises:
        UserError: the file is unreadable or damaged.
    """
    path = stream.tokens or stream.path
    if stream.tokens:
        format, options = "megatron", ReadOptions(options.tokenizer)
    num_bytes = _size(path) or 0  # before it is read, so that nothing is cut off unseen
    documents = load_documents(path, format, options)
    kept = documents_of(cut.split, stream.relative_path, documents.num_documents, cut.holdout_fraction)
    groups = build_groups(
        documents.lengths,
        np.flatnonzero(kept),
        namespace=cut.namespace,
        relative_path=stream.relative_path,
        seq_len=cut.seq_len,
        max_group_cells=cut.max_group_cells,
        pack=cut.pack,
    )
    return OpenStream(stream, documents, groups, cut.seq_len, num_bytes)


def _size(path: str) -> int | None:
    """Bytes of a file; None if there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return None


logger = logging.getLogger("trainer.data")


class StreamOpener:
    """Opens streams of a source, and counts their documents.

    Args:
        format, options, cut: see `open_stream`.
        warns: warn of the first file that `eod` does not occur in, and of the first of a doubtful `dtype`. False: `warn` tells
            of all that were opened.
    """

    def __init__(self, *, format: str, options: ReadOptions, cut: CutOptions, warns: bool = True) -> None:
        self._format, self._options, self._cut = format, options, cut
        self._warns = warns
        self.current: Stream | None = None  # being opened, or read from
        self._num_documents: dict[Stream, int] = {}
        # Names of streams -> their tokens.
        self._without_eod: dict[str, int] = {}
        self._doubtful: dict[str, int] = {}
        self._has_said: set[str] = set()

    def __call__(self, stream: Stream) -> OpenStream:
        """The stream, opened.

        Raises:
            UserError: the file is unreadable or damaged.
        """
        self.current = stream
        try:
            opened = open_stream(stream, format=self._format, options=self._options, cut=self._cut)
        except UserError as error:
            error.where = f"source {self._cut.namespace}"
            raise
        self._num_documents[stream] = opened.documents.num_documents
        if self._lacks_eod(stream, opened.documents):
            self._without_eod[stream.relative_path] = len(opened.documents.tokens)
        if self._is_split_by(stream, "dtype") and has_zero_halves(opened.documents.tokens):
            self._doubtful[stream.relative_path] = len(opened.documents.tokens)
        if self._warns:
            self.warn()
        return opened

    def _lacks_eod(self, stream: Stream, documents: TokenTable) -> bool:
        """Whether `eod` is set and occurs nowhere in the file: it would end each document but the last."""
        eod = self._options.eod
        if eod is None or documents.num_documents != 1 or not self._is_split_by(stream, "eod"):
            return False
        return int(documents.tokens[-1]) != eod

    def _is_split_by(self, stream: Stream, option: str) -> bool:
        return takes_option(format_name(Path(stream.path), self._format), option)

    def warn(self) -> None:
        """Warn of the opened files that `eod` does not occur in, and of those of a doubtful `dtype`; once of either."""
        eod, dtype = self._options.eod, self._options.dtype
        self._say(
            self._without_eod, f"eod = {eod} does not occur in", "one document; use the id that ends documents there"
        )
        self._say(
            self._doubtful,
            f'dtype = "{dtype}" gives 0 as every second id in',
            "of a wider dtype, by its looks; check it",
        )

    def _say(self, files: dict[str, int], what: str, then: str) -> None:
        if not files or what in self._has_said:
            return
        self._has_said.add(what)
        names = few([f"{printable(name)} ({counted(tokens, 'token')})" for name, tokens in files.items()])
        if len(self._num_documents) > 1:
            names = f"{len(files):,} of {len(self._num_documents):,} files, {names}"
        each = "the file is" if len(files) == 1 else "each of them is"
        logger.warning("source %s: %s %s: %s %s", self._cut.namespace, what, names, each, then)

    def nothing_left(self, key: str, problem: str) -> UserError:
        """The refusal of a split without documents.

        Args:
            key, problem: of the error.
        """
        fix, files = "change holdout_fraction or the paths", self._num_documents
        if self._cut.holdout_fraction == 0.0 or not files or max(files.values()) > 1:
            return UserError(key, problem, fix)
        its = "its file is" if len(files) == 1 else f"each of its {len(files):,} files is"
        problem += f": {its} one document, and documents are held out whole"
        if any(self._is_split_by(stream, "eod") for stream in files):
            if self._without_eod:
                problem += f" (eod = {self._options.eod} does not occur in {few(list(self._without_eod))})"
            fix = f"set eod to the id that ends a document, or {fix}"
        elif any(self._is_split_by(stream, "text_split") for stream in files):
            fix = f'set text_split = "blank_line", or {fix}'
        return UserError(key, problem, fix)
