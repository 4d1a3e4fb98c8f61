"""StreamMixingDataset: micro-batches from a pool of active streams."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from trainer.data.collate import Batch, Collator
from trainer.data.documents import ReadOptions
from trainer.data.epochs import (
    STATE_VERSION,
    QueueKey,
    ReaderQueue,
    active_streams,
    check_states,
    fingerprint,
    points_of,
    reshard,
)
from trainer.data.formats import is_import_path
from trainer.data.groups import CutOptions, OpenStream, StreamOpener
from trainer.data.layout import Stream
from trainer.data.reader import StreamReader
from trainer.data.tokenizer import TimedTokenizer, Tokenizer
from trainer.errors import UserError
from trainer.hashing import KeyedUniforms
from trainer.metrics.best_effort import BestEffort
from trainer.wording import printable

PickMode: TypeAlias = Literal["weighted", "uniform", "round_robin"]
PICK_MODES: tuple[PickMode, ...] = ("weighted", "uniform", "round_robin")
BatchingMode: TypeAlias = Literal["per_stream", "device_per_stream"]
BATCHING_MODES: tuple[BatchingMode, ...] = ("per_stream", "device_per_stream")
STAGES = ("open", "tokenize", "read", "own_code")  # of reading, timed separately

REMAINING_MIN = "stream_mixing/active/remaining_min"
REMAINING_MAX = "stream_mixing/active/remaining_max"
FRACTION_MIN = "stream_mixing/active/remaining_fraction_min"
FRACTION_MAX = "stream_mixing/active/remaining_fraction_max"
STEPS_SINCE_PICK_MAX = "stream_mixing/active/steps_since_pick_max"
PICK_SURPRISE_MAX = "stream_mixing/active/pick_surprise_max"
MODALITY_PREFIX = "stream_mixing/active/modalities/"
EXHAUST_EVENTS = "stream_mixing/refill/exhaust_events"

# Rows of the pool's statistics. Quantities whose minimum is wanted are negated, so that one maximum over the readers
# answers all; so is the pick at which a reader was last picked, since the longest wait belongs to the smallest of those.
_NEG_REMAINING, _REMAINING, _NEG_FRACTION, _FRACTION, _NEG_LAST_PICK, _SURPRISE = range(6)
logger = logging.getLogger("trainer.data")


def pool_metric_keys(modalities: Iterable[str]) -> tuple[str, ...]:
    """Every key of `ActivePool.seen`."""
    peaks = (REMAINING_MIN, REMAINING_MAX, FRACTION_MIN, FRACTION_MAX, STEPS_SINCE_PICK_MAX, PICK_SURPRISE_MAX)
    return (*peaks, *(MODALITY_PREFIX + modality for modality in sorted(modalities)))


class ActivePool:
    """The active readers, one per slot: anything with `stream`, `remaining_picks` and `remaining_fraction`.

    `seen` holds the metrics of the last pick: what remained before it, and waits with it counted; empty before the
    first pick. They are computed when they are asked for.

    Args:
        modalities: all that can occur; each is reported at every pick, zeros included.
        pick_mode: `weighted` is in proportion to remaining picks.
        guard: of the metrics: if they fail, `seen` is empty and picks are the same.
    """

    def __init__(self, modalities: Sequence[str], pick_mode: PickMode, guard: BestEffort | None = None) -> None:
        self.readers: list[Any] = []
        self._seen: dict[str, float] | None = {}  # None: to be computed from what the last pick found
        self._found: tuple[Any, ...] = ()
        self.turn = 0  # the slot that round_robin picks next
        self._pick_mode = pick_mode
        self._stats = np.zeros((6, 0))
        self._counts = {MODALITY_PREFIX + modality: 0.0 for modality in sorted(modalities)}
        self._num_picks = 0
        self._guard = guard or BestEffort("pool metrics")

    def add(self, reader: Any) -> None:
        """Append a slot with this reader."""
        self.readers.append(reader)
        self._counts[MODALITY_PREFIX + reader.stream.modality] += 1.0
        self._stats = np.concatenate([self._stats, np.zeros((6, 1))], axis=1)
        self.note(len(self.readers) - 1)

    def replace(self, slot: int, reader: Any | None) -> None:
        """Put a reader into a slot, or, without one, remove the slot."""
        self._counts[MODALITY_PREFIX + self.readers[slot].stream.modality] -= 1.0
        if reader is None:
            del self.readers[slot]
            self._stats = np.delete(self._stats, slot, axis=1)
            self.turn -= self.turn > slot
            self.turn %= max(len(self.readers), 1)
            return
        self.readers[slot] = reader
        self._counts[MODALITY_PREFIX + reader.stream.modality] += 1.0
        self.note(slot)

    def note(self, slot: int) -> None:
        """Record the progress of a reader that was just picked and read from, or that is new."""
        reader = self.readers[slot]
        remaining, fraction = reader.remaining_picks, reader.remaining_fraction
        self._stats[:, slot] = (-remaining, remaining, -fraction, fraction, -self._num_picks, 0.0)

    def pick(self, uniform: float) -> int:
        """Choose a slot. Whoever then reads from its reader must call `note` or `replace`.

        Args:
            uniform: a number in [0, 1) that decides; not used by round_robin.
        """
        stats, num_readers, slot = self._stats, len(self.readers), 0
        if num_readers > 1:  # otherwise there is nothing to choose, and no surprise
            if self._pick_mode == "weighted":
                remaining = stats[_REMAINING]
                ends = remaining.cumsum()  # integers below 2^53: exact in float64
                total = float(ends[-1])
                # uniform * total may round up to total itself.
                slot = min(int(ends.searchsorted(uniform * total, side="right")), num_readers - 1)
                stats[_SURPRISE] -= np.log1p(remaining / -total)
            elif self._pick_mode == "uniform":
                slot = int(uniform * num_readers)
                stats[_SURPRISE] -= math.log1p(-1.0 / num_readers)
            else:
                slot = self.turn
                self.turn = (slot + 1) % num_readers
        self._num_picks += 1
        stats[_NEG_LAST_PICK, slot] = -self._num_picks
        stats[_SURPRISE, slot] = 0.0
        self._seen, self._found = None, (stats.copy(), self._num_picks, self._counts.copy())
        return slot

    @property
    def seen(self) -> dict[str, float]:
        """The metrics of the last pick."""
        if self._seen is None:
            self._seen = self._guard.run(self.snapshot, *self._found) or {}
        return self._seen

    @staticmethod
    def snapshot(stats: npt.NDArray[np.float64], num_picks: int, counts: Mapping[str, float]) -> dict[str, float]:
        """The metrics of a pool with these statistics."""
        peaks: list[float] = np.maximum.reduce(stats, axis=1).tolist()
        return {
            REMAINING_MIN: -peaks[_NEG_REMAINING],
            REMAINING_MAX: peaks[_REMAINING],
            FRACTION_MIN: 0.0 - peaks[_NEG_FRACTION],  # not a negative zero
            FRACTION_MAX: peaks[_FRACTION],
            STEPS_SINCE_PICK_MAX: num_picks + peaks[_NEG_LAST_PICK],
            PICK_SURPRISE_MAX: peaks[_SURPRISE],
            **counts,
        }

    def observed(self) -> dict[str, Any]:
        """What was observed so far, as plain Python: for `restore`, so that waits continue after a resume.

        `waits` has, for each slot, minus the pick at which its reader was last picked, and its surprise since then.
        """
        return {"num_picks": self._num_picks, "waits": self._stats[_NEG_LAST_PICK:].T.tolist(), "seen": self.seen}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what another pool observed, once the same readers are in the same slots."""
        self._num_picks, self._seen = state["num_picks"], dict(state["seen"])
        if state["waits"]:
            self._stats[_NEG_LAST_PICK:] = np.transpose(state["waits"])


