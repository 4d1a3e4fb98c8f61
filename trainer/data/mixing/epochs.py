"""What a mixing dataset remembers of an epoch: the order of its streams, and how far each was read.

An epoch that runs on one world from its beginning needs no memory: its queue is a keyed permutation. When a run
continues on another world size (or pool, or batch size) in the middle of an epoch, the cursors of the old ranks are
kept as a `ReshardPoint`, and the rest of the epoch is planned from these points: what the readers left of a stream is
cut into new slices. Points hold cursors only, are dropped at the end of the epoch, and may follow one another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.data.keyed import keyed_generator
from trainer.data.mixing.reader import PastReads
from trainer.data.streams.layout import Stream


@dataclass(frozen=True)
class BatchSizes:
    """Lanes per reader: a default and exceptions by modality."""

    default: int
    by_modality: Mapping[str, int]

    def of(self, stream: Stream) -> int:
        """The lanes of a reader of this stream."""
        return self.by_modality.get(stream.modality, self.default)


@dataclass(frozen=True)
class RankCursor:
    """One rank's position in an epoch: streams taken from the queue, and (stream, picks) of the active readers."""

    queue_index: int
    active: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ReshardPoint:
    """The positions of all ranks of one world when it stopped in an epoch. With a shared pool they are all equal."""

    batch_sizes: BatchSizes
    cursors: tuple[RankCursor, ...]

    def to_state(self) -> dict[str, Any]:
        """As plain Python."""
        return {
            "batch_size": self.batch_sizes.default,
            "batch_size_by_modality": dict(self.batch_sizes.by_modality),
            "cursors": [[cursor.queue_index, [list(pair) for pair in cursor.active]] for cursor in self.cursors],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ReshardPoint:
        """The inverse of `to_state`."""
        cursors = tuple(RankCursor(index, tuple((s, p) for s, p in active)) for index, active in state["cursors"])
        return cls(BatchSizes(state["batch_size"], state["batch_size_by_modality"]), cursors)

    def active_streams(self) -> list[int]:
        """The streams that were active on any rank: by slot, then by rank, each once."""
        slots = max((len(cursor.active) for cursor in self.cursors), default=0)
        found: dict[int, None] = {}
        for slot in range(slots):
            for cursor in self.cursors:
                if slot < len(cursor.active):
                    found[cursor.active[slot][0]] = None
        return list(found)


@dataclass(frozen=True)
class QueueKey:
    """Determines the order of streams, together with the epoch: one queue for all ranks, or one per rank."""

    name: str
    seed: int
    num_streams: int
    shared: bool

    def _permutation(self, epoch: int, rank: int, part: int) -> list[int]:
        who = "all" if self.shared else rank
        generator = keyed_generator("queue", self.name, self.seed, epoch, who, part)
        order: list[int] = generator.permutation(self.num_streams).tolist()
        return order

    def order(self, epoch: int, rank: int, points: Sequence[ReshardPoint]) -> list[int]:
        """The streams in the order in which a rank takes them.

        After reshard points: first the streams that were active on any rank (so that what was begun continues), then
        those that some rank had not reached; completely read streams are left out.
        """
        if not points:
            return self._permutation(epoch, rank, 0)
        begun = points[-1].active_streams()
        rest = self._untouched(epoch, points) - set(begun)
        if self.shared:
            before = self.order(epoch, 0, points[:-1])
        else:
            before = self._permutation(epoch, rank, len(points))
        return begun + [stream for stream in before if stream in rest]

    def _untouched(self, epoch: int, points: Sequence[ReshardPoint]) -> set[int]:
        found: set[int] = set()
        for rank, cursor in enumerate(points[-1].cursors):
            found.update(self.order(epoch, rank, points[:-1])[cursor.queue_index :])
        return found

    def past_reads(self, epoch: int, stream: Stream, points: Sequence[ReshardPoint]) -> list[PastReads]:
        """How far a stream had been read at each reshard point."""
        found = []
        for number, point in enumerate(points):
            picks = []
            for rank, cursor in enumerate(point.cursors):
                waiting = self.order(epoch, rank, points[:number])[cursor.queue_index :]
                active = dict(cursor.active)
                picks.append(active.get(stream.stream_id, 0 if stream.stream_id in waiting else -1))
            found.append(PastReads(point.batch_sizes.of(stream), tuple(picks)))
        return found
