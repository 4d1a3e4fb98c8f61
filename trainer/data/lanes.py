"""Full rows: every micro-batch is [B, T], and the state still follows its document.

A lane is a row of the micro-batch that reads documents one behind the other; a document (or a part
of one, where `max_group_cells` cuts it) stays on one lane. Rows are the lane's consecutive windows
of T target tokens. With `runs_on` they have no gaps: `resets` marks where a document begins, at the
first position of a row too. Without it each document begins a row, and its last row is padded.

    lane 3   | doc 17 ............................ | doc 4 | doc 90 | doc 8 .......................
             row k                      row k+1                      row k+2

There are g sets of B lanes (`lane_sets`), which take turns: the k-th micro-batch reads set k mod g.
So with g = c m the next row of a document comes c steps later, and the rows of c steps in a row are
of different documents: c is the spread. When fewer sets hold all that is left, the documents move
into these. More lanes than a source has documents would put copies of one document into a step, so
that few documents, or little memory for the states of the lanes, make g smaller (`num_sets`).

Claims decide which source the next document comes from, so that weights are shares of tokens:
whenever a lane reads n tokens of a source that can be read, each of these gains its share of n, and
the one they came from loses n; the largest claim is served next. Nothing is computed from the past,
so a weight that changes causes no catching up.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from trainer.arrays import as_list, keyed_generator
from trainer.data.blend import BlendDataset, BlendSource, UnreadSource
from trainer.data.collate import Batch, Lane, Place, make_collator
from trainer.data.documents import ReadOptions
from trainer.data.formats import is_read_whole
from trainer.data.groups import CutOptions, Handed, OpenStream, file_bytes, open_stream
from trainer.data.layout import Stream
from trainer.data.shard_source import ShardSource
from trainer.data.tokenizer import Tokenizer
from trainer.errors import UserError
from trainer.files import is_count
from trainer.metrics.logger import get_logger
from trainer.wording import counted

DOCUMENTS_PER_LANE = 4
"""Documents of a source for each lane that its share gives it, at least."""
COUNTED_FILES = 16
"""Files that are opened to count documents; of more, the number is estimated by their bytes."""
MOST_OPEN = 256
OPEN_BYTES = 1 << 30
FEWEST_OPEN = 4


class LaneLimit(NamedTuple):
    """So many lanes a shard can have, and what limits them."""

    lanes: float
    reason: str


def num_sets(m: int, rows: int, spread: int, limits: Iterable[LaneLimit]) -> tuple[int, str]:
    """Sets of `rows` lanes for steps of m micro-batches, and what limits them ("" if nothing).

    The largest of spread * m, half of that, ..., m, and the divisors of m that the limits allow; 1
    if they allow none.
    """
    limit = min(limits, key=lambda each: each.lanes, default=LaneLimit(math.inf, ""))
    wanted = [(spread >> at) * m for at in range(spread.bit_length())]
    wanted += [m // parts for parts in range(2, m + 1) if m % parts == 0]
    found = next((number for number in wanted if number * rows <= limit.lanes), 1)
    return found, limit.reason if found < wanted[0] else ""


def count_documents(streams: Sequence[Stream], cut: CutOptions, read: ReadOptions) -> float:
    """Documents of a source in an epoch, over all shards; exact for up to `COUNTED_FILES` files.

    Of more, some are drawn and opened. Each of the others is taken to have as many by the byte (0 if
    none of those has two), but at least 1 - `holdout_fraction`. Raises UserError: a file is damaged,
    or `loss_mask` trains no token of up to `COUNTED_FILES` files.
    """
    sizes = np.array([file_bytes(stream) for stream in streams], np.int64)
    order = keyed_generator("count", cut.namespace).permutation(len(streams))
    drawn, others = order[:COUNTED_FILES], order[COUNTED_FILES:]
    opened: Iterable[OpenStream] = (open_stream(streams[at], read, cut) for at in drawn)
    if read.loss_mask is not None and not len(others):
        opened = read.loss_mask.refuse_untrained(opened, cut.namespace)
    counts = [len(np.unique(each.groups.documents)) for each in opened]
    by_byte = sum(counts) / max(int(sizes[drawn].sum()), 1)
    if max(counts) <= 1:  # each file is a document
        by_byte = 0.0
    kept = 1.0 - cut.holdout_fraction
    return sum(counts) + float(np.maximum(sizes[others] * by_byte, kept).sum())


def documents_drawn_from(documents: Mapping[str, float], shares: Mapping[str, float]) -> float:
    """So many documents of a single source would vary as much: 1 / sum(share^2 / documents)."""
    found = sum(shares[name] ** 2 / count for name, count in documents.items() if count)
    return 1.0 / found if found else 0.0


def document_limits(documents: Mapping[str, float], shares: Mapping[str, float], num_shards: int) -> list[LaneLimit]:
    """By source, the most lanes of a shard, by its documents in an epoch and its largest share."""
    found = []
    for name, count in documents.items():
        if shares[name] > 0:
            lanes = count / (DOCUMENTS_PER_LANE * num_shards * shares[name])
            found.append(LaneLimit(lanes, f"the source {name} has about {counted(count, 'document')}"))
    return found


def streams_open(streams: Sequence[Stream], lanes: int, read: ReadOptions) -> int:
    """How many streams of a source are open at once by default: one for each lane.

    At most `MOST_OPEN`, and of files that are read whole at their opening `OPEN_BYTES` (others cost
    their index, about a hundredth of their size), but at least `FEWEST_OPEN`.
    """
    costs = []
    for each in streams:
        is_whole = not each.tokens and is_read_whole(each.path, read)
        costs.append(file_bytes(each) * (1.0 if is_whole else 0.01))
    by_cost = OPEN_BYTES / max(sum(costs) / len(costs), 1.0)
    return min(len(streams), max(FEWEST_OPEN, int(min(lanes, MOST_OPEN, by_cost))))


logger = get_logger(__name__)
DOCUMENTS = "data/documents"


class LaneBlend(BlendDataset):
    """An iterator of micro-batches [B, T] from B = `rows` lanes; their keys: `collate.Collator`.

    `lane_sets`: sets of B lanes, by the micro-batches of a step; absent: 1. `documents`: those to
    draw from, which are reported (0: unknown). `shrinks`: halve the rows once half hold the rest.
    Sources are `ShardSource`s, or off. `how`, and errors: of `BlendDataset`; or a file is damaged.
    """

    def __init__(
        self,
        sources: Sequence[BlendSource],
        *,
        rows: int,
        row_tokens: int,
        runs_on: bool,
        tokenizer: Tokenizer,
        lane_sets: Mapping[int, int] = MappingProxyType({}),
        documents: float = 0.0,
        shrinks: bool = False,
        **how: Any,
    ) -> None:
        super().__init__(sources, **how)
        self._rows, self._row_tokens, self.lane_sets = rows, row_tokens, lane_sets
        self._most_rows, self._shrinks = rows, shrinks
        self._least = max(1, row_tokens * runs_on)  # tokens that a lane is given for a row
        if documents:
            self._constants[DOCUMENTS] = documents
            self.metric_keys = (*self.metric_keys, DOCUMENTS)
        num_sets_now = self._wanted_sets()
        self._fixed_sets = num_sets_now * (len(lane_sets) < 2)  # of all steps; 0: by the size of each
        self._lanes = [Lane() for _ in range(rows * num_sets_now)]  # set by set
        self._turn = 0  # the set that is read next
        # Where each lane is. Few lanes move in a micro-batch, and each has a state.
        self._lane_places: list[Place | None] = [None] * len(self._lanes)
        # Unfinished documents of a run with more lanes; they continue before new ones begin.
        self._waiting: list[Place] = []
        # Those of sources that are off: they wait until a later run reads the source again.
        self._paused: list[Place] = []
        self._collator = make_collator(tokenizer, row_tokens=row_tokens, runs_on=runs_on)
        self._claims = [0.0] * len(sources)
        self._shares: list[float] = []
        # Of each source its share, and whether it can be read; and the sum of those that can.
        self._open: list[tuple[float, bool]] = []
        self._whole = 0.0
        self._is_alone = False  # only one was ever to give tokens: its claim stays 0
        self._is_constant = all(len(source.weight.points) == 1 for source in sources)
        self._by_name = {source.name: index for index, source in enumerate(sources)}
        read = [(index, source.dataset) for index, source in enumerate(sources)]
        self._laned = {index: each for index, each in read if isinstance(each, ShardSource)}
        if not all(isinstance(each, ShardSource | UnreadSource) for _, each in read):
            raise TypeError("rows are filled from documents: every source must be a ShardSource")
        self._shard = (0, 1)
        for part in self._laned.values():
            self._shard = (part.fixed_state["rank"], part.fixed_state["world_size"])
            if part.loss_mask is not None:
                self._collator = make_collator(tokenizer, part.loss_mask, row_tokens=row_tokens, runs_on=runs_on)

    @property
    def places(self) -> list[Place | None]:
        """Where each lane is, and the groups that wait for one."""
        return [*self._lane_places, *self._waiting, *self._paused]

    @property
    def groups_in_flight(self) -> list[int]:
        """Ids of unfinished groups."""
        return [place.group_id for place in self.places if place is not None]

    @property
    def waiting_groups(self) -> list[int]:
        """Ids of those that wait for a row to continue on."""
        return [place.group_id for place in (*self._waiting, *self._paused)]

    def __next__(self) -> Batch:
        """The next micro-batch.

        Raises StopIteration, or UserError where all weights are zero, once the lanes are dry.
        """
        began = time.perf_counter()
        if not self._shares or not self._is_constant:
            self._shares = self.shares_at(self._batch_index)
            self._note_open()
        batch = self._next_rows()
        self._note_times(time.perf_counter() - began)
        self._batch_index += 1
        return batch

    def _next_rows(self) -> Batch:
        """The next row of each lane whose turn it is."""
        while True:
            # Another number of sets if the step has another size, or less is left to read.
            wanted = self._fixed_sets or self._wanted_sets()
            if not self._waiting and self._largest() < 0:  # nothing begins any more
                being_read = sum(place is not None for place in self._lane_places)
                while self._shrinks and 0 < being_read <= self._rows // 2:
                    self._rows //= 2
                wanted = max(1, min(wanted, -(-being_read // self._rows)))
            first = self._turn * self._rows
            if wanted * self._rows != len(self._lanes):
                # Those that have waited longest come first.
                in_order = (*self._lanes[first:], *self._lanes[:first])
                self._lay_out(wanted, [lane for lane in in_order if lane.groups], self._waiting)
                first = 0
            lanes = self._lanes[first : first + self._rows]
            if any([*map(self._fill, lanes)]):
                break
            if not any(self._lane_places):
                self._stop_or_refuse()
            # Nothing begins any more: read the sets that still have documents.
        batch = self._collator.batch(lanes)
        self._lane_places[first : first + self._rows] = map(attrgetter("place"), lanes)
        # Documents that continue; new ones were charged when they were handed out.
        going_on: defaultdict[str, int] = defaultdict(int)
        for row in batch["instability_meta_json"].reads:
            if row and row[0][1]:
                going_on[row[0][0].source.groups.namespace] += row[0][2]
        for name, num_tokens in going_on.items():
            self._charge(self._by_name[name], num_tokens)
        self._turn = (self._turn + 1) % (len(self._lanes) // self._rows)
        return batch

    def masked(self) -> Batch:
        """A micro-batch of which nothing is learnt."""
        return self._collator.batch([Lane() for _ in range(self._rows)])

    def _wanted_sets(self) -> int:
        """The sets of lanes at the next micro-batch, by the size of its step."""
        step = self._micro_batches.step_of(self._batch_index)
        return self.lane_sets.get(self._micro_batches.at(step), 1)

    def _lay_out(self, num_sets: int, lanes: Sequence[Lane], waiting: Sequence[Place], turn: int = 0) -> None:
        """Have so many sets of lanes, these and new ones; those beyond them wait."""
        num_lanes = num_sets * self._rows
        self._waiting = [*waiting, *(place for lane in lanes[num_lanes:] if (place := lane.place))]
        self._lanes = [*lanes[:num_lanes], *(Lane() for _ in range(num_lanes - len(lanes)))]
        self._lane_places, self._turn = [lane.place for lane in self._lanes], turn
        if self._waiting:
            text = "%s will continue once a row is free: there are only %s now"
            logger.info(text, counted(len(self._waiting), "document"), counted(num_lanes, "lane"))

    def _note_open(self) -> None:
        """Derive `_open`, `_whole` and `_is_alone`; after every change of `_shares` or `_ended`."""
        pairs = zip(self._shares, self._ended, strict=True)
        self._open = [(share, share > 0 and not ended) for share, ended in pairs]
        self._whole = sum(share for share, is_open in self._open if is_open)
        is_owed = any(self._claims) or self._counts != self._due
        self._is_alone = self._shares.count(0.0) == len(self._shares) - 1 and not is_owed

    def _largest(self) -> int:
        """The source with the largest claim that can be read; -1: none can."""
        best, most = -1, (-math.inf, 0.0)
        for index in self._laned:
            claim = self._claims[index], self._shares[index]
            if self._open[index][1] and claim > most:
                best, most = index, claim
        return best

    def _charge(self, index: int, num_tokens: int) -> None:
        """Settle the claims for tokens of a source that are read."""
        claims, due, whole = self._claims, self._due, self._whole
        owed = num_tokens * self._open[index][1]  # one that cannot be read only ends its documents
        for i, (share, is_open) in enumerate(self._open):
            if is_open:
                claims[i] += owed * share / whole
            else:  # nothing is owed to a source that cannot be read
                claims[i] = 0.0
            due[i] += share * num_tokens
        claims[index] -= owed
        self._counts[index] += num_tokens
        self._total += num_tokens

    def _fill(self, lane: Lane) -> bool:
        """Give a lane the groups of its next row, behind the one that it reads; False: it has none."""
        if self._waiting and not lane.groups:
            self._take_up(lane, self._waiting.pop(0))
        if self._waiting:  # nothing new begins; a state is looked up where a row begins, not within it
            return bool(lane.groups)
        left = self._row_tokens
        for each in lane.groups:
            left -= each.num_tokens - lane.offset
        room = left - self._row_tokens + self._least
        groups: list[Handed] = []
        while room > 0:
            index = self._largest()
            if index < 0:
                break
            self._now = index
            # Claims decide document by document; for a single source, a row's come together.
            handed = self._laned[index].hand(room if self._is_alone else 1)
            if not handed:
                self._ended[index] = True
                self._note_open()
                self._unsaved.add(index)
            else:
                groups += handed
                sizes = [each.num_tokens for each in handed]
                self._longest = max(self._longest, *sizes)
                num_tokens = sum(sizes)
                self._charge(index, min(num_tokens, left))
                self._unsaved.add(index)
                self._undrained.add(index)
                room -= num_tokens
                left -= num_tokens
        lane.groups = groups[::-1] + lane.groups
        return bool(lane.groups)

    def _take_up(self, lane: Lane, place: Place) -> None:
        """Let a lane read on at a saved place. Raises ValueError: there is none."""
        source = self._laned[self._by_name[place.source]]
        if all(map(is_count, place[1:])):
            opened = source.open(source.streams[place.stream])
            lane.groups = (handed,) = opened.hand(np.array([place.group]), place.epoch)
            lane.offset, lane.rows = place.offset, place.rows
            if handed.group_id == place.group_id and place.offset < handed.num_tokens:
                return
        raise ValueError(f"{place} is in no document")

    def _note_times(self, seconds: float) -> None:
        """Note the time of opening and tokenizing by source, and the rest as reading, by shares."""
        if not self._time_names:
            return
        for index, dataset in self._laned.items():
            for stage, part in dataset.drain_seconds().items():
                self._seconds[f"time/{stage}/{self._time_names[index]}"] += part
                seconds -= part
        whole = sum(map(self._shares.__getitem__, self._laned)) or 1.0
        for index in self._laned:
            part = max(seconds, 0.0) * self._shares[index] / whole
            self._seconds[f"time/read/{self._time_names[index]}"] += part

    def state_dict(self) -> dict[str, Any]:
        """Plain Python; a snapshot that later batches do not change."""
        return {
            **super().state_dict(),
            "claims": self._claims.copy(),
            "total": self._total,
            "longest": self._longest,
            "lanes": self.places,
            "rows": self._rows,
            "shard": list(self._shard),
            "groups": len(self._lanes) // self._rows,  # sets of lanes
            "turn": self._turn,
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue where a run stopped; see `BlendDataset`.

        `state` is this shard's, or those of all shards, in order. On another number of lanes or
        shards, unfinished groups continue first: by shard, those without a row, then by turn.
        """
        states = as_list(state)
        if any("lanes" not in each for each in states):
            problem = "the saved state is not one of full rows"
            fix = 'set it to what it was ("per_stream", say), or start a new run'
            raise UserError("data.mixing.batching_mode", problem, fix)
        super().load_state_dict(state)
        shard, num_shards = self._shard
        if len(states) == num_shards:
            states = [states[shard]]
        self._load_claims(states)
        self._rows, own, num_sets = self._most_rows, states[0], self._wanted_sets()
        self._shares = self.shares_at(self._batch_index)
        self._note_open()
        if self._largest() < 0:  # what is left is in fewer sets
            num_sets = min(num_sets, own["groups"])
        if [own["shard"], own["rows"], own["groups"]] == [[shard, num_shards], self._rows, num_sets]:
            places = [place and Place(*place) for place in own["lanes"]]
            self._load_lanes(places, num_sets, own["turn"])
            return
        in_order = [*filter(None, chain.from_iterable(map(_in_order, states)))]
        if own["shard"] != [shard, num_shards]:
            in_order = in_order[shard::num_shards]
        self._load_lanes(in_order, num_sets, turn=0)

    def _load_claims(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take over what a shard has given and owes; of other shards, an equal part of all."""
        part = 1.0
        if states[0]["shard"][1] != self._shard[1]:
            part = 1 / self._shard[1]

        def total(key: str) -> list[float]:
            sums = np.sum([each[key] for each in states], axis=0) * part
            found = dict(zip(states[0]["names"], sums.tolist(), strict=True))
            return [found.get(name, 0) for name in self._names]

        self._claims, self._counts, self._due = map(total, ("claims", "counts", "expected"))
        self._total = sum(each["total"] for each in states) * part
        self._longest = max(each["longest"] for each in states)

    def _load_lanes(self, places: Sequence[Place | None], num_sets: int, turn: int) -> None:
        """Read on at these places, set by set; others wait for a row, or for their source."""
        known = [place for place in places if place is not None]
        if len({place[:4] for place in known}) < len(known):
            raise ValueError("a document is on two lanes")
        gone = {place.source for place in known} - self._by_name.keys()
        if gone:
            problem = f"lacks {', '.join(sorted(gone))}, of which documents are being read"
            raise UserError("data.source", problem, "put it back, with a weight, until they end")
        laned = {source.name for source in self._laned.values()}
        self._paused = [place for place in known if place.source not in laned]
        places = [place if place is None or place.source in laned else None for place in places]
        num_lanes = num_sets * self._rows
        lanes = [Lane() for _ in places[:num_lanes]]
        read = [(lane, place) for lane, place in zip(lanes, places, strict=False) if place is not None]
        # By file: each is opened once, though many lanes may read it.
        for lane, place in sorted(read, key=lambda each: (each[1].source, each[1].stream)):
            self._take_up(lane, place)
        self._lay_out(num_sets, lanes, [*filter(None, places[num_lanes:])], turn)


def _in_order(state: Mapping[str, Any]) -> list[Place | None]:
    """The places of what waits, and of a state's lanes, from the next set that is read on."""
    places = [place and Place(*place) for place in state["lanes"]]
    num_lanes, first = state["groups"] * state["rows"], state["turn"] * state["rows"]
    return [*places[num_lanes:], *places[first:num_lanes], *places[:first]]
