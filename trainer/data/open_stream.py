"""Opening streams: reading their documents, cutting them into groups, and warning of options that fit no file."""

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

logger = logging.getLogger("trainer.data")


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


class StreamOpener:
    """Opens the streams of a source, counts their documents, and warns of files that `eod` or `dtype` do not fit.

    Args:
        format, options, cut: see `open_stream`.
        warns: warn of the first file of either kind. False: `warn` tells of all that were opened.
    """

    def __init__(self, *, format: str, options: ReadOptions, cut: CutOptions, warns: bool = True) -> None:
        self._format, self._options, self._cut = format, options, cut
        self._warns = warns
        self.current: Stream | None = None  # being opened, or read from
        self._num_documents: dict[Stream, int] = {}
        # Option -> names of the streams that it does not fit, with their tokens.
        self._doubtful: dict[str, dict[str, int]] = {"eod": {}, "dtype": {}}
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
        documents, name = opened.documents, format_name(Path(stream.path), self._format)
        self._num_documents[stream] = documents.num_documents
        # Where it occurs, an id that ends documents ends each but perhaps the last.
        eod, is_split = self._options.eod, takes_option(name, "eod")
        if eod is not None and is_split and documents.num_documents == 1 and documents.tokens[-1] != eod:
            self._doubtful["eod"][stream.relative_path] = len(documents.tokens)
        if takes_option(name, "dtype") and has_zero_halves(documents.tokens):
            self._doubtful["dtype"][stream.relative_path] = len(documents.tokens)
        if self._warns:
            self.warn()
        return opened

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
        """The refusal of a split without documents.

        Args:
            key, problem: of the error.
        """
        fix = "change holdout_fraction or the paths"
        if self._cut.holdout_fraction and self._num_documents and max(self._num_documents.values()) == 1:
            problem += ": each file is one document, and documents are held out whole"
            fix = f"set eod or text_split so that files are split, or {fix}"
        return UserError(key, problem, fix)
