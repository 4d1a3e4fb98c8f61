"""Full rows: every micro-batch is [B, T], and the state still follows its document.

A lane is a row of the micro-batch that reads documents one behind the other; a document (or a part of one, where
`max_group_cells` cuts it) stays on one lane from its beginning to its end. Rows are the lane's consecutive windows of T target
tokens. With `runs_on` they have no gaps: `resets` marks where a document begins, at the first position of a row too. Without it
a document begins at the beginning of a row, and its last row is padded.

    lane 3   | doc 17 ............................ | doc 4 | doc 90 | doc 8 .......................
             row k                      row k+1                      row k+2

Which source the next document comes from is decided by claims, so that weights are shares of tokens: whenever n tokens are
handed to a lane, each source that can be read gains its current share of n, and the one they came from loses n; the largest
claim is served next. Nothing is computed from the past, so a weight that changes causes no catching up.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, cast

import numpy as np

from trainer.arrays import IGNORED, Ints
from trainer.data.blend import BlendDataset, BlendSource
from trainer.data.collate import Batch
from trainer.data.groups import OpenStream
from trainer.data.reader import check_size
from trainer.data.shard_source import ShardSource
from trainer.data.tokenizer import Tokenizer
from trainer.errors import UserError
from trainer.metrics.logger import get_logger
from trainer.micro_batches import ONE, MicroBatches
from trainer.wording import counted

logger = get_logger(__name__)


class Place(NamedTuple):
    """Where a lane is in a group."""

    source: str
    epoch: int
    stream: int
    group: int
    group_id: int
    offset: int = 0
    """Tokens read."""
    rows: int = 0
    """Rows that it was in."""


class Segment(NamedTuple):
    """What a row holds of a document: target tokens [start, stop) of it."""

    source: str
    stream: str
    epoch: int
    document: int
    start: int
    stop: int


class Located:
    """What the rows of a micro-batch hold, as JSON once it is asked for."""

    def __init__(self, rows: Sequence[Sequence[Segment]], group_ids: Ints, cell_index: Ints) -> None:
        self.rows, self._group_ids, self._cell_index = rows, group_ids, cell_index

    def __str__(self) -> str:
        rows = [[segment._asdict() for segment in row] for row in self.rows]
        ids = {"group_ids": self._group_ids.tolist(), "cell_indices": self._cell_index.tolist()}
        return json.dumps({"rows": rows, **ids})


class Lane:
    """A row position, and the group that it reads."""

    def __init__(self) -> None:
        self.left = 0
        """Tokens of the group that are to be read; 0: there is none."""

    def begin(self, place: Place, opened: OpenStream) -> None:
        """Take up a group at its place."""
        table, documents = opened.groups, opened.documents
        self.opened, self.stream, self.modality = opened, opened.stream.relative_path, opened.stream.modality
        self.source, self.epoch, _, self.group, self.group_id, self.offset, self.rows = place
        self.document = int(table.documents[self.group])
        first = int(table.first_cells[self.group]) * opened.seq_len  # of the document's tokens
        length = int(documents.lengths[self.document]) - first
        self.left = min(length, int(table.num_cells[self.group]) * opened.seq_len) - self.offset
        self.at = first + self.offset
        """Tokens of the document before the next one that is read."""
        self._tokens = np.asarray(documents.tokens)  # of a mapped file without the price of a memmap's slices
        self._begin = int(documents.starts[self.document])
        self._bounds = documents.bounds

    @property
    def place(self) -> Place | None:
        """Where it is."""
        if not self.left:
            return None
        stream = self.opened.stream.stream_id
        return Place(self.source, self.epoch, stream, self.group, self.group_id, self.offset, self.rows)

    def read(self, tokens: Ints, targets: Ints, bos: int) -> Segment:
        """Fill these positions of a row, at most `left`, and move on.

        Raises:
            UserError: an id is outside the vocabulary.
        """
        size, at = len(targets), self.at
        begin = self._begin + at
        if at:
            read = self._tokens[begin - 1 : begin + size]
            tokens[:], targets[:] = read[:-1], read[1:]
        else:
            read = self._tokens[begin : begin + size]
            targets[:] = read
            tokens[0], tokens[1:] = bos, read[:-1]
        if self._bounds is not None:
            self._bounds.check(read, begin - (at > 0))
        self.left -= size
        self.offset += size
        self.at += size
        return Segment(self.source, self.stream, self.epoch, self.document, at, at + size)

    def before(self, num: int, bos: int) -> Ints:
        """The inputs of the last `num` of the group's tokens that were read, fewer at its beginning."""
        size = min(num, self.offset)
        start = self.at - size
        read = self.opened.documents.read(self.document, max(start - 1, 0), self.at - 1).astype(np.int64)
        return read if start else np.concatenate([[bos], read])


