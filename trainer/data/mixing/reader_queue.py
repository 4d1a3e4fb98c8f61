"""The queue of an epoch: which stream is read next."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainer.data.keyed import keyed_generator
from trainer.data.mixing.epochs import BatchSizes, EpochOrder, QueueKey, ReshardPoint
from trainer.data.mixing.reader import StreamReader, remaining_stream
from trainer.data.mixing.state import points_to_state
from trainer.data.streams.layout import Stream
from trainer.data.streams.open_stream import OpenStream


class ReaderQueue:
    """Hands out readers, epoch by epoch, in a permuted order; streams without cells for this rank are skipped.

    Args:
        streams: by stream id.
        open: opens a stream; worth caching, since every epoch returns to each.
        key: what the order depends on.
        batch_sizes: lanes per reader.
        rank, world_size: which slice of each stream is read.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        *,
        open: Callable[[Stream], OpenStream],
        key: QueueKey,
        batch_sizes: BatchSizes,
        rank: int,
        world_size: int,
    ) -> None:
        self._streams = streams
        self._open = open
        self._key = key
        self._batch_sizes = batch_sizes
        self._rank, self._world_size = rank, world_size
        self.has_cells = False  # any stream opened so far has cells, for whatever rank
        self.begin_epoch(0, {})

    def begin_epoch(self, epoch: int, points: dict[int, list[ReshardPoint]], index: int = 0) -> None:
        """Go to an epoch.

        Args:
            epoch: the epoch.
            points: reshard points of this epoch and of later ones; those of earlier ones are dropped.
            index: streams that were taken from this queue before.
        """
        self.epoch = epoch
        self.points = {at: parts for at, parts in points.items() if at >= epoch}
        self.points_state = points_to_state(self.points)  # here, not in each batch's state: they change with epochs
        self.index = index
        self._now = EpochOrder(self._key, epoch, self.points.get(epoch, []))
        self._order = self._now.of_rank(self._rank)

    @property
    def is_whole(self) -> bool:
        """Nothing has been taken from this epoch yet, by any world."""
        return self.index == 0 and not self.points.get(self.epoch)

    @property
    def is_empty(self) -> bool:
        """Every stream of this epoch has been taken."""
        return self.index >= len(self._order)

    def next_reader(self) -> StreamReader | None:
        """A reader of the next stream with cells for this rank; None at the end of the epoch."""
        while self.index < len(self._order):
            reader = self.reader(self._order[self.index])
            self.index += 1
            if reader.num_picks:
                return reader
        return None

    def count_cells(self, stream: Stream) -> int:
        """Cells of a stream in an epoch, over all ranks."""
        return int(self._open(stream).groups.cell_offsets[-1])

    def reader(self, stream_id: int, picks: int = 0) -> StreamReader:
        """A reader of this rank's part of a stream in this epoch, after `picks` batches of it."""
        stream = self._streams[stream_id]
        source = self._open(stream)
        self.has_cells = self.has_cells or source.groups.num_groups > 0
        generator = keyed_generator("groups", self._key.name, self._key.seed, self.epoch, stream.relative_path)
        return StreamReader(
            source,
            remaining_stream(source.groups, generator, self._now.past_reads(stream)),
            bs=self._batch_sizes.of(stream),
            slice_index=self._key.slice_of(stream_id, self._rank, self._world_size),
            num_slices=self._world_size,
            shared=self._key.shared,
            picks=picks,
        )
