"""Opening streams, and keeping the last few open."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from trainer.data.formats.documents import ReadOptions
from trainer.data.formats.registry import open_documents
from trainer.data.streams.groups import build_groups
from trainer.data.streams.holdout import Split, documents_of
from trainer.data.streams.layout import Stream
from trainer.data.streams.open_stream import OpenStream


@dataclass(frozen=True)
class CutOptions:
    """How documents become groups.

    Args:
        namespace: the source's name, part of every group id.
        seq_len, max_group_cells, pack: see `build_groups`.
        split, holdout_fraction: which documents are seen.
    """

    namespace: str
    seq_len: int
    max_group_cells: int
    pack: bool
    split: Split
    holdout_fraction: float


class StreamOpener:
    """Opens streams and cuts them into groups; the `keep` streams used last stay open, since epochs come back to them.

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
            UserError: the file cannot be read, or is damaged.
        """
        found = self._open.get(stream.stream_id)
        if found is None:
            found = self._read(stream)
            self._open[stream.stream_id] = found
            if len(self._open) > self._keep:
                # Readers that still hold the stream keep it alive; only the cache lets go of it.
                self._open.popitem(last=False)
        self._open.move_to_end(stream.stream_id)
        return found

    def _read(self, stream: Stream) -> OpenStream:
        options, cut = self._options, self._cut
        documents = open_documents(
            stream.path,
            format=self._format,
            tokenizer=options.tokenizer,
            dtype=options.dtype,
            eod=options.eod,
            text_split=options.text_split,
        )
        lengths = documents.lengths
        kept = documents_of(cut.split, stream.relative_path, len(lengths), cut.holdout_fraction)
        groups = build_groups(
            lengths,
            np.flatnonzero(kept),
            namespace=cut.namespace,
            relative_path=stream.relative_path,
            seq_len=cut.seq_len,
            max_group_cells=cut.max_group_cells,
            pack=cut.pack,
        )
        return OpenStream(stream, documents, groups, cut.seq_len)
