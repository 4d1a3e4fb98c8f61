"""An epoch of a mixing dataset: the order of its streams, how far each was read, the queue of readers, and the saved state.

An epoch that runs on one world from its beginning is a keyed permutation. When a run continues on another world size
(or pool, or batch size) in the middle of an epoch, the cursors of the old ranks are kept as a `ReshardPoint`, and the
rest of the epoch is planned from these points: what the readers left of a stream is cut into new slices. Points hold
cursors only, are dropped at the end of the epoch, and may follow one another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, TypedDict

import numpy as np

from trainer.arrays import Flags, Ints
from trainer.data.documents import ReadOptions
from trainer.data.groups import CutOptions, OpenStream, lanes_of
from trainer.data.layout import Stream
from trainer.data.reader import PastReads, StreamReader, remaining_stream
from trainer.errors import UserError
from trainer.hashing import keyed_generator, stable_hash


class ReshardPoint(TypedDict):
    """The positions of all ranks of one world when it stopped in an epoch, as they stand in a saved state.

    A cursor is `[streams taken from the queue, [[stream, picks] of each active reader]]`; those of a shared pool are equal.
    """

    batch_size: int
    batch_size_by_modality: Mapping[str, int]
    cursors: list[list[Any]]


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

        Cutting a stream at group boundaries favours the same slices every time. A permutation lets every rank begin
        equally often, whatever the sizes; it is keyed because sizes may follow the order of names. It must not depend on the
        epoch: ranks that pick alone are in different epochs, and two ranks must never read the same group at once.
        """
        turns: list[int] = keyed_generator("turns", self.name, self.seed).permutation(self.num_streams).tolist()
        return turns


class EpochOrder:
    """The order of an epoch's streams, and how far each had been read at its reshard points."""

    def __init__(self, key: QueueKey, epoch: int, points: Sequence[ReshardPoint]) -> None:
        self._key, self._epoch = key, epoch
        # By point: the streams not reached yet by rank (a shared queue has one), bool [W, num_streams]; and stream -> rank ->
        # picks of those that are active.
        self._past: list[tuple[ReshardPoint, Flags, dict[int, dict[int, int]]]] = []
        self._begun = np.zeros(0, np.int64)  # what the last point puts first, and which of all others follow
        self._is_next = np.ones(key.num_streams, dtype=np.bool_)
        self._shared = key.permutation(epoch, 0, 0) if key.shared else self._begun
        for point in points:
            cursors = point["cursors"][:1] if key.shared else point["cursors"]
            waiting = np.zeros((len(cursors), key.num_streams), dtype=np.bool_)
            active: dict[int, dict[int, int]] = {}
            for rank, (index, _) in enumerate(cursors):
                waiting[rank, self._order(rank)[index:]] = True
            for rank, (_, begun) in enumerate(point["cursors"]):
                for stream, picks in begun:
                    active.setdefault(stream, {})[rank] = picks
            self._past.append((point, waiting, active))
            self._begun = np.array(active_streams(point), dtype=np.int64)
            self._is_next = np.logical_or.reduce(waiting, axis=0)
            self._is_next[self._begun] = False
            if key.shared:
                self._shared = self._order(0)

    def of_rank(self, rank: int) -> list[int]:
        """The streams in the order in which a rank takes them.

        After reshard points: first the streams that were active on any rank (so that what was begun continues), then
        those that some rank had not reached; completely read streams are left out.
        """
        return list(self._order(rank).tolist())

    def _order(self, rank: int) -> Ints:
        key = self._key
        before = self._shared if key.shared else key.permutation(self._epoch, rank, len(self._past))
        return np.concatenate([self._begun, before[self._is_next[before]]])

    def past_reads(self, stream: Stream) -> list[PastReads]:
        """How far a stream had been read at each reshard point, without those at which no rank had begun it."""
        found = []
        for point, waiting, active in self._past:
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


