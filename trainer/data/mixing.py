"""Micro-batches of one stream each: `per_stream` and `device_per_stream`.

Each active reader has lanes of its own. Which groups a lane reads is a pure function of their cells, so that every rank can
compute how long the slices of all ranks last.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from trainer.arrays import Flags, Ints
from trainer.data.collate import Batch, Collator, Lane
from trainer.data.documents import ReadOptions
from trainer.data.groups import CutOptions, Handed, OpenStream
from trainer.data.layout import Stream
from trainer.data.shard_source import StreamSource
from trainer.errors import UserError
from trainer.hashing import keyed_generator
from trainer.metrics.logger import get_logger
from trainer.options import MixingOptions, part_options

logger = get_logger(__name__)
AHEAD = 64  # groups of a lane that are looked up together


@part_options
class MixOptions(MixingOptions):
    """How the streams of a source are mixed.

    `per_stream`: all ranks pick the same stream and read disjoint slices of it; a rank whose slice is exhausted yields one
    fully masked row. `device_per_stream`: each rank has its own pool and picks; with `repeat`, a rank without any cells
    yields fully masked rows.
    """

    seed: int = 0
    """Of every random choice."""


def schedule(cells: Ints, num_lanes: int) -> tuple[Ints, Ints]:
    """Groups of so many cells, longest first, each on the lane with the fewest cells, which keeps lanes level.

    Returns:
        The lane of each group, lanes being numbered by decreasing load, and the row at which it begins, if groups of a lane are
        read in the order given; int64 [n].
    """
    by_size = np.argsort(-cells, kind="stable")
    free = list(range(num_lanes))  # a heap of load * num_lanes + lane
    placed = (heapq.heapreplace(free, free[0] + size) for size in (cells[by_size] * num_lanes).tolist())
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
    """The groups of a stream whose middle lies in the `at`-th of `num` stretches of the cells that are left of it."""

    stream: int
    at: int
    num: int

    def of(self, source: OpenStream, left: Ints) -> Flags:
        """Which groups these are, bool [G]. `left`: cells left of each, int64 [G]."""
        middles = 2 * np.cumsum(left) - left
        found: Flags = -(-middles * self.num // max(2 * int(left.sum()), 1)) - 1 == self.at
        return found


class StreamReader:
    """The lanes that read a slice of a stream in one epoch; its start, end and position count cells in the order of reading.

    `remaining_picks` is exact, so that picks in proportion to it are a uniform permutation of all remaining batches.

    Args:
        order: the slice's unfinished groups in reading order, int64 [n].
        left: cells left of each group of the stream, int64 [G].
        num_picks: batches of the longest slice, if all ranks pick this stream together. picks: those taken before.
    """

    def __init__(
        self,
        source: OpenStream,
        order: Ints,
        left: Ints,
        *,
        epoch: int,
        num_lanes: int,
        num_picks: int = 0,
        picks: int = 0,
    ) -> None:
        self.source, self.stream = source, source.stream
        self.picks = picks
        self._epoch = epoch
        cells = left[order]
        lanes, begins = schedule(cells, num_lanes)
        ends = begins + cells
        self.num_picks = max(num_picks, int(ends.max(initial=0)))
        self.slice_start, self.slice_end = 0, int(cells.sum())
        self.position = int(np.clip(picks - begins, 0, cells).sum())
        by_lane = np.argsort(lanes, kind="stable")
        self._groups, self._begins = order[by_lane], begins[by_lane]
        # Of each group, before it begins here.
        self._cells_before = source.groups.num_cells[self._groups] - cells[by_lane]
        bounds = np.searchsorted(lanes[by_lane], np.arange(num_lanes + 1))
        finished = np.bincount(lanes[ends <= picks], minlength=num_lanes)
        self._next, self._stop = (bounds[:-1] + finished).tolist(), bounds[1:].tolist()
        self._lanes = [Lane() for _ in range(num_lanes)]
        self._ahead: list[list[Handed]] = [[] for _ in range(num_lanes)]  # the next groups of each lane, in reverse

    @property
    def cursor(self) -> tuple[int, ...]:
        """How far it was read, and on how many lanes."""
        return self.picks, len(self._lanes)

    @property
    def remaining_picks(self) -> int:
        """Batches left."""
        return self.num_picks - self.picks

    @property
    def remaining_fraction(self) -> float:
        """Of the slice's cells."""
        return (self.slice_end - self.position) / max(self.slice_end - self.slice_start, 1)

    def take(self) -> list[Lane]:
        """The lanes that have a row in the next batch; none if only other ranks' slices have any."""
        rows = [lane for number, lane in enumerate(self._lanes) if lane.groups or self._refill(number, lane)]
        self.picks += 1
        self.position += len(rows)
        return rows

    def _refill(self, number: int, lane: Lane) -> bool:
        at = self._next[number]
        if at == self._stop[number]:
            return False
        self._next[number] += 1
        rows = int(self._cells_before[at] + self.picks - self._begins[at])
        if not (ahead := self._ahead[number]):
            ahead += self.source.hand(self._groups[at : min(at + AHEAD, self._stop[number])], self._epoch)[::-1]
        lane.groups, lane.offset, lane.rows = [ahead.pop()], rows * self.source.seq_len, rows
        return True