@dataclass(frozen=True)
class MixOptions:
    """How the streams of a source are mixed.

    Args:
        num_streams_mixed: K; fewer if there are fewer streams.
        pick_mode: `weighted` by remaining picks, `uniform`, or `round_robin`.
        batching_mode: `per_stream`: all ranks pick the same stream and read disjoint slices of it; a rank whose slice
            is exhausted yields one fully masked row. `device_per_stream`: each rank has its own pool and picks; with
            `repeat`, a rank without any cells yields fully masked rows.
        batch_size, batch_size_by_modality: cells per micro-batch and rank.
        repeat: begin a new epoch after the last cell.
        seed: of every random choice.

    Raises:
        UserError: a setting is out of range.
    """

    num_streams_mixed: int = 4
    pick_mode: PickMode = "weighted"
    batching_mode: BatchingMode = "per_stream"
    batch_size: int = 8
    batch_size_by_modality: Mapping[str, int] = field(default_factory=dict)
    repeat: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for key, known in (("pick_mode", PICK_MODES), ("batching_mode", BATCHING_MODES)):
            if getattr(self, key) not in known:
                raise UserError(key, f"must be one of {', '.join(known)}, got {getattr(self, key)!r}")
        sizes = {f"batch_size_by_modality.{modality}": size for modality, size in self.batch_size_by_modality.items()}
        sizes |= {"num_streams_mixed": self.num_streams_mixed, "batch_size": self.batch_size}
        for key, number in sizes.items():
            if type(number) is not int or number < 1:
                raise UserError(key, f"must be an integer >= 1, got {number!r}")


