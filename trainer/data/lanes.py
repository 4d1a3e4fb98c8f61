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

import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, cast

import numpy as np

from trainer.arrays import IGNORED
from trainer.data.blend import BlendDataset, BlendSource
from trainer.data.collate import Batch, Collator, Lane, Place
from trainer.data.shard_source import ShardSource
from trainer.data.tokenizer import Tokenizer
from trainer.errors import UserError
from trainer.metrics.logger import get_logger
from trainer.micro_batches import ONE, MicroBatches
from trainer.wording import counted

logger = get_logger(__name__)
NUM_TOKENS = attrgetter("num_tokens")


class LaneBlend(BlendDataset):
    """An iterator of micro-batches [B, T] from lanes; see the module, and `Collator` for their keys.

    A source that is no `ShardSource` gives whole micro-batches of its own, by the same claims.

    Args:
        sources, seed, micro_batches, per_source, times, history_every, history_tokens: see `BlendDataset`.
        rows: lanes, B.
        row_tokens, runs_on: see `Collator`.

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
        self._collator = Collator(tokenizer, row_tokens=row_tokens, runs_on=runs_on)
        self._claims = [0.0] * len(sources)
        self._total = 0
        self._shares: list[float] = []
        self._open: list[tuple[float, bool]] = []  # of each source its share, and whether it can be read
        self._whole = 0.0  # share of those
        self._is_alone = False  # only one was ever to give tokens: its claim stays 0
        self._is_constant = all(len(source.weight.points) == 1 for source in sources)
        self._by_name = {source.name: index for index, source in enumerate(sources)}
        # A target's batches are its own; lanes read the others.
        self._laned = [index for index, source in enumerate(sources) if isinstance(source.dataset, ShardSource)]
        parts: dict[int, Any] = {index: sources[index].dataset for index in self._laned}
        self._hands = {index: partial(part.hand, partial(self._may_begin_epoch, part)) for index, part in parts.items()}
        shards = [(part.fixed_state["rank"], part.fixed_state["world_size"]) for part in parts.values()]
        self._shard = shards[0] if shards else (0, 1)
        is_read = [source.weight.zero_from() != 0 for source in sources]
        self._batched = [index for index in range(len(sources)) if index not in self._laned and is_read[index]]

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
        """The next micro-batch, with that many tokens of its group before each row. StopIteration, or UserError where all
        weights are zero: nothing can be read, and the lanes are dry."""
        began = time.perf_counter()
        shares = self._shares_now()
        if shares is not self._shares:
            self._shares = shares
            self._note_open()
        batch = self._whole_batch(tokens_before) if self._batched else None
        if batch is None:
            batch = self._collator.batch(self._lanes, self._refill, tokens_before)
            if not batch["dataset_labels"]:
                self._stop_or_refuse()
            self._note_times(time.perf_counter() - began)
        self._batch_index += 1
        return batch

    def masked(self) -> Batch:
        """A micro-batch of which nothing is learnt."""
        return self._collator.batch([Lane() for _ in self._lanes], lambda *_: False)

    def _given(self) -> tuple[int, list[float]]:
        return self._total, self._expected[0]

    def _shares_now(self) -> list[float]:
        at = self._batch_index
        if self._shares and self._is_constant and not self.changes:
            return self._shares
        step = self._micro_batches.step_of(at) if self._is_known_ahead else 0
        return self.shares_at(step, at)

    def _note_open(self) -> None:
        self._open = [(share, share > 0 and not end) for share, end in zip(self._shares, self._ended, strict=True)]
        self._whole = sum(share for share, is_open in self._open if is_open)
        is_owed = any(self._claims) or self._counts != self._expected[0]
        self._is_alone = self._shares.count(0.0) == len(self._shares) - 1 and not is_owed

    def _largest(self, among: Sequence[int]) -> int:
        """The source with the largest claim that can be read; -1: none can."""
        best, claims = -1, self._claims
        for index in among:
            share, is_open = self._open[index]
            if is_open and (best < 0 or (claims[index], share) > (claims[best], self._shares[best])):
                best = index
        return best

    def _hand(self, index: int, num_tokens: int) -> None:
        """Settle the claims for tokens that a source has given."""
        claims, expected, whole = self._claims, self._expected[0], self._whole
        for i, (share, is_open) in enumerate(self._open):
            # Nothing is owed to what cannot be read.
            claims[i] = claims[i] + num_tokens * share / whole if is_open else 0.0
            expected[i] += share * num_tokens
        claims[index] -= num_tokens
        self._counts[index] += num_tokens
        self._total += num_tokens
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
            self._note_open()
            return None
        if self._time_names:
            self._seconds[f"time/own_code/{self._time_names[index]}"] += time.perf_counter() - began
        self._hand(index, max(int((np.asarray(batch["targets"]) != IGNORED).sum()), 1))
        if "dataset_labels" not in batch:
            batch["dataset_labels"] = [self.sources[index].name] * len(batch["tokens"])
        return batch

    def _refill(self, lane: Lane, at: int, room: int) -> bool:
        """Give a lane its next groups, at this position of a row, of `room` tokens or more; False if there is none now."""
        if self._waiting:
            if not at:  # a state is looked up where a row begins, not within it
                self._take_up(lane, self._waiting.pop(0))
            return not at
        among, found = self._laned, []
        while room > 0 and (index := self._largest(among)) >= 0:
            self._now = index
            # Claims decide between sources document by document; without others, a whole row's are handed together.
            handed = self._hands[index](room if self._is_alone else 1)
            if not handed:
                # At the end of an epoch, while a lane still reads one before it.
                self._ended[index] = cast(ShardSource, self.sources[index].dataset).is_ended
                self._note_open()
                self._unsaved.add(index)
                among = [each for each in among if each != index]
            else:
                found += handed
                num_tokens = sum(map(NUM_TOKENS, handed))
                self._hand(index, num_tokens)
                room -= num_tokens
        lane.groups = found[::-1]
        return bool(found)

    def _may_begin_epoch(self, source: ShardSource) -> bool:
        """Whether no lane reads an epoch of a source before its present one."""
        epochs = [place.epoch for place in self.places if place is not None and place.source == source.name]
        return min(epochs, default=source.epoch) >= source.epoch

    def _take_up(self, lane: Lane, place: Place) -> None:
        source = cast(ShardSource, self.sources[self._by_name[place.source]].dataset)
        (handed,) = source.open(source.streams[place.stream]).hand(np.array([place.group]), place.epoch)
        lane.groups, lane.offset, lane.rows = [handed], place.offset, place.rows

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
        self._total, self._shares = states[0]["total"], []
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