@dataclass(eq=False, repr=False)
class ReaderQueue:
    """Hands out readers, epoch by epoch, in a permuted order; streams without cells for this rank are skipped.

    `open` is worth caching, since every epoch returns to each stream; for `sizes` see `lanes_of`.
    """

    streams: Sequence[Stream]
    open: Callable[[Stream], OpenStream]
    key: QueueKey
    sizes: Mapping[str, Any]
    rank: int
    world_size: int
    has_cells: bool = False  # any stream opened so far has cells, for whatever rank

    def __post_init__(self) -> None:
        self.begin_epoch(0, {})

    def begin_epoch(self, epoch: int, points: dict[int, list[ReshardPoint]], index: int = 0) -> None:
        """Go to an epoch of which `index` streams were taken before; reshard points of earlier ones are dropped."""
        self.epoch = epoch
        self.points = {at: parts for at, parts in points.items() if at >= epoch}
        self.index = index
        self._now = EpochOrder(self.key, epoch, self.points.get(epoch, []))
        self._order = self._now.of_rank(self.rank)

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

    def reader(self, stream_id: int, picks: int = 0) -> StreamReader:
        """A reader of this rank's part of a stream in this epoch, after `picks` batches of it."""
        stream = self.streams[stream_id]
        source = self.open(stream)
        self.has_cells = self.has_cells or source.groups.num_groups > 0
        generator = keyed_generator("groups", self.key.name, self.key.seed, self.epoch, stream.relative_path)
        return StreamReader(
            source,
            remaining_stream(source.groups, generator, self._now.past_reads(stream)),
            bs=lanes_of(stream, self.sizes),
            slice_index=(self.rank - self.key.turns[stream_id]) % self.world_size,
            num_slices=self.world_size,
            shared=self.key.shared,
            picks=picks,
        )


STATE_VERSION = 5
State = Mapping[str, Any]


def fingerprint(streams: Sequence[Stream], options: ReadOptions, cut: CutOptions, **settings: object) -> dict[str, Any]:
    """Everything that must match for a state to fit: how files are read and cut, and the list of streams."""
    paths = [part for stream in streams for part in (stream.relative_path, stream.modality)]
    tokenizer = options.tokenizer
    return {
        **asdict(cut),
        **settings,
        "format": options.format,
        "dtype": options.dtype,
        "eod": options.eod,
        "text_split": options.text_split,
        "tokenizer": f"{tokenizer.name} ({tokenizer.vocab_size} ids)",
        "streams": f"{len(streams)} streams, hash {stable_hash(*paths):016x}",
    }


def check_states(states: Sequence[State], own: State) -> None:
    """Raise UserError unless a dataset like the `own` saved the states, those of one world in rank order."""
    expected = own["fingerprint"]
    name = str(expected["namespace"])
    are_known = bool(states) and all(
        isinstance(each, Mapping) and each.get("version") == STATE_VERSION for each in states
    )
    ranks = [(state["rank"], state["world_size"]) for state in states] if are_known else []
    if not are_known or (len(states) > 1 and ranks != [(rank, len(states)) for rank in range(len(states))]):
        problem = "these are not the states that all ranks of a dataset of this version saved, in rank order"
        raise UserError(name, problem, "load those of one checkpoint")
    for saved in (state["fingerprint"] for state in states):
        if differing := [key for key in expected if saved.get(key) != expected[key]]:
            found = ", ".join(f"{key} was {saved.get(key)!r} and is {expected[key]!r}" for key in differing)
            problem = f"the saved state does not fit: {found}"
            raise UserError(name, problem, "restore the old value, or start without this state")


def points_of(state: State) -> dict[int, list[ReshardPoint]]:
    """The reshard points in a state, by epoch. Their key there is `chapters`."""
    return {epoch: list(points) for epoch, points in state["chapters"]}


def reshard(states: Sequence[State], num_streams: int, *, shared: bool) -> tuple[int, dict[int, list[ReshardPoint]]]:
    """End the world that saved `states`, so that another can continue.

    Ranks that pick alone may be in different epochs: the run continues in the earliest one. There, a rank that is ahead
    has read its whole part; in the later epochs, a rank that is behind has read nothing.

    Returns:
        The epoch to continue in, and the reshard points by epoch, including those of the world that ended.
    """
    kept = states[:1] * states[0]["world_size"] if shared else states
    # A rank without any cells never leaves its epoch: it does not tell where the run is.
    epochs = [state["epoch"] for state in kept if not state["is_barren"]]
    points: dict[int, list[ReshardPoint]] = {}
    for state in kept:
        points.update(points_of(state))
    points = {epoch: parts for epoch, parts in points.items() if epoch >= min(epochs)}
    size, by_modality = kept[0]["batch_size"], kept[0]["batch_size_by_modality"]
    for epoch in range(min(epochs), max(epochs) + 1):
        cursors = []
        for state in kept:
            is_now = state["epoch"] == epoch
            index = state["queue_index"] if is_now else num_streams if state["epoch"] > epoch else 0
            cursors.append([index, state["pool"] if is_now else []])
        points[epoch] = [
            *points.get(epoch, []),
            ReshardPoint(batch_size=size, batch_size_by_modality=by_modality, cursors=cursors),
        ]
    return min(epochs), points
