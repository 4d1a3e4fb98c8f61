"""Opening streams, cutting them into groups, and caching the most recently used ones."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from trainer.data.formats.documents import ReadOptions, TokenArray, TokenTable
from trainer.data.formats.registry import load_documents
from trainer.data.streams.groups import GroupTable, build_groups
from trainer.data.streams.holdout import Split, documents_of
from trainer.data.streams.layout import Stream


@dataclass(frozen=True)
class OpenStream:
    """A stream, its documents, and the groups they are cut into."""

    stream: Stream
    documents: TokenTable
    groups: GroupTable
    seq_len: int

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


class StreamOpener:
    """Opens streams; the `keep` most recently used stay open, since every epoch returns to them.

    Args:
        format, options: how files are read.
        cut: how their documents become groups.
        keep: at least the number of readers that are active at once.
    """

    def __init__(self, *, format: str, options: ReadOptions, cut: CutOptions, keep: int) -> None:
        self._format = format
        self._options = options
        self._cut = cut
        self._keep = keep
        self._open: OrderedDict[int, OpenStream] = OrderedDict()

    def open(self, stream: Stream) -> OpenStream:
        """The stream, ready to be read.

        Raises:
            UserError: the file is unreadable or damaged.
        """
        found = self._open.get(stream.stream_id)
        if found is None:
            found = self._read(stream)
            self._open[stream.stream_id] = found
            if len(self._open) > self._keep:
                # Readers that still use the stream keep it alive: only the cache drops it.
                self._open.popitem(last=False)
        self._open.move_to_end(stream.stream_id)
        return found

    def _read(self, stream: Stream) -> OpenStream:
        cut = self._cut
        documents = load_documents(stream.path, self._format, self._options)
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
        return OpenStream(stream, documents, groups, cut.seq_len)