class StreamSource:
    """Opens the streams of a source one after another into a pool, and reports what that takes and what the pool shows.

    Args:
        streams, cut, read, mix, in_memory: see `StreamMixingDataset`.

    Raises:
        UserError: no streams, or one twice.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        cut: CutOptions,
        read: ReadOptions,
        mix: MixOptions,
        in_memory: Mapping[str, OpenStream],
    ) -> None:
        self.name = cut.namespace
        twice = [path for path, times in Counter(stream.relative_path for stream in streams).items() if times > 1]
        if twice or not streams:
            problem = f"lists the stream {twice[0]} twice" if twice else "has no streams"
            raise UserError(self.name, problem, "name each of its files once")
        # Renumbered: they may be only a part of those discovered.
        self.streams = [replace(stream, stream_id=i) for i, stream in enumerate(streams)]
        self.modalities = sorted({stream.modality for stream in streams})
        self._mix = mix
        self._tokenizer = TimedTokenizer(read.tokenizer)
        self._opening = "own_code" if is_import_path(read.format) else "open"
        self._seconds: defaultdict[str, float] = defaultdict(float)  # of each of the `STAGES`
        options = replace(read, tokenizer=cast(Tokenizer, self._tokenizer))
        # What is held out is read from the files that the training data have, which warn of themselves.
        self._opener = StreamOpener(options, cut, warns=cut.split != "holdout", in_memory=in_memory)
        # Readers keep their streams open themselves; the cache serves those of the next epoch.
        self._open = lru_cache(2 * mix.num_streams_mixed)(self._opener)
        self._guard = BestEffort(f"pool metrics of {self.name} ({cut.split})")
        self.metric_keys = (*pool_metric_keys(self.modalities), EXHAUST_EVENTS)
        self._pool = ActivePool(self.modalities, mix.pick_mode, self._guard)
        self._exhaust_events = 0

    def open(self, stream: Stream) -> OpenStream:
        """One of its streams, with its groups.

        Raises:
            UserError: the file is unreadable or damaged.
        """
        return self._open(stream)

    @property
    def now_reading(self) -> str:
        """The file that was opened or read last; empty before the first. For any thread."""
        return "" if self._opener.current is None else printable(self._opener.current.path)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Note the time that opening takes, tokenizing apart."""
        start, before = time.perf_counter(), self._tokenizer.seconds
        yield
        tokenizing = self._tokenizer.seconds - before
        self._seconds["tokenize"] += tokenizing
        self._seconds[self._opening] += time.perf_counter() - start - tokenizing

    def _is_read_out(self) -> bool:
        """Whether nothing is left to pick from."""
        raise NotImplementedError

    def drain_step_metrics(self) -> dict[str, float | None]:
        """The pool's metrics at the last pick, and the exhausted readers since the last drain; {} before any pick.

        Once all data are read, only the counts: no reader is active, of any modality. None is what could not be measured.
        """
        gauges: Mapping[str, float | None] = self._pool.seen
        if not self._guard.enabled:
            gauges = dict.fromkeys(pool_metric_keys(self.modalities))
        elif self._is_read_out():
            gauges = {MODALITY_PREFIX + modality: 0.0 for modality in self.modalities}
        elif not gauges:
            return {}
        metrics = {**gauges, EXHAUST_EVENTS: float(self._exhaust_events)}
        self._exhaust_events = 0
        return metrics