class StreamMixingDataset(StreamSource):
    """An iterator of micro-batches, each of one stream; see `Collator` for their keys. Labels are those of rows.

    `num_streams_mixed` readers are active. For each micro-batch one is picked and gives up to `batch_size` rows of a cell. In
    an epoch every cell of the split is read exactly once over all shards, each of which reads a slice of every stream.

    Raises:
        UserError: no streams, or one twice; while iterating: a damaged file, or a split without documents.
    """

    version = 6

    def __init__(
        self,
        streams: Sequence[Stream],
        cut: CutOptions,
        read: ReadOptions,
        mix: MixOptions | None = None,
        **options: Any,
    ) -> None:
        mix = mix or MixOptions(batching_mode="per_stream")
        if mix.batching_mode == "per_row":
            raise UserError(
                cut.namespace, 'reads no full rows (batching_mode = "per_row")', "read them by a ShardSource"
            )
        self.mode, self._is_shared = mix.batching_mode, mix.batching_mode == "per_stream"
        sizes = ("num_streams_mixed", "batch_size", "batch_size_by_modality")
        self.layout = ("world_size", *sizes) if self._is_shared else ("rank", "world_size", *sizes)
        # A slice of every stream: which one is turned by stream, so that none is always the longest.
        self._turns = keyed_generator("turns", cut.namespace, mix.seed).permutation(len(streams)).tolist()
        super().__init__(streams, cut, read, mix, **options)
        self.fixed_state |= {key: getattr(mix, key) for key in sizes}
        self._collator = Collator(read.tokenizer, row_tokens=cut.seq_len, runs_on=False)

    def _key(self, shard: int, num_shards: int) -> tuple[str | int, ...]:
        return ("all" if self._is_shared else shard,)

    def _parts(self, shard: int, num_shards: int) -> list[Slice]:
        return [Slice(stream, (shard - turn) % num_shards, num_shards) for stream, turn in enumerate(self._turns)]

    def _queue_of(self, epoch: int, before: Any, shard: int, num_shards: int) -> list[Slice]:
        parts = self._parts(shard, num_shards)
        key = ("queue", self.name, self._mix.seed, epoch, *self._key(shard, num_shards), len(before))
        order = keyed_generator(*key).permutation(len(parts)).tolist()
        # What was begun comes first.
        return [parts[stream] for stream in dict.fromkeys([*(begun_streams(before[-1]) if before else ()), *order])]

    def _reader(self, part: Slice, cursor: Sequence[int] = (0,)) -> StreamReader:
        source, left, in_order = self._unread(part.stream)
        lanes = self._mix.batch_size_by_modality.get(source.stream.modality, self._mix.batch_size)
        own, others = in_order(part, left), range(self._num_shards if self._is_shared else 0)
        slices = (part._replace(at=at) for at in others if at != part.at)
        longest = max((num_rows(left[in_order(each, left)], lanes) for each in slices), default=0)
        how = {"epoch": self.epoch, "num_lanes": lanes, "num_picks": longest, "picks": cursor[0]}
        return StreamReader(source, own, left, **how)

    def _cells_read(self, cells: Ints, cursor: Sequence[int]) -> Ints:
        picks, lanes = cursor
        return np.clip(picks - schedule(cells, lanes)[1], 0, cells)

    def __iter__(self) -> StreamMixingDataset:
        return self

    def __next__(self) -> Batch:
        return self.next_with_tokens_before(0)

    def next_with_tokens_before(self, num_before: int) -> Batch:
        """The next micro-batch, with that many tokens before each row. A shard without any group gets masked rows.

        Raises:
            StopIteration: without `repeat`, after the last.
            UserError: a file is unreadable or damaged, or the split has no documents.
        """
        was_ended = self.is_ended
        stream, position, lanes = None, 0, []
        if self._is_ready():
            slot = self._pool.pick(self._uniforms(self._num_picks) if len(self._pool.readers) > 1 else 0.0)
            self._num_picks += 1
            reader = self._pool.readers[slot]
            position, lanes = reader.position, reader.take()
            self._has_moved(slot)
            stream = self._opener.current = reader.stream
        else:
            if not (was_ended or self._has_groups):
                self.refuse_nothing()
            if not self._mix.repeat:
                raise StopIteration
        batch = self._collator.batch(lanes or [Lane()], lambda *_: False, num_before)
        del batch["segment_ids"]
        rows, modality = len(batch["tokens"]), stream.modality if stream else self.modalities[0]
        batch["dataset_labels"], batch["dataset_segments"] = [self.name] * rows, [modality] * rows
        path, located = stream and stream.relative_path, batch["instability_meta_json"]
        located.origin = {"source": self.name, "stream": path, "epoch": self.epoch, "position": position}
        batch["instability_meta_json"] = str(located)
        return batch

    def _reshard(self, states: Any) -> None:
        super()._reshard(states[:1] * states[0]["world_size"] if self._is_shared else states)
        dropped = len(begun_streams(self._points[self.epoch][-1])) - self._mix.num_streams_mixed
        if dropped > 0:  # they are at the front of the queue, so nothing is lost
            logger.info("[stream_mixing] resume reshard dropped %d still-active readers", dropped)


def begun_streams(point: Any) -> list[int]:
    """The streams that were active on any shard: by slot, then by shard, each once."""
    slots = itertools.zip_longest(*(active for _, active in point))
    return list(dict.fromkeys(reader[0] for slot in slots for reader in slot if reader is not None))
