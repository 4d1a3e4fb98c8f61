"""What one data shard reads of one source: its part of the files, handed out group by group from a pool of open streams.

Files are laid end to end in a keyed order and cut into stretches of equal size, one per data shard, the same in all epochs: a
large file is divided between shards at group boundaries, and no shard waits for another. Within an epoch each group is handed
out exactly once over all shards. If a run continues with another number of shards, the cursors of the old ones are kept as a
point of the epoch, and what they left is dealt anew.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from trainer.arrays import Flags, Ints
from trainer.data.documents import ReadOptions
from trainer.data.epochs import STATE_VERSION, check_states, fingerprint
from trainer.data.groups import CutOptions, OpenStream, file_bytes
from trainer.data.layout import Stream
from trainer.data.mixing import ActivePool, MixOptions, StreamSource
from trainer.errors import UserError
from trainer.hashing import KeyedUniforms, keyed_generator
from trainer.metrics.logger import get_logger

logger = get_logger(__name__)

Cursor = list[Any]
"""`[streams taken from the queue, [[stream, groups taken] of each active reader]]`, of one shard in one epoch."""
BLOCK = 256
"""Groups whose ids are computed together."""
Point = list[Cursor]
"""The cursors of all shards when their number changed in the middle of an epoch."""


class Part(NamedTuple):
    """The groups of a stream that begin in [low, high) of its `size` bytes."""

    stream: int
    low: int
    high: int
    size: int

    def of(self, source: OpenStream) -> Flags:
        """Which groups these are, bool [G]; bytes are mapped to tokens in proportion."""
        table, tokens = source.groups, len(source.documents.tokens)
        begins = source.documents.starts[table.documents] + table.first_cells * source.seq_len
        low, high = (-(-edge * tokens // self.size) for edge in (self.low, self.high))
        found: Flags = (begins >= low) & (begins < high)
        return found


def deal_parts(sizes: Sequence[int], order: Sequence[int], num_shards: int) -> list[list[Part]]:
    """The parts that each shard reads: streams of these sizes, end to end in this order, cut into stretches of equal size."""
    bounds = [sum(sizes) * shard // num_shards for shard in range(num_shards + 1)]
    parts: list[list[Part]] = [[] for _ in range(num_shards)]
    begin = shard = 0
    for stream in order:
        end = begin + sizes[stream]
        while shard < num_shards and bounds[shard] < end:
            low, high = max(begin, bounds[shard]), min(end, bounds[shard + 1])
            if low < high:
                parts[shard].append(Part(stream, low - begin, high - begin, sizes[stream]))
            if bounds[shard + 1] > end:
                break
            shard += 1
        begin = end
    return parts


class Handed(NamedTuple):
    """A group that a lane is to read."""

    epoch: int
    source: OpenStream
    group: int
    group_id: int


class Reader:
    """An open part of a stream: its groups in reading order, and how many were taken."""

    def __init__(self, source: OpenStream, order: Ints, epoch: int, taken: int = 0) -> None:
        self.source, self.stream, self.epoch = source, source.stream, epoch
        self.taken = taken
        self._order = order  # the stream's groups, int64 [n]
        self._block: list[tuple[int, int]] = []  # (group, id) of those to come, the next one last

    @property
    def remaining_picks(self) -> int:
        """Groups left."""
        return len(self._order) - self.taken

    @property
    def remaining_fraction(self) -> float:
        """Of the reader's groups."""
        return self.remaining_picks / max(len(self._order), 1)

    def take(self) -> Handed:
        """The next group of the stream."""
        if not self._block:
            groups = self._order[self.taken : self.taken + BLOCK]
            ids = self.source.groups.ids_of(groups, self.epoch)
            self._block = list(zip(groups.tolist(), ids.tolist(), strict=True))[::-1]
        self.taken += 1
        return Handed(self.epoch, self.source, *self._block.pop())