class LaneBlend(BlendDataset):
    """An iterator of micro-batches [B, T] from lanes; see the module.

    Keys beside those of `Collator`: with `runs_on`, `resets` bool [B, T], and `end_ids`, `end_cell_index` int64 [B], the group
    that continues behind the row, -1 for none, and its cell there (a row that begins with a new group looks up none); `depth`
    int64 [B], tokens of the row's group before the row; `segment_ids` int32 [B, T], the segment of each target, -1 where there
    is none. `dataset_labels` and `dataset_segments` name the source and the modality of each segment.

    A source that is no `ShardSource` gives whole micro-batches of its own, by the same claims.

    Args:
        sources, seed, micro_batches, per_source, times, history_every, history_tokens: see `BlendDataset`.
        rows: lanes, B.
        row_tokens: T.
        runs_on: documents begin within rows.

    Raises:
        UserError: as `BlendDataset`; a file is unreadable or damaged.
    """

    def __init__(
        self,
        sources: Sequence[BlendSource],
        *,
        seed: int,
        rows: int,
        row_tokens: int,
        runs_on: bool,
        tokenizer: Tokenizer,
        micro_batches: MicroBatches = ONE,
        **options: Any,
    ) -> None:
        super().__init__(sources, seed=seed, micro_batches=micro_batches, **options)
        self._lanes = [Lane() for _ in range(rows)]
        self._waiting: list[Place] = []  # of a run with more lanes: begun, and taken up before anything new
        self._row_tokens, self._runs_on = row_tokens, runs_on
        self._bos = tokenizer.bos_id
        types = tokenizer.token_type_table
        # Extended so that index IGNORED (from the end) is -1: one take then serves all targets.
        self._types = None if types is None else np.concatenate([types, np.full(-IGNORED, -1, dtype=np.int8)])
        self._claims = [0.0] * len(sources)
        self._total = 0
        self._shares: list[float] = []
        self._is_constant = all(len(source.weight.points) == 1 for source in sources)
        self._by_name = {source.name: index for index, source in enumerate(sources)}
        # A target's batches are its own; lanes read the others.
        self._laned = [index for index, source in enumerate(sources) if isinstance(source.dataset, ShardSource)]
        first: Any = sources[self._laned[0]].dataset if self._laned else None
        self._shard = (first.fixed_state["rank"], first.fixed_state["world_size"]) if self._laned else (0, 1)
        self._batched = [
            index for index in range(len(sources)) if index not in self._laned and not _is_off(sources[index])
        ]

    @property
    def places(self) -> list[Place | None]:
        """Where each lane is, and the groups that wait for one."""
        return [*map(attrgetter("place"), self._lanes), *self._waiting]

    @property
    def groups_in_flight(self) -> list[int]:
        """Ids of the groups that are begun and not finished."""
        return [place.group_id for place in self.places if place is not None]

    @property
    def waiting_groups(self) -> list[int]:
        """Ids of those that wait for a row to continue on."""
        return [place.group_id for place in self._waiting]

    def next_with_tokens_before(self, tokens_before: int) -> Batch:
        """The next micro-batch, with at least that many tokens of its group before each row.

        Raises:
            StopIteration: every source is exhausted, or stays at weight zero, and the lanes are dry.
            UserError: all weights are zero at this batch, and the lanes are dry.
        """
        began = time.perf_counter()
        self._shares = self._shares_now()
        batch = self._whole_batch(tokens_before) if self._batched else None
        if batch is None:
            batch = self._from_lanes(tokens_before)
            self._note_times(time.perf_counter() - began)
        self._batch_index += 1
        return batch

    def _given(self) -> tuple[int, list[float]]:
        return self._total, self._expected[0]

    def _shares_now(self) -> list[float]:
        at = self._batch_index
        if self._shares and self._is_constant and not self.changes:
            return self._shares
        step = self._micro_batches.step_of(at) if self._is_known_ahead else 0
        return self.shares_at(step, at)

    def _largest(self, among: Sequence[int]) -> int:
        """The source with the largest claim that can be read; -1: none can."""
        found = [index for index in among if self._shares[index] > 0 and not self._ended[index]]
        return max(found, key=lambda index: (self._claims[index], self._shares[index], -index), default=-1)

    def _hand(self, index: int, num_tokens: int) -> None:
        """Settle the claims for tokens that a source has given."""
        open_now = [i for i, share in enumerate(self._shares) if share > 0 and not self._ended[i]]
        whole = sum(self._shares[i] for i in open_now)
        for i in range(len(self._claims)):
            if i in open_now:
                self._claims[i] += num_tokens * self._shares[i] / whole
            else:
                self._claims[i] = 0.0  # nothing is owed to what cannot be read
        self._claims[index] -= num_tokens
        self._counts[index] += num_tokens
        self._total += num_tokens
        self._expected[0] = [e + share * num_tokens for e, share in zip(self._expected[0], self._shares, strict=True)]
        self._unsaved.add(index)
        self._undrained.add(index)

    def _whole_batch(self, tokens_before: int) -> Batch | None:
        """A batch of a source that makes its own, if one has the largest claim."""
        while (index := self._largest(self._batched)) >= 0 and index == self._largest([*self._laned, *self._batched]):
            if (batch := self._batch_of(index, tokens_before)) is not None:
                return batch
        return None

    def _batch_of(self, index: int, tokens_before: int) -> Batch | None:
        """A batch of a source that makes its own; None if it has ended."""
        self._now, ask, began = index, self._asks[index], time.perf_counter()
        try:
            batch = next(self._iterators[index]) if ask is None else ask(tokens_before)
        except StopIteration:
            self._ended[index] = True
            return None
        if self._time_names:
            self._seconds[f"time/own_code/{self._time_names[index]}"] += time.perf_counter() - began
        self._hand(index, max(int((np.asarray(batch["targets"]) != IGNORED).sum()), 1))
        if "dataset_labels" not in batch:
            batch["dataset_labels"] = [self.sources[index].name] * len(batch["tokens"])
        return batch

    def _from_lanes(self, tokens_before: int) -> Batch:
        count, length, runs_on = len(self._lanes), self._row_tokens, self._runs_on
        batch: Batch = {
            "tokens": np.zeros((count, length), np.int64),
            "targets": np.full((count, length), IGNORED, np.int64),
            "segment_ids": np.full((count, length), -1, np.int32),
        }
        if runs_on:
            batch["resets"] = np.zeros((count, length), np.bool_)
        if tokens_before:
            batch["tokens_before"] = np.zeros((count, tokens_before), np.int64)
            if runs_on:
                batch["resets_before"] = np.zeros((count, tokens_before), np.bool_)
        opened: dict[int, OpenStream] = {}
        for lane in self._lanes:
            if lane.left:
                opened[id(lane.opened)] = lane.opened
        for each in opened.values():
            check_size(each)
        segments: list[list[Segment]] = []
        labels: list[tuple[str, str]] = []
        rows = [self._fill_row(*each, batch, segments, labels, tokens_before) for each in enumerate(self._lanes)]
        if not labels:
            self._stop_or_refuse()
        columns = np.array(rows, np.int64).T  # a row of it for each key
        batch |= dict(zip(("group_ids", "cell_index", "depth", "end_ids", "end_cell_index"), columns, strict=True))
        batch["is_last"] = (batch["group_ids"] >= 0) & (batch["group_ids"] != batch["end_ids"])
        if not runs_on:
            del batch["end_ids"], batch["end_cell_index"]
        if self._types is not None:
            batch["token_types"] = self._types.take(batch["targets"])
        # Tuples: they have no entry for each row.
        batch["dataset_labels"], batch["dataset_segments"] = zip(*labels, strict=True)
        batch["pack_num_samples"] = np.array(list(map(len, segments)), np.int64)
        batch["instability_meta_json"] = Located(segments, batch["group_ids"], batch["cell_index"])
        return batch

    def _fill_row(
        self,
        row: int,
        lane: Lane,
        batch: Batch,
        segments: list[list[Segment]],
        labels: list[tuple[str, str]],
        tokens_before: int,
    ) -> tuple[int, int, int, int, int]:
        """Read the next window of a lane. Returns the group that is looked up, its cell and its tokens before the row, then the
        group that continues behind the row, and its cell."""
        found: list[Segment] = []
        group_id = end_id = -1
        cell_index = depth = end_cell = at = 0
        length, runs_on = self._row_tokens, self._runs_on
        tokens, targets, segment_ids = batch["tokens"][row], batch["targets"][row], batch["segment_ids"][row]
        while at < length and (lane.left or self._refill(lane, at)):
            is_begun = lane.offset > 0
            if not at and (is_begun or not runs_on):
                group_id, cell_index, depth = lane.group_id, lane.rows, lane.offset
                if tokens_before and is_begun:
                    self._put_before(lane, row, batch, tokens_before)
            if runs_on and not is_begun:
                batch["resets"][row, at] = True
            stop = min(at + lane.left, length)
            segment_ids[at:stop] = len(labels)
            labels.append((lane.source, lane.modality))
            found.append(lane.read(tokens[at:stop], targets[at:stop], self._bos))
            if lane.left:
                end_id, end_cell = lane.group_id, lane.rows
            lane.rows += 1
            at = stop if runs_on else length
        segments.append(found)
        return group_id, cell_index, depth, end_id, end_cell

    def _put_before(self, lane: Lane, row: int, batch: Batch, num: int) -> None:
        read = lane.before(num, self._bos)
        batch["tokens_before"][row, num - len(read) :] = read
        if self._runs_on and len(read) == lane.offset:
            batch["resets_before"][row, num - len(read)] = True

    def _refill(self, lane: Lane, at: int) -> bool:
        """Give a lane its next group, at this position of a row; False if there is none now."""
        if self._waiting:
            if not at:  # a state is looked up where a row begins, not within it
                self._take_up(lane, self._waiting.pop(0))
            return not at
        blocked: set[int] = set()
        while (index := self._largest([each for each in self._laned if each not in blocked])) >= 0:
            self._now, name = index, self.sources[index].name
            source = cast(ShardSource, self.sources[index].dataset)
            handed = source.hand(partial(self._may_begin_epoch, source))
            self._unsaved.add(index)
            if handed is None:
                # At the end of an epoch, while a lane still reads one before it.
                self._ended[index] = source.is_ended
                blocked.add(index)
                continue
            opened = handed.source
            lane.begin(Place(name, handed.epoch, opened.stream.stream_id, handed.group, handed.group_id), opened)
            self._hand(index, lane.left)
            return True
        return False

    def _may_begin_epoch(self, source: ShardSource) -> bool:
        """Whether no lane reads an epoch of a source before its present one."""
        epochs = [place.epoch for place in self.places if place is not None and place.source == source.name]
        return min(epochs, default=source.epoch) >= source.epoch

    def _take_up(self, lane: Lane, place: Place) -> None:
        source = cast(ShardSource, self.sources[self._by_name[place.source]].dataset)
        lane.begin(place, source.open(source.streams[place.stream]))

    def _note_times(self, seconds: float) -> None:
        """Note what opening and tokenizing took, by source, and the rest as reading, in proportion to the sources' shares."""
        if not self._time_names:
            return
        for index in self._laned:
            dataset: Any = self.sources[index].dataset
            for stage, part in dataset.drain_seconds().items():
                self._seconds[f"time/{stage}/{self._time_names[index]}"] += part
                seconds -= part
        whole = sum(map(self._shares.__getitem__, self._laned)) or 1.0
        for index in self._laned:
            part = max(seconds, 0.0) * self._shares[index] / whole
            self._seconds[f"time/read/{self._time_names[index]}"] += part

    def state_dict(self) -> dict[str, Any]:
        """Plain Python; a snapshot that later batches do not change."""
        lanes = [place and list(place) for place in self.places]
        own = {"claims": self._claims.copy(), "total": self._total, "lanes": lanes}
        own |= {"rows": len(self._lanes), "shard": list(self._shard)}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue where a run stopped; see `BlendDataset`. On another number of lanes or shards, groups that are begun go on
        first, in the order of shards and lanes, each on one lane.

        Args:
            state: this shard's, or those of all shards, in order.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        if any("lanes" not in each for each in states):
            fix = 'set data.mixing.batching_mode to what it was ("per_stream", say), or start a new run'
            raise UserError("data.mixing.batching_mode", "the saved state is not one of full rows", fix)
        super().load_state_dict(state)
        names = states[0]["names"]
        for index, name in enumerate(self._names):
            self._claims[index] = states[0]["claims"][names.index(name)] if name in names else 0.0
        self._total = states[0]["total"]
        self._lanes = [Lane() for _ in self._lanes]
        self._waiting = []
        shard, num_shards = self._shard
        if len(states) == num_shards > 1:
            states = [states[shard]]
        saved = [place and Place(*place) for own in states for place in own["lanes"]]
        if states[0]["shard"] != [shard, num_shards]:
            saved = list(filter(None, saved))[shard::num_shards]
        elif states[0]["rows"] != len(self._lanes):
            saved = list(filter(None, saved))
        places = saved[: len(self._lanes)]
        self._waiting = list(filter(None, saved[len(self._lanes) :]))
        for lane, place in zip(self._lanes, places, strict=False):
            if place is not None:
                self._take_up(lane, place)
        if self._waiting:
            text = "%s continue once a row is free: %s were read at once, and now there are %s"
            whole = len(self._waiting) + len(self._lanes)
            logger.info(text, counted(len(self._waiting), "document"), whole, len(self._lanes))


def keep_places(
    places: Sequence[Sequence[Any] | None], source: ShardSource, before: Sequence[str], changed: Collection[str]
) -> list[Sequence[Any] | None]:
    """Saved places, without those of a source's streams that changed or are gone. `before`: its paths, by stream when saved."""
    now = {stream.relative_path: stream.stream_id for stream in source.streams if stream.relative_path not in changed}
    found: list[Sequence[Any] | None] = []
    for place in places:
        if place is not None and place[0] == source.name:
            stream = now.get(before[place[2]])
            found.append(None if stream is None else [*place[:2], stream, *place[3:]])
        else:
            found.append(place)
    return found


def _is_off(source: BlendSource) -> bool:
    return source.weight.zero_from() == 0
