"""One data shard's part of a source: read from a pool of open streams, saved, and resumed.

In full rows files are laid end to end in a keyed order and cut into stretches of equal size, one
per data shard, the same in all epochs: a large file is divided between shards at group boundaries,
and no shard waits for another. Within an epoch each group is handed out exactly once. The documents
of a source that has few for each shard are dealt one by one, anew in every epoch.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from trainer.arrays import Flags, Ints, KeyedUniforms, as_list, keyed_generator
from trainer.data.documents import ReadOptions
from trainer.data.fingerprint import check_states, fingerprint
from trainer.data.formats import is_import_path
from trainer.data.groups import CutOptions, Handed, OpenStream, file_bytes, nothing_left, open_stream
from trainer.data.layout import Stream
from trainer.data.pool import ActivePool, ReaderT, pool_metric_keys
from trainer.errors import UserError
from trainer.options import DEFAULT_STREAMS, MixingOptions, part_options
from trainer.wording import printable

Cursor = list[Any]
"""Of a shard in an epoch: `[parts taken from the queue, [[stream, how far it was read], ...]]`."""
Point = list[Cursor]
"""Of all shards, when their number changed in the middle of an epoch: the rest is dealt anew.
Points are dropped at its end."""
FEW = 8  # files and documents for each data shard; fewer are dealt anew in every epoch


@part_options
class MixOptions(MixingOptions):
    """How the streams of a source are mixed."""

    seed: int = 0
    """Seed of every random choice."""


class Share(Protocol):
    """What a shard reads of a stream in an epoch."""

    @property
    def stream(self) -> int: ...

    def of(self, source: OpenStream, left: Ints) -> Flags:
        """Which groups these are, bool [G]; `left`: the cells left of each, int64 [G]."""


ShareT = TypeVar("ShareT", bound=Share)


class Part(NamedTuple):
    """The groups of a stream that begin in [low, high) of its `size` bytes."""

    stream: int
    low: int
    high: int
    size: int

    def of(self, source: OpenStream, left: Ints) -> Flags:
        table, tokens = source.groups, len(source.documents.tokens)
        begins = source.documents.starts[table.documents] + table.first_cells * source.seq_len
        # Bytes are mapped to tokens in proportion, rounded up.
        low, high = (-(-edge * tokens // self.size) for edge in (self.low, self.high))
        found: Flags = (begins >= low) & (begins < high)
        return found


class Few(NamedTuple):
    """Some documents of a stream; of a stream without any, none."""

    stream: int
    documents: tuple[int, ...]

    def of(self, source: OpenStream, left: Ints) -> Flags:
        return np.isin(source.groups.documents, self.documents)


class FewDocuments:
    """Deals the documents of a source to shards so that all are begun equally often: epoch by epoch
    each document, the longest first, goes to the shard that was dealt the fewest tokens so far."""

    def __init__(self, documents: Sequence[tuple[int, int, int]], num_streams: int, num_shards: int) -> None:
        # Stream, document and tokens of each; the longest first.
        self._documents = sorted(documents, key=lambda each: -each[2])
        self.has_documents = bool(documents)
        self._empty = sorted(set(range(num_streams)) - {stream for stream, _, _ in documents})
        self._loads, self._epoch = [0] * num_shards, -1
        self._dealt: list[list[Few]] = []

    def deal(self, epoch: int) -> list[list[Few]]:
        """The parts that each shard reads in an epoch."""
        if epoch < self._epoch:
            self._loads, self._epoch = [0] * len(self._loads), -1
        while self._epoch < epoch:
            self._epoch += 1
            found: list[defaultdict[int, list[int]]] = [defaultdict(list) for _ in self._loads]
            for stream, document, tokens in self._documents:
                shard = self._loads.index(min(self._loads))
                self._loads[shard] += tokens
                found[shard][stream].append(document)
            for stream in self._empty:
                found[0][stream] = []
            self._dealt = [[Few(stream, tuple(own)) for stream, own in each.items()] for each in found]
        return self._dealt


@lru_cache(32)
def deal_parts(sizes: tuple[int, ...], order: tuple[int, ...], num_shards: int) -> list[list[Part]]:
    """The parts that each shard reads of streams of these sizes, laid end to end in this order."""
    ends = [*accumulate(sizes[stream] for stream in order)]
    bounds = [ends[-1] * shard // num_shards for shard in range(num_shards + 1)]
    parts: list[list[Part]] = [[] for _ in range(num_shards)]
    for low, high in pairwise(sorted({*ends, *bounds})):
        at, shard = bisect_right(ends, low), bisect_right(bounds, low) - 1
        stream, size = order[at], sizes[order[at]]
        begin = ends[at] - size
        parts[shard].append(Part(stream, low - begin, high - begin, size))
    return parts


class PartReader:
    """An open part of a stream: its groups in reading order, int64 [n], and how many were taken."""

    def __init__(self, source: OpenStream, order: Ints, epoch: int, taken: int = 0) -> None:
        self.source, self.stream = source, source.stream
        self._order, self._epoch, self.taken = order, epoch, taken

    @property
    def cursor(self) -> tuple[int, ...]:
        return (self.taken,)

    @property
    def remaining_picks(self) -> int:
        return len(self._order) - self.taken

    @property
    def remaining_fraction(self) -> float:
        """Share of the reader's groups that is left."""
        return self.remaining_picks / len(self._order)

    def ahead(self, num: int) -> list[Handed]:
        """The next groups, `num` or all that are left; `taken` stays."""
        return self.source.hand(self._order[self.taken : self.taken + num], self._epoch)