class ShardSource(StreamSource):
    """Hands out the groups of a source that a data shard reads, shuffled anew in every epoch.

    A pick takes one group from one of `num_streams_mixed` open streams, with `pick_mode = "weighted"` in proportion to the
    groups left, so that what is left is drawn uniformly. Every choice is a pure function of (name, seed, epoch, shard, number
    of shards, pick), so the state is cursors.

    Args:
        streams, cut, read, mix, in_memory: see `StreamMixingDataset`; batch sizes mean nothing here.
        shard, num_shards: which part of the files is read.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        cut: CutOptions,
        read: ReadOptions,
        mix: MixOptions,
        *,
        shard: int = 0,
        num_shards: int = 1,
        in_memory: Mapping[str, OpenStream] = MappingProxyType({}),
    ) -> None:
        assert 0 <= shard < num_shards, (shard, num_shards)
        super().__init__(streams, cut, read, mix, in_memory)
        self.is_ended = False
        """Without `repeat`: everything was handed out. Or this shard has no group at all."""
        self.epoch = 0
        self._shard, self._num_shards = shard, num_shards
        self.fixed_state: dict[str, Any] = {
            "version": STATE_VERSION,
            "fingerprint": fingerprint(self.streams, read, cut, seed=mix.seed, batching_mode="per_row"),
            "rank": shard,
            "world_size": num_shards,
        }
        self._uniforms = KeyedUniforms("pick", self.name, mix.seed, shard, num_shards)
        self._num_picks = 0
        self._begin(0, {})

    @cached_property
    def _sizes(self) -> list[int]:
        return [max(file_bytes(stream), 1) for stream in self.streams]

    @cached_property
    def _deal_order(self) -> list[int]:
        order: list[int] = keyed_generator("deal", self.name, self._mix.seed).permutation(len(self.streams)).tolist()
        return order

    def _deal(self, num_shards: int) -> list[list[Part]]:
        return deal_parts(self._sizes, self._deal_order, num_shards)

    def _queue_of(self, parts: Sequence[Part], epoch: int, number: int, shard: int, num_shards: int) -> list[Part]:
        """A shard's parts in the order of an epoch, after so many of its points."""
        generator = keyed_generator("queue", self.name, self._mix.seed, epoch, number, shard, num_shards)
        return [parts[at] for at in generator.permutation(len(parts))]

    def _begin(self, epoch: int, points: Mapping[int, list[Point]], index: int = 0) -> None:
        """Go to an epoch of which `index` parts were taken; points of earlier ones are dropped."""
        self.epoch, self._index = epoch, index
        self._points = {at: parts for at, parts in points.items() if at >= epoch}
        before = self._points.get(epoch, [])
        own = self._deal(self._num_shards)[self._shard]
        self._queue = self._queue_of(own, epoch, len(before), self._shard, self._num_shards)
        # By point: stream -> (its part, groups taken of it; -1: all of them), for what some shard had begun.
        self._past: list[dict[int, list[tuple[Part, int]]]] = []
        for number, point in enumerate(before):
            begun: defaultdict[int, list[tuple[Part, int]]] = defaultdict(list)
            for shard, (parts, (taken, active)) in enumerate(zip(self._deal(len(point)), point, strict=True)):
                numbers = dict(active)
                for part in self._queue_of(parts, epoch, number, shard, len(point))[:taken]:
                    begun[part.stream].append((part, numbers.get(part.stream, -1)))
            self._past.append(dict(begun))
        self._has_groups = bool(before) or index > 0

    def _reader(self, part: Part, taken: int = 0) -> Reader:
        stream = self.streams[part.stream]
        source = self._open(stream)
        generator = keyed_generator("groups", self.name, self._mix.seed, self.epoch, stream.relative_path)
        priority = generator.random(source.groups.num_groups)
        is_left = np.ones(len(priority), np.bool_)

        def in_order(mask: Flags) -> Ints:
            found = np.flatnonzero(mask)
            return found[np.argsort(priority[found], kind="stable")]

        for point in self._past:
            # Parts of one point have no group in common.
            for before, count in point.get(part.stream, []):
                own = in_order(before.of(source) & is_left)
                is_left[own if count < 0 else own[:count]] = False
        return Reader(source, in_order(part.of(source) & is_left), self.epoch, taken)

    def _next_reader(self) -> Reader | None:
        with self._timed():
            while self._index < len(self._queue):
                reader = self._reader(self._queue[self._index])
                self._index += 1
                if reader.remaining_picks:
                    return reader
        return None

    def __iter__(self) -> Iterator[Handed]:
        return self

    def __next__(self) -> Handed:
        if (handed := self.hand()) is None:
            raise StopIteration
        return handed

    def hand(self, may_begin_epoch: Callable[[], bool] = lambda: True) -> Handed | None:
        """The next group; None at the end (`is_ended`), or at that of an epoch if no other may begin yet.

        Raises:
            UserError: a file is unreadable or damaged.
        """
        pool = self._pool
        while not pool.readers and not self.is_ended:
            self._fill()
            if pool.readers:
                self._has_groups = True
                self._opener.say_cuts()
            elif not self._has_groups or not self._mix.repeat:
                self.is_ended = True  # a whole epoch had nothing for this shard, or it was the last
            elif may_begin_epoch():
                self._begin(self.epoch + 1, self._points)
            else:
                return None
        if self.is_ended:
            return None
        slot = pool.pick(self._uniforms(self._num_picks) if len(pool.readers) > 1 else 0.0)
        self._num_picks += 1
        reader = pool.readers[slot]
        found: Handed = reader.take()
        if reader.remaining_picks:
            pool.note(slot)
        else:
            self._exhaust_events += 1
            # After a resume more may be open than now should be.
            pool.replace(slot, self._next_reader() if len(pool.readers) <= self._mix.num_streams_mixed else None)
        return found

    def _fill(self) -> None:
        while len(self._pool.readers) < self._mix.num_streams_mixed and (reader := self._next_reader()) is not None:
            self._pool.add(reader)

    def drain_seconds(self) -> dict[str, float]:
        """What opening and tokenizing took since the last call."""
        found = dict(self._seconds)
        self._seconds.clear()
        return found

    def _is_read_out(self) -> bool:
        return self.is_ended

    def state_dict(self) -> dict[str, Any]:
        """Cursors and the pool's observations as plain Python; a snapshot that later picks do not change."""
        return {
            **self.fixed_state,
            "epoch": self.epoch,
            "index": self._index,
            "pool": [[reader.stream.stream_id, reader.taken] for reader in self._pool.readers],
            "turn": self._pool.turn,
            "observed": self._pool.observed(),
            "num_picks": self._num_picks,
            "is_ended": self.is_ended,
            "points": [[epoch, points] for epoch, points in self._points.items()],
        }

    def restarted(self, states: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The states of all saving shards for files that changed since: the next epoch begins, of the files as they are."""
        fresh, epoch = self.state_dict(), max(state["epoch"] for state in states) + 1
        kept = ("rank", "world_size", "num_picks")
        return [{**fresh, "epoch": epoch, **{key: state[key] for key in kept}} for state in states]

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue where a run stopped.

        Args:
            state: this shard's state, or those of all shards in order, which a change of their number needs.

        Raises:
            UserError: naming the differences, if the state does not fit.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        check_states(states, self.fixed_state)
        own = states[self._shard] if len(states) == self._num_shards else states[0]
        self._pool = ActivePool(self.modalities, self._mix.pick_mode, self._guard)
        if any(own[key] != self.fixed_state[key] for key in ("rank", "world_size")):
            if len(states) != own["world_size"]:
                problem = f"the state is that of data shard {own['rank']} of {own['world_size']}"
                raise UserError(self.name, problem, "give the states of all of them, in order")
            self._begin(*_resharded(states, [len(parts) for parts in self._deal(len(states))]))
            self._num_picks = max(each["num_picks"] for each in states)
            self.is_ended = all(each["is_ended"] for each in states)
            return
        self._begin(own["epoch"], {epoch: list(points) for epoch, points in own["points"]}, own["index"])
        parts = {part.stream: part for part in self._queue[: own["index"]]}
        for stream, taken in own["pool"]:
            self._pool.add(self._reader(parts[stream], taken))
        self._pool.turn = own["turn"]
        self._pool.restore(own["observed"])
        self._num_picks, self.is_ended = own["num_picks"], own["is_ended"]
        self._has_groups = self._has_groups or own["epoch"] > 0
        if own["pool"]:
            self._opener.say_cuts()
            self._fill()  # more may be open at once than before


def _resharded(states: Sequence[Mapping[str, Any]], num_parts: Sequence[int]) -> tuple[int, dict[int, list[Point]]]:
    """The epoch to continue in, the earliest of any shard, and the points of it and later ones.

    There, a shard that is ahead has taken its whole part; in later epochs, one that is behind has taken nothing.
    """
    # A shard without any group stays in its first epoch: it does not tell where the run is.
    going = [state["epoch"] for state in states if state["pool"] or not state["is_ended"]] or [states[0]["epoch"]]
    points: dict[int, list[Point]] = {}
    for state in states:
        points |= {epoch: list(parts) for epoch, parts in state["points"] if epoch >= min(going)}
    for epoch in range(min(going), max(going) + 1):
        cursors: Point = []
        for state, number in zip(states, num_parts, strict=True):
            if state["epoch"] == epoch:
                cursors.append([state["index"], state["pool"]])
            else:
                cursors.append([number if state["epoch"] > epoch else 0, []])
        points[epoch] = [*points.get(epoch, []), cursors]
    return min(going), points
