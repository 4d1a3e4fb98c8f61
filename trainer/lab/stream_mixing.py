"""Micro-batches of one stream each.

`per_stream`: all ranks pick the same stream and read disjoint slices of it; a rank whose slice is
exhausted yields one fully masked row. `device_per_stream`: each rank has its own pool and picks;
with `repeat`, a rank without any cells yields fully masked rows.

Each active reader has lanes of its own. Which groups a lane reads is a pure function of their
cells, so that every rank can compute how long the slices of all ranks last.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from trainer.arrays import Flags, Ints, keyed_generator
from trainer.data.collate import Batch, Lane, make_collator
from trainer.data.documents import ReadOptions
from trainer.data.groups import CutOptions, OpenStream
from trainer.data.layout import Stream
from trainer.data.shard_source import MixOptions, Point, StreamSource
from trainer.metrics.logger import get_logger

logger = get_logger(__name__)


def schedule(cells: Ints, num_lanes: int) -> tuple[Ints, Ints]:
    """Assign groups of so many cells to lanes, longest first, each to the lane with fewest cells.

    Returns the lane of each group, lanes being numbered by decreasing load, and the row at which it
    begins if the groups of a lane are read in the order given; int64 [n].
    """
    by_size = np.argsort(-cells, kind="stable")
    heap = list(range(num_lanes))  # of load * num_lanes + lane
    sizes = (cells[by_size] * num_lanes).tolist()
    placed = (heapq.heapreplace(heap, heap[0] + size) for size in sizes)
    lanes = np.empty(len(cells), dtype=np.int64)
    lanes[by_size] = np.fromiter(placed, np.int64, len(cells)) % num_lanes
    loads = np.bincount(lanes, cells, num_lanes).astype(np.int64)
    by_load = np.argsort(-loads, kind="stable")
    lanes = np.argsort(by_load)[lanes]
    by_lane = np.argsort(lanes, kind="stable")
    begins = np.empty_like(lanes)
    begins[by_lane] = np.cumsum(cells[by_lane]) - cells[by_lane]
    return lanes, begins - (np.cumsum(loads[by_load]) - loads[by_load])[lanes]


def num_rows(cells: Ints, num_lanes: int) -> int:
    """Rows of the fullest lane."""
    return int((schedule(cells, num_lanes)[1] + cells).max(initial=0))


class Slice(NamedTuple):
    """The groups of a stream whose middle lies in the `at`-th of `num` stretches of its cells."""

    stream: int
    at: int
    num: int

    def of(self, source: OpenStream, left: Ints) -> Flags:
        """Which groups these are, bool [G]; the stretches are of the cells `left`, int64 [G]."""
        middles = 2 * np.cumsum(left) - left
        found: Flags = -(-middles * self.num // max(2 * int(left.sum()), 1)) - 1 == self.at
        return found


class StreamReader:
    """The lanes that read a slice of a stream in one epoch; positions count cells as they are read.

    `order` has the slice's unfinished groups, int64 [n], `left` the cells left of each group of the
    stream, int64 [G]; `longest`: batches of the longest slice, if all ranks pick a stream together.
    """

    def __init__(
        self, source: OpenStream, order: Ints, left: Ints, *, epoch: int, num_lanes: int, longest: int, taken: int
    ) -> None:
        self.source, self.stream = source, source.stream
        self._epoch, self.taken = epoch, taken
        cells = left[order]
        lanes, begins = schedule(cells, num_lanes)
        ends = begins + cells
        self.num_picks = max(longest, int(ends.max(initial=0)))
        self.num_cells = int(cells.sum())
        self.position = int(np.clip(taken - begins, 0, cells).sum())
        by_lane = np.argsort(lanes, kind="stable")
        self._groups, self._begins = order[by_lane], begins[by_lane]
        # Of each group, before it begins here.
        self._cells_before = source.groups.num_cells[self._groups] - cells[by_lane]
        bounds = np.searchsorted(lanes[by_lane], np.arange(num_lanes + 1))
        finished = np.bincount(lanes[ends <= taken], minlength=num_lanes)
        self._next, self._stop = (bounds[:-1] + finished).tolist(), bounds[1:].tolist()
        self._lanes = [Lane() for _ in range(num_lanes)]

    @property
    def cursor(self) -> tuple[int, ...]:
        """How far it was read, and on how many lanes."""
        return self.taken, len(self._lanes)

    @property
    def has_begun_all(self) -> bool:
        """Whether each group of the slice was begun, here or before a change of the ranks."""
        # On a lane, those that were begun before come first.
        lanes = zip(self._next, self._stop, strict=True)
        return all(at == stop or self._cells_before[stop - 1] > 0 for at, stop in lanes)

    @property
    def remaining_picks(self) -> int:
        """Batches left, exactly: picks in proportion to it permute all remaining ones uniformly."""
        return self.num_picks - self.taken

    @property
    def remaining_fraction(self) -> float:
        """Share of the slice's cells that is left."""
        return (self.num_cells - self.position) / max(self.num_cells, 1)

    def next_lanes(self) -> list[Lane]:
        """Advance by a batch: the lanes with a row in it; none if only other ranks have rows."""
        for number, lane in enumerate(self._lanes):
            at = self._next[number]
            if not lane.groups and at < self._stop[number]:
                self._next[number] += 1
                # After a resume in the middle of a group, its first rows were read already.
                rows = int(self._cells_before[at] + self.taken - self._begins[at])
                lane.groups = self.source.hand(self._groups[at : at + 1], self._epoch)
                lane.offset, lane.rows = rows * self.source.seq_len, rows
        found = [lane for lane in self._lanes if lane.groups]
        self.position += len(found)
        return found


