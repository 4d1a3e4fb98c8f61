"""The content of a corpus, and the forecast of full rows by the real lanes and pools.

Each stream is opened once, for its lengths; the real `LaneBlend` of each data shard then reads
documents whose tokens are all 0 and take no memory. It hands out, masks and exhausts as a run with
this seed does, as far as it is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np

from trainer.arrays import Ints
from trainer.data.blend import BlendSource, UnreadSource
from trainer.data.groups import Handed, OpenStream, StreamOpener
from trainer.data.lanes import LaneBlend
from trainer.data.shard_source import ShardSource
from trainer.data.tokenizer import IdsTokenizer
from trainer.training.setup.plan import Plan
from trainer.training.setup.sources import Source, reading, runs_on

MAX_COUNTED = 200_000  # rows over all data shards, which take some seconds; more are extrapolated
Opened = Mapping[str, Mapping[str, OpenStream]]  # source -> path -> stream
MOST_POSITIONS = 200_000_000  # of all counted rows: as long


@dataclass(frozen=True)
class Corpus:
    """The content of an epoch of a source, by modality."""

    streams: Counter[str]
    groups: Counter[str]
    tokens: Counter[str]
    behind_cuts: int  # tokens that follow a cut of their document
    padded: Ints  # positions of its groups, each beginning a row of T, T / 2, T / 4, ... tokens


@dataclass
class Tally:
    """Counts of one source on one data shard, by modality."""

    picks: Counter[str] = field(default_factory=Counter)  # documents begun
    exhausts: Counter[str] = field(default_factory=Counter)  # streams ended
    tokens: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class LanesForecast:
    """Counts of the first `num_batches` batches of each data shard."""

    num_batches: int
    is_whole: bool  # these are all batches of the run
    ended_at: int | None  # the batch at which no shard has data left, if that is counted
    tokens: Ints  # of each step over all shards, without data sets of the user's own: [steps]
    full: Ints  # those of rows without a gap: [steps]
    tallies: Mapping[str, Sequence[Tally]]  # of each source that has streams and is read, by shard
    # Of each of them [shards, 3]: tokens of all groups and of the longest, number of groups.
    shards: Mapping[str, Ints]
    runs_on: bool  # documents begin within rows


class CountedSource(ShardSource):
    """A shard's part of a source that counts what is handed out."""

    def __init__(self, *options: Any, **where: Any) -> None:
        super().__init__(*options, **where)
        self.tally = Tally()
        self._opened: Counter[str] = Counter()

    def hand(self, may_begin_epoch: Callable[[], bool] = lambda: True, room: int = 1) -> list[Handed]:
        """As for `ShardSource`."""
        found = super().hand(may_begin_epoch, room)
        self.tally.picks.update(handed.source.stream.modality for handed in found)
        return found

    def counted(self) -> Tally:
        """The counts so far, with the readers that ended."""
        still_open = Counter(each.stream.modality for each in self._pool.readers)
        return replace(self.tally, exhausts=self._opened - still_open)

    def _next_reader(self) -> Any:
        reader = super()._next_reader()
        if reader is not None:
            self._opened[reader.stream.modality] += 1
        return reader

    def dealt(self) -> list[int]:
        """Tokens of the groups dealt to this shard, of the longest of them, and their number."""
        tokens = longest = number = 0
        for part in self._parts(self._shard, self._num_shards):
            source = self.open(self.streams[part.stream])
            sizes = source.num_tokens(part.of(source, source.groups.num_cells))
            tokens, longest = tokens + int(sizes.sum()), max(longest, int(sizes.max(initial=0)))
            number += len(sizes)
        return [tokens, longest, number]


def open_lengths(plan: Plan, source: Source) -> dict[str, OpenStream]:
    """Its streams by relative path, with the lengths of their documents, without tokens.
    Raises UserError: a file cannot be read or is damaged, or there is no document to train on."""
    cut, read, _ = reading(plan, source)
    opener, found = StreamOpener(read, cut, warns=False), {}
    for stream in source.streams:
        opened = opener(stream)
        # As many zeros as tokens, in one byte: lanes look at lengths alone.
        none = np.broadcast_to(np.uint8(0), len(opened.documents.tokens))
        documents = replace(opened.documents, tokens=none, bounds=None)
        found[stream.relative_path] = replace(opened, documents=documents)
    if not any(opened.groups.num_groups for opened in found.values()):
        raise opener.nothing_left(f"source {source.name}", "has no document to train on")
    opener.warn()
    return found


