"""Opening streams: reading their documents and cutting them into groups."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from trainer.data.formats.documents import ReadOptions, TokenArray, TokenTable
from trainer.data.formats.registry import load_documents
from trainer.data.streams.groups import GroupTable, build_groups
from trainer.data.streams.holdout import Split, documents_of
from trainer.data.streams.layout import Stream
from trainer.errors import UserError
from trainer.wording import printable


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
