"""What a mixing dataset remembers of an epoch: which streams come in which order, and how far each was read.

An epoch that runs on one world from its beginning needs no memory: its queue is a keyed permutation. When a run goes on
with another world size (or pool, or batch size) in the middle of an epoch, the old ranks' cursors are kept as one
`Chapter`, and the rest of the epoch is planned from the chapters: a stream's remaining cells are what its readers left,
cut into new slices. Chapters are small (cursors only), are dropped at the epoch's end, and may follow one another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.data.keyed import keyed_generator
from trainer.data.mixing.reader import Progress
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
    """Where one rank stood in an epoch: the queue up to `queue_index` was taken; `active` gives (stream, picks)."""

    queue_index: int
    active: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Chapter:
    """Where all ranks of one world stood in an epoch when it ended. With a shared pool all cursors are the same."""

    batch_sizes: BatchSizes
    cursors: tuple[RankCursor, ...]

    def to_state(self) -> dict[str, Any]:
        """As plain python."""
        return {
            "batch_size": self.batch_sizes.default,
            "batch_size_by_modality": dict(self.batch_sizes.by_modality),
            "cursors": [[cursor.queue_index, [list(pair) for pair in cursor.active]] for cursor in self.cursors],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Chapter:
        """The inverse of `to_state`."""
        cursors = tuple(RankCursor(index, tuple((s, p) for s, p in active)) for index, active in state["cursors"])
        return cls(BatchSizes(state["batch_size"], state["batch_size_by_modality"]), cursors)


@dataclass(frozen=True)
class QueueKey:
    """What the order of streams depends on, besides the epoch: all ranks share one queue, or each has its own."""

    name: str
    seed: int
    num_streams: int
    shared: bool

    def _permutation(self, epoch: int, rank: int, part: int) -> list[int]:
        who = "all" if self.shared else rank
        order: list[int] = (
            keyed_generator("queue", self.name, self.seed, epoch, who, part).permutation(self.num_streams).tolist()
        )
        return order

    def order(self, epoch: int, rank: int, chapters: Sequence[Chapter]) -> list[int]:
        """The streams in the order in which a rank takes them.

        After chapters: first those that were active on any rank (so what was begun goes on), then those that some rank
        had not come to; streams that were read completely are left out.
        """
        if not chapters:
            return self._permutation(epoch, rank, 0)
        begun = active_streams(chapters[-1])
        rest = self._untouched(epoch, chapters) - set(begun)
        if self.shared:
            before = self.order(epoch, 0, chapters[:-1])
        else:
            before = self._permutation(epoch, rank, len(chapters))
        return begun + [stream for stream in before if stream in rest]

    def _untouched(self, epoch: int, chapters: Sequence[Chapter]) -> set[int]:
        found: set[int] = set()
        for rank, cursor in enumerate(chapters[-1].cursors):
            found.update(self.order(epoch, rank, chapters[:-1])[cursor.queue_index :])
        return found

    def progress(self, epoch: int, stream: Stream, chapters: Sequence[Chapter]) -> list[Progress]:
        """How far a stream was read in each chapter."""
        found = []
        for number, chapter in enumerate(chapters):
            picks = []
            for rank, cursor in enumerate(chapter.cursors):
                waiting = self.order(epoch, rank, chapters[:number])[cursor.queue_index :]
                active = dict(cursor.active)
                picks.append(active.get(stream.stream_id, 0 if stream.stream_id in waiting else -1))
            found.append(Progress(chapter.batch_sizes.of(stream), tuple(picks)))
        return found


def active_streams(chapter: Chapter) -> list[int]:
    """The streams that were active on any rank: by slot, then by rank, each once."""
    slots = max((len(cursor.active) for cursor in chapter.cursors), default=0)
    found: dict[int, None] = {}
    for slot in range(slots):
        for cursor in chapter.cursors:
            if slot < len(cursor.active):
                found[cursor.active[slot][0]] = None
    return list(found)