def measure(streams: Mapping[str, OpenStream], row_tokens: int) -> Corpus:
    """The content of an epoch of the open streams of a source."""
    num_streams, groups, tokens = Counter[str](), Counter[str](), Counter[str]()
    lengths = [row_tokens >> halvings for halvings in range(max(row_tokens.bit_length() - 4, 1))]
    padded, behind_cuts = np.zeros(len(lengths), np.int64), 0
    for opened in streams.values():
        sizes, modality = opened.num_tokens(), opened.stream.modality
        num_streams[modality] += 1
        groups[modality] += len(sizes)
        tokens[modality] += int(sizes.sum())
        behind_cuts += opened.tokens_behind_cuts[0]
        padded += [int((-(-sizes // length)).sum()) * length for length in lengths]
    return Corpus(num_streams, groups, tokens, behind_cuts, padded)


def count_lanes(plan: Plan, streams: Opened, *, most: int) -> LanesForecast:
    """Count what the lanes of a run with this config and seed will read, one step at least.
    `streams`: from `open_lengths`, of each source that has streams and is read. `most`: rows that
    are counted, over all data shards."""
    config, batches, num_shards = plan.config, plan.batches_by_steps, plan.facts.data_shards
    rows, row_tokens = config.data.mixing.batch_size, config.row_tokens
    limit = min(most // rows, MOST_POSITIONS // (rows * row_tokens)) // num_shards
    steps = min(config.train.steps, max(batches.step_of(limit) - 1, 1))
    firsts = [batches.batches_before(step) for step in range(1, steps + 2)]
    tokens, full = np.zeros((2, firsts[-1]), np.int64)
    full += num_shards * rows * row_tokens
    parts: dict[str, list[CountedSource]] = {name: [] for name in streams}
    ends = []
    for shard in range(num_shards):
        blend = _blend(plan, streams, shard, parts)
        tallies = {name: each[-1].tally for name, each in parts.items()}  # of this shard
        for index in range(len(tokens)):
            batch = next(blend, None)
            if batch is None:
                ends.append(index)
                break
            if "segment_ids" not in batch:
                full[index] -= rows * row_tokens
                continue
            read = chain.from_iterable(batch["instability_meta_json"].rows)
            for segment, modality in zip(read, batch["dataset_segments"], strict=True):
                size = segment.stop - segment.start
                tokens[index] += size
                tallies[segment.source].tokens[modality] += size
    num_batches = len(tokens)
    ended_at: int | None = None
    # Shards without data run masked rows until none has any.
    if len(ends) == num_shards:
        num_batches = ended_at = max(ends)
    begun = [first for first in firsts[:-1] if first < num_batches]  # of the steps that have data
    tokens, full = tokens[: firsts[len(begun)]], full[: firsts[len(begun)]]
    return LanesForecast(
        num_batches=num_batches,
        is_whole=steps == config.train.steps or ended_at is not None,
        ended_at=ended_at,
        tokens=np.add.reduceat(tokens, begun),
        full=np.add.reduceat(full, begun),
        tallies={name: [part.counted() for part in each] for name, each in parts.items()},
        shards={name: np.array([part.dealt() for part in each]) for name, each in parts.items()},
        runs_on=runs_on(plan, None),
    )


def _blend(plan: Plan, streams: Opened, shard: int, parts: Mapping[str, list[CountedSource]]) -> LaneBlend:
    """The lanes of a data shard, whose counted sources are added to `parts`."""
    config, sources = plan.config, []
    rows, row_tokens = config.data.mixing.batch_size, config.row_tokens
    for source in plan.sources:
        dataset: Any = _unknown(rows, row_tokens)
        if source.is_off:
            dataset = UnreadSource()
        elif source.name in streams:
            where: Any = {"shard": shard, "num_shards": plan.facts.data_shards}
            where["in_memory"] = streams[source.name]
            dataset = CountedSource(source.streams, *reading(plan, source), **where)
            parts[source.name].append(dataset)
        sources.append(BlendSource(source.name, dataset, source.weight))
    return LaneBlend(
        sources,
        seed=config.run.seed,
        rows=rows,
        row_tokens=row_tokens,
        runs_on=runs_on(plan, None),
        tokenizer=IdsTokenizer(1),
        micro_batches=plan.batches_by_steps,
    )


def _unknown(rows: int, row_tokens: int) -> Iterator[dict[str, Any]]:
    """A data set of the user's own: full batches of unknown content."""
    while True:
        yield {"targets": np.zeros((rows, row_tokens), np.int64), "dataset_labels": ()}
