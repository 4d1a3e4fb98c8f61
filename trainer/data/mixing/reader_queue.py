"""The queue of an epoch: which stream's reader comes next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.data.keyed import keyed_generator
from trainer.data.mixing.epochs import BatchSizes, Chapter, QueueKey
from trainer.data.mixing.reader import StreamReader, remaining_stream
from trainer.data.streams.layout import Stream
from trainer.data.streams.opener import StreamOpener


@dataclass(frozen=True)
class RankPlace:
    """This rank among all."""

    rank: int
    world_size: int


class ReaderQueue:
    """Hands out readers, epoch by epoch, in a permuted order; streams that have nothing for this rank are skipped.

    Args:
        streams: by stream id.
        opener: opens them.
        key: what the order depends on.
        batch_sizes: lanes per reader.
        place: this rank.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        *,
        opener: StreamOpener,
        key: QueueKey,
        batch_sizes: BatchSizes,
        place: RankPlace,
    ) -> None:
        self._streams = streams
        self._opener = opener
        self._key = key
        self._batch_sizes = batch_sizes
        self._place = place
        self.has_cells = False  # any stream that was opened so far has cells, for whatever rank
        self.begin_epoch(0, {})

    def begin_epoch(self, epoch: int, chapters: dict[int, list[Chapter]], index: int = 0) -> None:
        """Go to an epoch; `chapters` says what was read of it (and of later ones), `index` how far this queue was."""
        self.epoch = epoch
        self.chapters = {at: parts for at, parts in chapters.items() if at >= epoch}
        self.index = index
        self._now = self.chapters.get(epoch, [])
        self._order = self._key.order(epoch, self._place.rank, self._now)

    @property
    def is_whole(self) -> bool:
        """Nothing was taken from this epoch yet, by whatever world."""
        return self.index == 0 and not self._now

    def next_reader(self) -> StreamReader | None:
        """A reader of the next stream that has something for this rank; None at the epoch's end."""
        while self.index < len(self._order):
            reader = self.reader(self._order[self.index])
            self.index += 1
            if reader.num_picks:
                return reader
        return None

    def count_cells(self, stream: Stream) -> int:
        """Cells that an epoch has of a stream, over all ranks."""
        return int(self._opener.open(stream).groups.cell_offsets[-1])

    def reader(self, stream_id: int) -> StreamReader:
        """A reader at the beginning of what this rank reads of a stream in this epoch."""
        stream = self._streams[stream_id]
        source = self._opener.open(stream)
        self.has_cells = self.has_cells or source.groups.num_groups > 0
        order = keyed_generator("groups", self._key.name, self._key.seed, self.epoch, stream.relative_path)
        return StreamReader(
            source,
            remaining_stream(source.groups, order, self._key.progress(self.epoch, stream, self._now)),
            bs=self._batch_sizes.of(stream),
            rank=self._place.rank,
            world_size=self._place.world_size,
            shared=self._key.shared,
        )
