"""An epoch of a mixing dataset: the order of its streams, how far each was read, and the queue of readers.

An epoch that runs on one world from its beginning is a keyed permutation. When a run continues on another world size
(or pool, or batch size) in the middle of an epoch, the cursors of the old ranks are kept as a `ReshardPoint`, and the
rest of the epoch is planned from these points: what the readers left of a stream is cut into new slices. Points hold
cursors only, are dropped at the end of the epoch, and may follow one another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypedDict

import numpy as np

from trainer.arrays import Flags, Ints
from trainer.data.keyed import keyed_generator
from trainer.data.layout import Stream
from trainer.data.open_stream import OpenStream
from trainer.data.reader import PastReads, StreamReader, remaining_stream


class ReshardPoint(TypedDict):
    """The positions of all ranks of one world when it stopped in an epoch, as they stand in a saved state.

    A cursor is `[streams taken from the queue, [[stream, picks] of each active reader]]`; those of a shared pool are equal.
    """

    batch_size: int
    batch_size_by_modality: Mapping[str, int]
    cursors: list[list[Any]]


def lanes_of(stream: Stream, sizes: Mapping[str, Any]) -> int:
    """The lanes of a reader of this stream, by the batch sizes of a reshard point or a saved state."""
    lanes: int = sizes["batch_size_by_modality"].get(stream.modality, sizes["batch_size"])
    return lanes


def active_streams(point: ReshardPoint) -> list[int]:
    """The streams that were active on any rank: by slot, then by rank, each once."""
    slots = itertools.zip_longest(*(active for _, active in point["cursors"]))
    return list(dict.fromkeys(pair[0] for slot in slots for pair in slot if pair is not None))


@dataclass(frozen=True)
class QueueKey:
    """Determines the order of streams, together with the epoch (one queue for all ranks, or one per rank), and which
    slice of a stream each rank reads."""

    name: str
    seed: int
    num_streams: int
    shared: bool

    def permutation(self, epoch: int, rank: int, part: int) -> Ints:
        """A shuffled order of all streams; `part` is the number of reshard points before it. int64 [num_streams]."""
        who = "all" if self.shared else rank
        return keyed_generator("queue", self.name, self.seed, epoch, who, part).permutation(self.num_streams)

    @cached_property
    def turns(self) -> list[int]:
        """The rank, modulo the world size, that reads the first slice of each stream; the same in every epoch.

        Cutting a stream at group boundaries favours the same slices every time: of a stream of one group, all but one
        are empty. A permutation lets every rank begin equally often, whatever the sizes; it is keyed because sizes may
        follow the order of names. It must not depend on the epoch: ranks that pick alone are in different epochs, and
        two ranks must never read the same group at once.
        """
        turns: list[int] = keyed_generator("turns", self.name, self.seed).permutation(self.num_streams).tolist()
        return turns

    def slice_of(self, stream_id: int, rank: int, world_size: int) -> int:
        """The slice of a stream that a rank reads."""
        return (rank - self.turns[stream_id]) % world_size


class EpochOrder:
    """The order of an epoch's streams, and how far each had been read at its reshard points.

    Each point's orders follow from those of the point before. They are computed once, so the cost grows linearly with the
    number of points.
    """

    def __init__(self, key: QueueKey, epoch: int, points: Sequence[ReshardPoint]) -> None:
        self._key, self._epoch, self._points = key, epoch, points
        self._shared_orders: list[Ints] = []
        self._untouched: list[Flags] = []  # by point: streams that some rank had not reached, bool [num_streams]
        self._waiting: list[Flags] = []  # by point: the same by rank (a shared queue has one), bool [W, num_streams]
        self._active: list[dict[int, dict[int, int]]] = []  # by point: stream -> rank -> picks
        for number, point in enumerate(points):
            cursors = point["cursors"][:1] if key.shared else point["cursors"]
            waiting = np.zeros((len(cursors), key.num_streams), dtype=np.bool_)
            for rank, (index, _) in enumerate(cursors):
                waiting[rank, self._order(rank, number)[index:]] = True
            self._waiting.append(waiting)
            self._untouched.append(np.logical_or.reduce(waiting, axis=0))
            active: dict[int, dict[int, int]] = {}
            for rank, (_, begun) in enumerate(point["cursors"]):
                for stream, picks in begun:
                    active.setdefault(stream, {})[rank] = picks
            self._active.append(active)

    def of_rank(self, rank: int) -> list[int]:
        """The streams in the order in which a rank takes them.

        After reshard points: first the streams that were active on any rank (so that what was begun continues), then
        those that some rank had not reached; completely read streams are left out.
        """
        order: list[int] = self._order(rank, len(self._points)).tolist()
        return order

    def _order(self, rank: int, number: int) -> Ints:
        """The order of a rank of the world after `number` reshard points."""
        key = self._key
        if key.shared and number < len(self._shared_orders):
            return self._shared_orders[number]
        if not number:
            order = key.permutation(self._epoch, rank, 0)
        else:
            begun = np.array(active_streams(self._points[number - 1]), dtype=np.int64)
            is_next = self._untouched[number - 1].copy()
            is_next[begun] = False
            before = self._order(rank, number - 1) if key.shared else key.permutation(self._epoch, rank, number)
            order = np.concatenate([begun, before[is_next[before]]])
        if key.shared:
            self._shared_orders.append(order)
        return order

    def past_reads(self, stream: Stream) -> list[PastReads]:
        """How far a stream had been read at each reshard point, without those at which no rank had begun it."""
        found = []
        for point, waiting, active in zip(self._points, self._waiting, self._active, strict=True):
            world_size, stream_id = len(point["cursors"]), stream.stream_id
            begun = active.get(stream_id, {})
            if not begun and waiting[:, stream_id].all():
                continue
            by_rank = np.broadcast_to(np.where(waiting[:, stream_id], 0, -1), world_size).tolist()
            for rank, picks in begun.items():
                by_rank[rank] = picks
            turn = self._key.turns[stream_id] % world_size
            found.append(PastReads(lanes_of(stream, point), (*by_rank[turn:], *by_rank[:turn])))
        return found


class ReaderQueue:
    """Hands out readers, epoch by epoch, in a permuted order; streams without cells for this rank are skipped.

    Args:
        streams: by stream id.
        open: opens a stream; worth caching, since every epoch returns to each.
        key: what the order depends on.
        sizes: lanes per reader, see `lanes_of`.
        rank, world_size: which slice of each stream is read.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        *,
        open: Callable[[Stream], OpenStream],
        key: QueueKey,
        sizes: Mapping[str, Any],
        rank: int,
        world_size: int,
    ) -> None:
        self._streams = streams
        self._open = open
        self._key = key
        self._sizes = sizes
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
            bs=lanes_of(stream, self._sizes),
            slice_index=self._key.slice_of(stream_id, self._rank, self._world_size),
            num_slices=self._world_size,
            shared=self._key.shared,
            picks=picks,
        )