class StreamSource(ABC, Generic[ShareT, ReaderT]):
    """Opens the streams of a source one after another into a pool, epoch by epoch.

    An exhausted reader is replaced by the next of the epoch's shuffled queue. Every choice is a
    pure function of (name, seed, epoch, points, shard, number of shards, pick), so the state is
    cursors, and the pool's observations for its metrics. The namespace of `cut`, the source's name,
    is unique in a blend; `in_memory` has, by relative path, streams that are no files. Raises
    UserError for no streams, or one twice.
    """

    first_open: ClassVar[int] = 10**9  # streams that are opened before the first pick
    mode: str = "per_row"  # the batching mode, which a state belongs to
    # Keys of a state of which another value means that the rest of the epoch is dealt anew.
    layout: Sequence[str] = ("rank", "world_size")

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
        self.name, self.loss_mask = cut.namespace, read.loss_mask
        if not streams or len({stream.relative_path for stream in streams}) < len(streams):
            problem = "lists a stream twice" if streams else "has no streams"
            raise UserError(f"source {self.name}", problem, "name its files, each once")
        # Renumbered: they may be only a part of those discovered.
        self.streams = [replace(stream, stream_id=i) for i, stream in enumerate(streams)]
        self.modalities = sorted({stream.modality for stream in streams})
        # Everything was handed out, without `repeat`; or this shard has no group at all.
        self.is_ended = False
        self.epoch = 0
        self._most_begun = 0  # times that a document was begun at most, also by earlier shards
        self._mix, self._shard, self._num_shards = mix, shard, num_shards
        self._most_open = mix.streams_open
        self._to_open = min(self._most_open, self.first_open)  # now
        # The part of a state that is constant throughout a run.
        self.fixed_state: dict[str, Any] = {
            "fingerprint": fingerprint(self.streams, read, cut, seed=mix.seed, batching_mode=self.mode),
            "rank": shard,
            "world_size": num_shards,
        }
        self._opening = "own_code" if is_import_path(read.format) else "open"
        self._seconds: defaultdict[str, float] = defaultdict(float)  # of `_opening`
        self._cut, self._read, self._in_memory = cut, read, in_memory
        self._current: Stream | None = None  # being opened, or read from
        # Opens one of its streams, with its groups. UserError: the file is unreadable or damaged.
        # Readers keep their streams open themselves; the cache serves those of the next epoch.
        self.open = lru_cache(2 * mix.streams_open)(self._open)
        self.metric_keys = pool_metric_keys(self.modalities)
        self._pool = ActivePool[ReaderT](self.modalities, mix.pick_mode)
        self._num_picks = 0
        self._dealers: dict[int, FewDocuments | None] = {}  # by the number of shards
        self._uniforms = KeyedUniforms("pick", self.name, mix.seed, *self._key(shard, num_shards))
        self._begin(0, {})

    def _key(self, shard: int, num_shards: int) -> tuple[str | int, ...]:
        """Whose choices a shard makes: its own, unless all make the same."""
        return shard, num_shards

    @abstractmethod
    def _parts(self, epoch: int, shard: int, num_shards: int) -> Sequence[ShareT]:
        """The parts that a shard of so many reads in an epoch."""

    @abstractmethod
    def _reader(self, part: ShareT, cursor: Sequence[int] = ...) -> ReaderT:
        """A reader of a part in this epoch, from its beginning or from where it was."""

    @abstractmethod
    def _cells_read(self, cells: Ints, cursor: Sequence[int]) -> Ints:
        """Cells that a reader had read of its groups, of which `cells` were left, int64 [n]."""

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        held = {path: opened.num_bytes for path, opened in self._in_memory.items()}
        return tuple(max(1, held.get(each.relative_path) or file_bytes(each)) for each in self.streams)

    def _open(self, stream: Stream) -> OpenStream:
        self._current = stream
        opened = self._in_memory.get(stream.relative_path) or open_stream(stream, self._read, self._cut)
        self._current = None
        return opened

    def refuse_nothing(self) -> None:
        """Raises UserError if no stream has a document, on whatever shard."""
        if not any(self.open(stream).groups.num_groups for stream in self.streams):
            raise nothing_left(f"source {self.name}")

    @property
    def now_reading(self) -> str:
        """The file being opened, or, in batches of one stream, read; else empty. For any thread."""
        return "" if self._current is None else printable(self._current.path)

    def drain_seconds(self) -> dict[str, float]:
        """The seconds of opening streams since the last call, as the stage `open` or `own_code`."""
        found = dict(self._seconds)
        self._seconds.clear()
        return found

    @property
    def times_begun(self) -> tuple[int, int] | None:
        """How often a document of this shard was begun, at least and at most; None without any.

        Each is begun once an epoch. Where few are dealt anew, another shard may begin one for a
        later epoch first: then these are bounds, which all shards together keep.
        """
        self._note()
        if not self._pool.readers and self._points:  # others may have read what this epoch has left
            self._fill_pool()
        if self.is_ended and (self._mix.repeat or not self._queue):
            return None
        return self.epoch + self._has_begun_all(), self._most_begun

    def _has_begun_all(self) -> bool:
        """Whether each document of this epoch was begun."""
        return self._index > 0 and not self._pool.readers

    def drain_step_metrics(self) -> dict[str, float]:
        """See `ActivePool.drain`."""
        self._note()
        return self._pool.drain(is_ended=self.is_ended)

    def _queue_of(self, epoch: int, before: Sequence[Point], shard: int, num_shards: int) -> list[ShareT]:
        """A shard's parts in the order of an epoch, after these of its points."""
        parts = self._parts(epoch, shard, num_shards)
        key = ("queue", self.name, self._mix.seed, epoch, len(before), *self._key(shard, num_shards))
        return [parts[at] for at in keyed_generator(*key).permutation(len(parts)).tolist()]

    def _begin(self, epoch: int, points: Mapping[int, list[Point]], index: int = 0) -> None:
        """Go to an epoch of which `index` parts were taken; points of earlier ones are dropped."""
        self.epoch, self._index = epoch, index
        # Of full rows: groups picked ahead, the next one last; and the slots of picks to note.
        self._ahead: list[Handed] = []
        self._slots: list[int] = []
        self._points = {at: parts for at, parts in points.items() if at >= epoch}
        before = self._points.get(epoch, [])
        self._queue = self._queue_of(epoch, before, self._shard, self._num_shards)
        self._queued = Counter(self.streams[part.stream].modality for part in self._queue[index:])
        # By point: stream -> (its part, its reader's cursor; None: all was read), if it was begun.
        self._past: list[dict[int, list[tuple[ShareT, list[int] | None]]]] = []
        for number, point in enumerate(before):
            begun = defaultdict(list)
            for shard, (taken, active) in enumerate(point):
                cursors = {stream: cursor for stream, *cursor in active}
                for part in self._queue_of(epoch, before[:number], shard, len(point))[:taken]:
                    begun[part.stream].append((part, cursors.get(part.stream)))
            self._past.append(begun)
        self._has_groups = bool(before) or index > 0

    def _unread(self, stream: int) -> tuple[OpenStream, Ints, Callable[[Share, Ints], Ints]]:
        """A stream, the cells left of each of its groups in this epoch, int64 [G], and a function
        for the unfinished groups of a part in reading order, those first that were begun."""
        source = self.open(self.streams[stream])
        key = ("groups", self.name, self._mix.seed, self.epoch, source.stream.relative_path)
        cells = source.groups.num_cells
        priority, left = keyed_generator(*key).random(len(cells)), cells.copy()

        def in_order(part: Share, left: Ints) -> Ints:
            found = np.flatnonzero(part.of(source, left) & (left > 0))
            return found[np.argsort(priority[found] - (left[found] < cells[found]), kind="stable")]

        for point in self._past:
            begun = left.copy()  # before it; parts of one point have no group in common
            for before, cursor in point.get(stream, ()):
                own = in_order(before, begun)
                if cursor is None:
                    left[own] = 0
                else:
                    left[own] -= self._cells_read(left[own], cursor)
        return source, left, in_order

    def _next_reader(self) -> ReaderT | None:
        """The next with anything to read, None at the end of the epoch; notes the time it takes."""
        start, found, absences = time.perf_counter(), None, self._pool.absences
        while found is None and self._index < len(self._queue):
            reader, num_queued = self._reader(self._queue[self._index]), self._queued.total()
            self._index += 1
            self._queued[reader.stream.modality] -= 1
            if reader.remaining_picks:
                found = reader
                for modality in absences:  # the queue is shuffled
                    absences[modality] -= math.log1p(-self._queued[modality] / num_queued)
            absences[reader.stream.modality] = 0.0
        self._seconds[self._opening] += time.perf_counter() - start
        return found

    def _later_has_groups(self) -> bool:
        """Whether a later epoch may have groups for this shard though this one has none."""
        return False

    def _fill_pool(self) -> bool:
        """Keep `_to_open` readers open, from epoch to epoch; False once `is_ended`."""
        pool = self._pool
        while not self.is_ended:
            while len(pool.readers) < self._to_open and (reader := self._next_reader()) is not None:
                pool.add(reader)
            if pool.readers:
                self._has_groups = True
                break
            if not (self._has_groups or self._later_has_groups()) or not self._mix.repeat:
                self.is_ended = True  # a whole epoch had nothing for this shard, or it was the last
            else:
                self._begin(self.epoch + 1, self._points)
        return not self.is_ended

    def _note(self) -> None:
        """Record what was handed out since the last time."""
        if num := len(self._slots) - len(self._ahead):
            picked, self._slots = self._slots[:num], self._slots[num:]
            self._record(picked)

    def _record(self, slots: Sequence[int]) -> None:
        """Record picks of this epoch; only the last may exhaust its reader, which is replaced."""
        pool, slot = self._pool, slots[-1]
        pool.record(slots)
        self._num_picks += len(slots)
        self._most_begun = max(self._most_begun, self.epoch + 1)
        if pool.readers[slot].remaining_picks:
            return
        successor = None
        # After a resume more may be open than now should be.
        if len(pool.readers) <= self._most_open:
            successor = self._next_reader()
        pool.replace(slot, successor)
        self.is_ended = not (pool.readers or self._mix.repeat)

    def state_dict(self) -> dict[str, Any]:
        """Plain Python; a snapshot that later picks do not change."""
        self._note()
        return {
            **self.fixed_state,
            "epoch": self.epoch,
            "most_begun": self._most_begun,
            "index": self._index,
            "pool": [[reader.stream.stream_id, *reader.cursor] for reader in self._pool.readers],
            "turn": self._pool.turn,
            "observed": self._pool.observed(),
            "absences": self._pool.absences.copy(),
            "num_picks": self._num_picks,
            "is_ended": self.is_ended,
            "points": [[epoch, points] for epoch, points in self._points.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue where a run stopped: within the epoch nothing is read twice and nothing is lost.

        `state` is this shard's, or those of all shards in order, which a change of what is in
        `layout` needs (not with `per_stream`, where all are alike). UserError: it does not fit.
        """
        states = as_list(state)
        check_states(states, self.fixed_state)
        own = states[self._shard % len(states)]
        self._to_open = min(self._most_open, self.first_open)
        self._pool = ActivePool[ReaderT](self.modalities, self._mix.pick_mode)
        if any(own[key] != self.fixed_state[key] for key in self.layout):
            self._reshard(states)
        else:
            states = [own]
            points = {epoch: list(points) for epoch, points in own["points"]}
            self._begin(own["epoch"], points, own["index"])
            parts = {part.stream: part for part in self._queue[: own["index"]]}
            for stream, *cursor in own["pool"]:
                self._pool.add(self._reader(parts[stream], cursor))
            self._pool.turn = own["turn"]
            self._pool.restore(own["observed"])
            self._pool.absences |= own["absences"]
            self._has_groups = self._has_groups or own["epoch"] > 0
        self._most_begun = max(each["most_begun"] for each in states)
        self._num_picks = max(each["num_picks"] for each in states)
        # Data that ended without `repeat` may go on with it; a shard that never picked has none.
        may_repeat = self._mix.repeat and self._num_picks > 0
        self.is_ended = all(each["is_ended"] for each in states) and not may_repeat
        if self._pool.readers:
            self._fill_pool()  # more may be open at once than before

    def _reshard(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue the earliest epoch of other shards, and later ones, where each of them was."""
        first = states[0]
        if len(states) != first["world_size"]:
            problem = f"the state is that of data shard {first['rank']} of {first['world_size']}"
            raise UserError(f"source {self.name}", problem, "give the states of all of them, in order")
        # A shard without any group stays in its first epoch: it does not tell where the run is.
        epochs = [each["epoch"] for each in states if each["pool"] or not each["is_ended"]] or [first["epoch"]]
        points: dict[int, list[Point]] = {}
        for state in states:
            points |= {epoch: list(found) for epoch, found in state["points"]}
        for epoch in range(min(epochs), max(each["epoch"] for each in states) + 1):
            point: Point = []
            for shard, state in enumerate(states):
                cursor = [state["index"], state["pool"]]
                if state["epoch"] > epoch:  # has taken its whole part
                    cursor = [len(self._parts(epoch, shard, len(states))), []]
                elif state["epoch"] < epoch:
                    cursor = [0, []]
                point.append(cursor)
            points[epoch] = [*points.get(epoch, []), point]
        self._begin(min(epochs), points)


class ShardSource(StreamSource[Part | Few, PartReader]):
    """Hands out the groups that a data shard reads, shuffled anew in every epoch, for full rows."""

    first_open = DEFAULT_STREAMS

    def _parts(self, epoch: int, shard: int, num_shards: int) -> Sequence[Part | Few]:
        few = self._dealer_of(num_shards)
        if few is not None:
            return few.deal(epoch)[shard]
        order = keyed_generator("deal", self.name, self._mix.seed).permutation(len(self.streams))
        return deal_parts(self._sizes, tuple(order.tolist()), num_shards)[shard]

    def _dealer_of(self, num_shards: int) -> FewDocuments | None:
        """What deals the documents one by one, if there are few for each of so many shards."""
        if num_shards == 1 or len(self.streams) >= FEW * num_shards:  # about as many documents
            return None
        if num_shards not in self._dealers:
            found: list[tuple[int, int, int]] = []
            self._dealers[num_shards] = None
            for stream in self.streams:
                source = self.open(stream)
                tokens = np.bincount(source.groups.documents, source.num_tokens()).astype(np.int64)
                owners = np.unique(source.groups.documents)
                found += [(stream.stream_id, at, int(tokens[at])) for at in owners.tolist()]
                if len(found) >= FEW * num_shards:
                    break
            else:
                self._dealers[num_shards] = FewDocuments(found, len(self.streams), num_shards)
        return self._dealers[num_shards]

    def _reader(self, part: Part | Few, cursor: Sequence[int] = (0,)) -> PartReader:
        source, left, in_order = self._unread(part.stream)
        return PartReader(source, in_order(part, left), self.epoch, *cursor)

    def _cells_read(self, cells: Ints, cursor: Sequence[int]) -> Ints:
        return np.where(np.arange(len(cells)) < cursor[0], cells, 0)

    def _later_has_groups(self) -> bool:
        few = self._dealer_of(self._num_shards)
        return few is not None and few.has_documents

    def __iter__(self) -> Iterator[list[Handed]]:
        return iter(self.hand, [])

    def hand(self, room: int = 1) -> list[Handed]:
        """The next groups, of `room` tokens or all that were picked ahead; none at the end
        (`is_ended`). UserError: a damaged file."""
        if not self._ahead:
            uniforms = self._uniforms.ahead(self._num_picks)
            if self._to_open < self._most_open:
                # Many streams open one by one, as the first documents are handed out.
                self._to_open = min(self._most_open, max(self.first_open, self._num_picks + 1))
                uniforms = uniforms[:1]
            if not self._fill_pool():
                return []
            readers = self._pool.readers
            self._slots = self._pool.choose(uniforms)
            of_slot = {slot: iter(readers[slot].ahead(num)) for slot, num in Counter(self._slots).items()}
            self._ahead = [next(of_slot[slot]) for slot in self._slots][::-1]
        found: list[Handed] = []
        while self._ahead and room > 0:
            found.append(self._ahead.pop())
            room -= found[-1].num_tokens
        if not self._ahead:
            self._note()
        return found