class StreamMixingDataset(StreamSource[Slice, StreamReader]):
    """An iterator of micro-batches, each of one stream; see `Collator` for their keys.

    `num_streams_mixed` readers are active. For each micro-batch one is picked and gives up to
    `batch_size` rows of a cell. In an epoch every cell of the split is read exactly once over all
    shards, each of which reads a slice of every stream. Labels are those of rows.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        cut: CutOptions,
        read: ReadOptions,
        mix: MixOptions,
        **options: Any,
    ) -> None:
        self.mode, self._is_shared = mix.batching_mode, mix.batching_mode == "per_stream"
        sizes = ("num_streams_mixed", "batch_size", "batch_size_by_modality")
        self.layout = ("world_size", *sizes)
        if not self._is_shared:
            self.layout = ("rank", *self.layout)
        # Which slice of a stream is read is turned by stream, so that none is always the longest.
        turns = keyed_generator("turns", cut.namespace, mix.seed).permutation(len(streams))
        self._turns = turns.tolist()
        super().__init__(streams, cut, read, mix, **options)
        self.fixed_state |= {key: getattr(mix, key) for key in sizes}
        self._collator = make_collator(read.tokenizer, read.loss_mask, row_tokens=cut.seq_len, runs_on=False)

    def _key(self, shard: int, num_shards: int) -> tuple[str | int, ...]:
        return ("all" if self._is_shared else shard,)

    def _parts(self, epoch: int, shard: int, num_shards: int) -> list[Slice]:
        turns = enumerate(self._turns)
        return [Slice(stream, (shard - turn) % num_shards, num_shards) for stream, turn in turns]

    def _queue_of(self, epoch: int, before: Sequence[Point], shard: int, num_shards: int) -> list[Slice]:
        parts = self._parts(epoch, shard, num_shards)
        key = ("queue", self.name, self._mix.seed, epoch, *self._key(shard, num_shards))
        order = keyed_generator(*key, len(before)).permutation(len(parts)).tolist()
        if before:  # those that were active on any shard come first: by slot, then by shard
            slots = zip_longest(*(active for _, active in before[-1]))
            order = [*(reader[0] for slot in slots for reader in slot if reader), *order]
        return [parts[stream] for stream in dict.fromkeys(order)]

    def _reader(self, part: Slice, cursor: Sequence[int] = (0,)) -> StreamReader:
        source, left, in_order = self._unread(part.stream)
        sizes, modality = self._mix.batch_size_by_modality, source.stream.modality
        num_lanes = sizes.get(modality, self._mix.batch_size)
        longest = 0
        if self._is_shared:  # all ranks continue until the longest slice is read
            others = (part._replace(at=at) for at in range(part.num) if at != part.at)
            rows = (num_rows(left[in_order(each, left)], num_lanes) for each in others)
            longest = max(rows, default=0)
        order, taken = in_order(part, left), cursor[0]
        return StreamReader(source, order, left, epoch=self.epoch, num_lanes=num_lanes, longest=longest, taken=taken)

    def _cells_read(self, cells: Ints, cursor: Sequence[int]) -> Ints:
        picks, lanes = cursor
        return np.clip(picks - schedule(cells, lanes)[1], 0, cells)

    def _has_begun_all(self) -> bool:
        if not self._index or not all(reader.has_begun_all for reader in self._pool.readers):
            return False
        return not any(self._reader(part).num_cells for part in self._queue[self._index :])

    def __iter__(self) -> StreamMixingDataset:
        return self

    def __next__(self) -> Batch:
        """The next micro-batch; fully masked if this shard's slice is read, or has nothing.

        StopIteration: all is read, without `repeat`; UserError: a file is unreadable or damaged, or
        the split has no documents.
        """
        was_ended = self.is_ended
        path, modality, position, lanes = None, self.modalities[0], 0, [Lane()]
        if self._fill_pool():
            (slot,) = self._pool.choose(self._uniforms.ahead(self._num_picks)[:1])
            reader = self._pool.readers[slot]
            position, lanes = reader.position, reader.next_lanes() or lanes
            self._record([slot])
            self._current = reader.stream
            path, modality = reader.stream.relative_path, reader.stream.modality
        else:
            if not (was_ended or self._has_groups):
                self.refuse_nothing()
            if not self._mix.repeat:
                raise StopIteration
        batch = self._collator.batch(lanes)
        del batch["segment_ids"]
        rows, located = len(batch["targets"]), batch["instability_meta_json"]
        batch["dataset_labels"] = [self.name for _ in range(rows)]
        batch["dataset_segments"] = [modality for _ in range(rows)]
        located.origin = {"source": self.name, "stream": path, "epoch": self.epoch, "position": position}
        # As text, without `documents`: `take_apart` then tells the noise scale of groups, which no
        # two ranks share.
        batch["instability_meta_json"] = str(located)
        return batch

    def _reshard(self, states: Sequence[Mapping[str, Any]]) -> None:
        if self._is_shared:  # all shards' states are alike, and one may have been given alone
            states = [states[0]] * states[0]["world_size"]
        super()._reshard(states)