class StreamMixingDataset(StreamSource):
    """An iterator of micro-batches; see `Collator` for their keys.

    `num_streams_mixed` readers are active. For each micro-batch one is picked and gives up to `batch_size` cells; an
    exhausted reader is replaced by the next stream of the epoch's permuted queue. When the queue and the pool are empty
    the epoch ends: with `repeat` the next begins, otherwise iteration stops. In an epoch every cell of the split is read
    exactly once over all ranks.

    Every random choice is a pure function of (name, seed, epoch, batch index, and the rank where ranks pick alone). So
    the state is cursors (and the pool's observations, for its metrics), and resuming on the same world gives bitwise
    identical samples.

    The namespace of `cut`, the source's name, must be unique in a blend. `in_memory`: see `StreamOpener`.

    Raises:
        UserError: no streams, or one twice; while iterating: a damaged file, or a split without documents.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        cut: CutOptions,
        read: ReadOptions,
        mix: MixOptions | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        in_memory: Mapping[str, OpenStream] = MappingProxyType({}),
    ) -> None:
        mix = mix or MixOptions()
        assert 0 <= rank < world_size, (rank, world_size)
        super().__init__(streams, cut, read, mix, in_memory)
        self._rank, self._world_size = rank, world_size
        self._shared = mix.batching_mode == "per_stream"
        self._fixed_state: dict[str, Any] = {  # the part of a state that is constant throughout a run
            "version": STATE_VERSION,
            "fingerprint": fingerprint(self.streams, read, cut, seed=mix.seed, batching_mode=mix.batching_mode),
            "rank": rank,
            "world_size": world_size,
            "num_streams_mixed": mix.num_streams_mixed,
            "batch_size": mix.batch_size,
            "batch_size_by_modality": dict(mix.batch_size_by_modality),
        }
        self._uniforms = KeyedUniforms("pick", self.name, mix.seed, "all" if self._shared else rank)
        self._collator = Collator(name=self.name, tokenizer=read.tokenizer, seq_len=cut.seq_len)
        self._queue = ReaderQueue(
            self.streams,
            open=self._open,
            key=QueueKey(self.name, mix.seed, len(streams), self._shared),
            sizes=self._fixed_state,
            rank=rank,
            world_size=world_size,
        )
        self._batch_index = 0
        self._has_no_cells = False  # a whole epoch had none for this rank

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self.next_with_tokens_before(0)

    def next_with_tokens_before(self, num_before: int) -> Batch:
        """The next micro-batch, with that many tokens before each cell (see `Collator`).

        Raises:
            StopIteration: without `repeat`, after the last.
            UserError: a file is unreadable or damaged, or the split has no documents.
        """
        pool, queue = self._pool, self._queue
        if not pool.readers and not self._fill():
            self._batch_index += 1
            return self._collator.masked(self.modalities[0], None, queue.epoch, 0, num_before)
        slot = pool.pick(self._uniforms(self._batch_index) if len(pool.readers) > 1 else 0.0)
        reader: StreamReader = pool.readers[slot]
        position = reader.position
        self._opener.current = reader.source.stream
        batch = self._collator.batch(reader, reader.take(), epoch=queue.epoch, position=position, num_before=num_before)
        self._batch_index += 1
        if reader.remaining_picks:
            pool.note(slot)
        else:
            self._exhaust_events += 1
            pool.replace(slot, self._next_reader())
        return batch

    def _fill(self) -> bool:
        """Fill the empty pool, from the next epoch if this one is over; False if this rank never gets a cell."""
        pool, queue = self._pool, self._queue
        while not self._has_no_cells:
            # The rest of an epoch may hold nothing for this rank; only a whole one proves that none ever does.
            is_whole = queue.is_whole
            while len(pool.readers) < self._mix.num_streams_mixed and (reader := self._next_reader()) is not None:
                pool.add(reader)
            if pool.readers:
                self._opener.say_cuts()
                return True
            if is_whole and not queue.has_cells:
                raise self._opener.nothing_left(self.name, "no document is left to read")
            if not self._mix.repeat:
                raise StopIteration
            if is_whole:
                self._has_no_cells = True
            else:
                queue.begin_epoch(queue.epoch + 1, queue.points)
        return False

    def _next_reader(self) -> StreamReader | None:
        with self._timed():
            return self._queue.next_reader()

    def drain_seconds(self, seconds: float) -> dict[str, float]:
        """What each of the `STAGES` took since the last call, of so many seconds in all."""
        stages = {**self._seconds, "read": seconds - sum(self._seconds.values())}
        self._seconds.clear()
        return stages

    def _is_read_out(self) -> bool:
        was_picked_from = bool(self._pool.seen)
        return was_picked_from and not self._mix.repeat and not self._pool.readers and self._queue.is_empty

    def state_dict(self) -> dict[str, Any]:
        """Cursors and the pool's observations as plain Python; a snapshot that later picks do not change."""
        return {
            **self._fixed_state,
            "epoch": self._queue.epoch,
            "batch_index": self._batch_index,
            "queue_index": self._queue.index,
            "turn": self._pool.turn,
            "is_barren": self._has_no_cells,
            "pool": list(map(list, map(attrgetter("stream_id", "picks"), self._pool.readers))),
            "observed": self._pool.observed(),
            "chapters": list(map(list, self._queue.points.items())),
        }

    def restarted(self, states: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The states of all saving ranks for files that changed since: the next epoch begins, of the files as they are.

        States of groups that are no longer read age out of the ledger.
        """
        fresh, epoch = self.state_dict(), max(state["epoch"] for state in states) + 1
        kept = ("rank", "world_size", "num_streams_mixed", "batch_size", "batch_size_by_modality", "batch_index")
        return [{**fresh, "epoch": epoch, **{key: state[key] for key in kept}} for state in states]

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue where a run stopped.

        Args:
            state: this rank's state, or those of all ranks in rank order. The latter is needed after a change of world
                size (or pool or batch size) with `device_per_stream`; with `per_stream` any one rank's state is enough.
                After such a change, what every group has consumed stays consumed: within the epoch nothing is read
                twice and nothing is lost.

        Raises:
            UserError: naming the differences, if the state does not fit this dataset.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        check_states(states, self._fixed_state)
        own = states[self._rank] if len(states) == self._world_size else states[0]
        layout = ("world_size", "num_streams_mixed", "batch_size", "batch_size_by_modality")
        is_same = all(own[key] == self._fixed_state[key] for key in layout)
        if not self._shared and (own["rank"] != self._rank if is_same else len(states) != own["world_size"]):
            problem = f"the state is that of rank {own['rank']} of {own['world_size']}, and this is rank {self._rank}"
            raise UserError(self.name, problem, "give each rank its own, or the states of all ranks, in rank order")
        self._pool = ActivePool(self.modalities, self._mix.pick_mode, self._guard)
        self._has_no_cells = False
        self._exhaust_events = 0
        if not is_same:
            epoch, points = reshard(states, len(self.streams), shared=self._shared)
            dropped = len(active_streams(points[epoch][-1])) - self._mix.num_streams_mixed
            if dropped > 0:  # they are at the front of the queue, so nothing is lost
                logger.info("[stream_mixing] resume reshard dropped %d still-active readers", dropped)
            self._queue.begin_epoch(epoch, points)
            self._batch_index = max(state["batch_index"] for state in states)
            return
        self._queue.begin_epoch(own["epoch"], points_of(own), own["queue_index"])
        for stream_id, picks in own["pool"]:
            self._pool.add(self._queue.reader(stream_id, picks))
        if own["pool"]:
            self._opener.say_cuts()
        self._pool.turn = own["turn"]
        self._pool.restore(own["observed"])
        self._has_no_cells = own["is_barren"]
        self._batch_index = own["batch_index"]
