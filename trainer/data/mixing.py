"""StreamMixingDataset: micro-batches from a pool of active streams."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from trainer.data import mixing_state
from trainer.data.collate import Batch, Collator
from trainer.data.documents import ReadOptions
from trainer.data.epochs import QueueKey, ReaderQueue, active_streams
from trainer.data.formats import is_import_path
from trainer.data.groups import Split, check_split
from trainer.data.keyed import KeyedUniforms
from trainer.data.layout import Stream
from trainer.data.open_stream import CutOptions, StreamOpener
from trainer.data.pool import PICK_MODES, ActivePool, PickMode, modality_keys, pool_metric_keys
from trainer.data.reader import StreamReader
from trainer.data.tokenizer import TimedTokenizer, Tokenizer
from trainer.errors import UserError
from trainer.metrics.best_effort import BestEffort
from trainer.wording import printable

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

BatchingMode: TypeAlias = Literal["per_stream", "device_per_stream"]
BATCHING_MODES: tuple[BatchingMode, ...] = ("per_stream", "device_per_stream")
STAGES = ("open", "tokenize", "read", "own_code")  # of reading, whose seconds are told apart
EXHAUST_EVENTS = "stream_mixing/refill/exhaust_events"
logger = logging.getLogger("trainer.data")


def _check_settings(num_before: int, choices: Mapping[str, tuple[str, tuple[str, ...]]], **numbers: int) -> None:
    for key, (value, known) in choices.items():
        if value not in known:
            raise UserError(key, f"must be one of {', '.join(known)}; got {value!r}")
    for key, number in {**numbers, "tokens_before": num_before}.items():
        least = 0 if key == "tokens_before" else 1
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise UserError(key, f"must be an integer >= {least}, got {number!r}")


def _numbered(streams: Sequence[Stream], name: str) -> list[Stream]:
    """The streams, renumbered: they may be only a part of those discovered."""
    if not streams:
        raise UserError(name, "has no streams", "check the source's paths")
    path, times = Counter(stream.relative_path for stream in streams).most_common(1)[0]
    if times > 1:
        raise UserError(name, f"lists the stream {path} twice", "list each file once")
    return [replace(stream, stream_id=i) for i, stream in enumerate(streams)]


class StreamMixingDataset:
    """An iterator of micro-batches; see `Collator` for their keys.

    `num_streams_mixed` readers are active. For each micro-batch one is picked and gives up to `batch_size` cells; an
    exhausted reader is replaced by the next stream of the epoch's permuted queue. When the queue and the pool are empty
    the epoch ends: with `repeat` the next begins, otherwise iteration stops. In an epoch every cell of the split is read
    exactly once over all ranks.

    Every random choice is a pure function of (name, seed, epoch, batch index, and the rank where ranks pick alone). So
    the state is cursors (and the pool's observations, for its metrics), and resuming on the same world gives bitwise
    identical samples.

    Args:
        streams: from `discover_nested` or `discover_direct`.
        name: the source's name: `dataset_labels`, and part of every group id; unique in a blend.
        tokenizer: tokenizes text, and bounds the ids in files.
        seq_len: target tokens per cell, T.
        num_streams_mixed: K; fewer if there are fewer streams.
        pick_mode: `weighted` by remaining picks, `uniform`, or `round_robin`.
        batching_mode: `per_stream`: all ranks pick the same stream and read disjoint slices of it; a rank whose slice
            is exhausted yields one fully masked row. `device_per_stream`: each rank has its own pool and picks; with
            `repeat`, a rank without any cells yields fully masked rows.
        batch_size, batch_size_by_modality: cells per micro-batch and rank.
        max_group_cells: most cells per group.
        pack: put several documents shorter than a cell into one row.
        repeat: begin a new epoch after the last cell.
        tokens_before: n: every batch has the n tokens before each cell too; 0: none. See `Collator`.
        seed: of every random choice.
        rank, world_size: this rank, and the number of ranks.
        split, holdout_fraction: which documents are used.
        format, dtype, eod, text_split: how files are read; see `open_documents`.

    Raises:
        UserError: a setting is out of range; while iterating: a damaged file, or a split without documents.
    """

    # Over 60 lines: a third is the signature, the rest passes each setting to the part that needs it.
    def __init__(
        self,
        streams: Sequence[Stream],
        *,
        name: str,
        tokenizer: Tokenizer,
        seq_len: int,
        num_streams_mixed: int = 4,
        pick_mode: PickMode = "weighted",
        batching_mode: BatchingMode = "per_stream",
        batch_size: int = 8,
        batch_size_by_modality: Mapping[str, int] | None = None,
        max_group_cells: int = 64,
        pack: bool = False,
        repeat: bool = True,
        tokens_before: int = 0,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        split: Split = "train",
        holdout_fraction: float = 0.0,
        format: str = "auto",
        dtype: str | None = None,
        eod: int | None = None,
        text_split: str = "file",
    ) -> None:
        sizes = dict(batch_size_by_modality or {})
        _check_settings(
            tokens_before,
            {"pick_mode": (pick_mode, PICK_MODES), "batching_mode": (batching_mode, BATCHING_MODES)},
            num_streams_mixed=num_streams_mixed,
            batch_size=batch_size,
            seq_len=seq_len,
            max_group_cells=max_group_cells,
            **{f"batch_size_by_modality.{modality}": size for modality, size in sizes.items()},
        )
        check_split(split, holdout_fraction)
        assert 0 <= rank < world_size, (rank, world_size)
        self.name = name
        self.streams = _numbered(streams, name)
        self.modalities = sorted({stream.modality for stream in streams})
        self._rank, self._world_size = rank, world_size
        self._num_streams_mixed = num_streams_mixed
        self._pick_mode: PickMode = pick_mode
        self._shared = batching_mode == "per_stream"
        self._repeat = repeat
        self._num_before = tokens_before
        self._guard = BestEffort(f"pool metrics of {name} ({split})")
        self.metric_keys = (*pool_metric_keys(self.modalities), EXHAUST_EVENTS)
        self._tokenizer = TimedTokenizer(tokenizer)
        self._opening = "own_code" if is_import_path(format) else "open"
        self._seconds: defaultdict[str, float] = defaultdict(float)  # see `drain_seconds`
        options = ReadOptions(cast(Tokenizer, self._tokenizer), dtype, eod, text_split)
        cut = CutOptions(name, seq_len, max_group_cells, pack, split, holdout_fraction)
        self._fixed_state = {  # the part of a state that is constant throughout a run
            "version": mixing_state.VERSION,
            "fingerprint": mixing_state.fingerprint(
                self.streams, options, cut, format=format, seed=seed, batching_mode=batching_mode
            ),
            "rank": rank,
            "world_size": world_size,
            "num_streams_mixed": num_streams_mixed,
            "batch_size": batch_size,
            "batch_size_by_modality": sizes,
        }
        self._uniforms = KeyedUniforms("pick", name, seed, "all" if self._shared else rank)
        self._no_stream = f'"source": {json.dumps(name)}, "stream": null'
        self._collator = Collator(name=name, tokenizer=tokenizer, seq_len=seq_len, pack=pack)
        # What is held out is read from the files that the training data have, which warn of themselves.
        self._opener = StreamOpener(format=format, options=options, cut=cut, warns=split != "holdout")
        self._queue = ReaderQueue(
            self.streams,
            # Readers keep their streams open themselves; the cache serves those of the next epoch.
            open=lru_cache(2 * num_streams_mixed)(self._opener),
            key=QueueKey(name, seed, len(streams), self._shared),
            sizes=self._fixed_state,
            rank=rank,
            world_size=world_size,
        )
        self._pool: ActivePool[StreamReader] = ActivePool(self.modalities, pick_mode, self._guard)
        self._batch_index = 0
        self._exhaust_events = 0
        self._has_no_cells = False  # a whole epoch had none for this rank

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self.next_with_tokens_before(0)

    def next_with_tokens_before(self, tokens_before: int) -> Batch:
        """The next micro-batch, with at least that many tokens before each cell.

        Raises:
            StopIteration: without `repeat`, after the last.
            UserError: a file is unreadable or damaged, or the split has no documents.
        """
        num_before = max(tokens_before, self._num_before)
        pool, queue = self._pool, self._queue
        if not pool.readers and not self._fill():
            self._batch_index += 1
            return self._collator.masked(self.modalities[0], self._no_stream, queue.epoch, 0, num_before)
        slot = pool.pick(self._uniforms(self._batch_index) if len(pool.readers) > 1 else 0.0)
        reader = pool.readers[slot]
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

    @property
    def now_reading(self) -> str:
        """The file that is being read; empty before the first. For any thread."""
        return "" if self._opener.current is None else printable(self._opener.current.path)

    def _fill(self) -> bool:
        """Fill the empty pool, from the next epoch if this one is over; False if this rank never gets a cell."""
        pool, queue = self._pool, self._queue
        while not self._has_no_cells:
            # The rest of an epoch may hold nothing for this rank; only a whole one proves that none ever does.
            is_whole = queue.is_whole
            while len(pool.readers) < self._num_streams_mixed and (reader := self._next_reader()) is not None:
                pool.add(reader)
            if pool.readers:
                return True
            if is_whole and not queue.has_cells:
                raise self._opener.nothing_left(self.name, "no document is left to read")
            if not self._repeat:
                raise StopIteration
            if is_whole:
                self._has_no_cells = True
            else:
                queue.begin_epoch(queue.epoch + 1, queue.points)
        return False

    def _next_reader(self) -> StreamReader | None:
        start, before = time.perf_counter(), self._tokenizer.seconds
        reader = self._queue.next_reader()
        tokenizing = self._tokenizer.seconds - before
        self._seconds["tokenize"] += tokenizing
        self._seconds[self._opening] += time.perf_counter() - start - tokenizing
        return reader

    def drain_seconds(self, seconds: float) -> dict[str, float]:
        """What each of the `STAGES` took since the last call, of so many seconds in all."""
        stages = {**self._seconds, "read": seconds - sum(self._seconds.values())}
        self._seconds.clear()
        return stages

    def count_cells(self) -> dict[str, int]:
        """Cells per epoch over all ranks, by modality. Opens every stream, so it finds damaged files in advance.

        Raises:
            UserError: for the first file that is unreadable or damaged.
        """
        counts = dict.fromkeys(self.modalities, 0)
        for stream in self.streams:
            counts[stream.modality] += self._queue.count_cells(stream)
        return counts

    def drain_step_metrics(self) -> dict[str, float | None]:
        """The pool's metrics at the last pick, and the exhausted readers since the last drain; {} before any pick.

        Once all data are read, only the counts: no reader is active, of any modality. None is what could not be measured.
        """
        gauges: Mapping[str, float | None] = self._pool.seen
        if not self._guard.enabled:
            gauges = dict.fromkeys(pool_metric_keys(self.modalities))
        elif not gauges:
            return {}
        elif not self._repeat and not self._pool.readers and self._queue.is_empty:
            gauges = dict.fromkeys(modality_keys(self.modalities), 0.0)
        metrics = {**gauges, EXHAUST_EVENTS: float(self._exhaust_events)}
        self._exhaust_events = 0
        return metrics

    def aggregate_step_metrics(
        self,
        local: Mapping[str, float | None],
        world_size: int,
        device: torch.device | str,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, float]:
        """Reduce drained metrics over ranks; every rank must call it, also with {}. See `reduce_over_ranks`."""
        from trainer.metrics.aggregate import reduce_over_ranks  # needs torch, which looking at data does not

        return reduce_over_ranks(local, self.metric_keys, group=group, device=device, world_size=world_size)

    def state_dict(self) -> dict[str, Any]:
        """Cursors and the pool's observations as plain Python; a snapshot that later picks do not change."""
        return {
            **self._fixed_state,
            "epoch": self._queue.epoch,
            "batch_index": self._batch_index,
            "queue_index": self._queue.index,
            "turn": self._pool.turn,
            "is_barren": self._has_no_cells,
            "pool": [[reader.stream_id, reader.picks] for reader in self._pool.readers],
            "observed": self._pool.observed(),
            "chapters": [list(each) for each in self._queue.points.items()],
        }

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
        mixing_state.check_states(states, self._fixed_state)
        own = states[self._rank] if len(states) == self._world_size else states[0]
        is_same = mixing_state.is_same_layout(own, self._fixed_state)
        if not self._shared and (own["rank"] != self._rank if is_same else len(states) != own["world_size"]):
            problem = f"the state is that of rank {own['rank']} of {own['world_size']}, and this is rank {self._rank}"
            raise UserError(self.name, problem, "give each rank its own, or the states of all ranks, in rank order")
        self._pool = ActivePool(self.modalities, self._pick_mode, self._guard)
        self._has_no_cells = False
        self._exhaust_events = 0
        if is_same:
            self._resume(own)
        else:
            self._reshard(states)

    def _resume(self, state: Mapping[str, Any]) -> None:
        self._queue.begin_epoch(state["epoch"], mixing_state.points_of(state), state["queue_index"])
        for stream_id, picks in state["pool"]:
            self._pool.add(self._queue.reader(stream_id, picks))
        self._pool.turn = state["turn"]
        self._pool.restore(state["observed"])
        self._has_no_cells = state["is_barren"]
        self._batch_index = state["batch_index"]

    def _reshard(self, states: Sequence[Mapping[str, Any]]) -> None:
        epoch, points = mixing_state.reshard(states, len(self.streams), shared=self._shared)
        dropped = len(active_streams(points[epoch][-1])) - self._num_streams_mixed
        if dropped > 0:
            # They are at the front of the queue, so nothing is lost.
            logger.info("[stream_mixing] resume reshard dropped %d still-active readers", dropped)
        self._queue.begin_epoch(epoch, points)
        self._batch_index = max(state["batch_index"] for state in states)
