"""Full rows: each token once per epoch, each row the continuation of its lane, shares by claims, on any number of shards."""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.on_device import resident_bytes
from tests.support.streams import WideTokens, options_of, streams_of
from trainer.data.blend import BlendSource, UnreadSource
from trainer.data.lanes import LaneBlend
from trainer.data.layout import discover_direct
from trainer.data.shard_source import ShardSource, deal_parts
from trainer.data.weights import ConstantWeight, ScheduledWeight
from trainer.errors import UserError
from trainer.ledger import Ledger, LedgerOptions
from trainer.metrics.aggregate import reduce_over_ranks
from trainer.options import ONE, MicroBatches

Layout = Mapping[str, Sequence[Sequence[int]]]


def blend(
    streams: Mapping[str, Any],
    *,
    shard: int = 0,
    num_shards: int = 1,
    rows: int = 3,
    row_tokens: int = 4,
    runs_on: bool = True,
    groups: int | Mapping[int, int] = 1,
    weights: Mapping[str, ScheduledWeight] | None = None,
    off: Sequence[str] = (),
    micro_batches: MicroBatches = ONE,
    per_source: bool = False,
    **options: Any,
) -> LaneBlend:
    """The lanes of a shard; options by name. `off`: sources of weight 0."""
    options = {"seq_len": row_tokens, "num_streams_mixed": 2, "repeat": False, "tokenizer": WideTokens(), **options}
    sources = []
    for name, found in streams.items():
        dataset = ShardSource(found, *options_of({"namespace": name, **options}), shard=shard, num_shards=num_shards)
        sources.append(BlendSource(name, dataset, (weights or {}).get(name, ConstantWeight(1.0))))
    sources += [BlendSource(name, UnreadSource(), ConstantWeight(0.0)) for name in off]
    how: dict[str, Any] = {"rows": rows, "row_tokens": row_tokens, "runs_on": runs_on, "per_source": per_source}
    how |= {"lane_sets": {1: groups} if isinstance(groups, int) else groups, "micro_batches": micro_batches}
    return LaneBlend(sources, seed=0, tokenizer=WideTokens(), **how)


@contextmanager
def corpus(layout: Layout) -> Iterator[dict[str, Any]]:
    """Streams of each source; token ids are unique in a source."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(streams_of(own, is_unique=True)) for name, own in layout.items()}


def documents_of(layout: Sequence[Sequence[int]]) -> list[list[int]]:
    """The tokens of each document of a source, in order."""
    sizes = [size for lengths in layout for size in lengths]
    return [list(range(end - size, end)) for size, end in zip(sizes, accumulate(sizes), strict=True)]


class Follower:
    """Checks each batch against what was read before, and collects the documents as they are read."""

    def __init__(self, shape: tuple[int, int], runs_on: bool) -> None:
        self.shape, self.runs_on = shape, runs_on
        self.read: Counter[tuple[str, int, int]] = Counter()  # source, epoch, token
        self.open: dict[int, list[int]] = {}  # group -> tokens read so far
        self.whole: list[list[int]] = []
        self.cells: dict[int, int] = {}

    def take(self, batch: Mapping[str, Any]) -> None:
        tokens, targets = batch["tokens"], batch["targets"]
        assert tokens.shape == targets.shape == self.shape
        rows = json.loads(str(batch["instability_meta_json"]))["rows"]
        for row, segments in enumerate(rows):
            lookup = int(batch["group_ids"][row])
            known = self.open.pop(lookup, None)
            at, current = 0, known if known is not None else []
            assert (known is not None) == (lookup >= 0 and batch["cell_index"][row] > 0)
            assert batch["depth"][row] == len(current)
            if known is not None:
                assert batch["cell_index"][row] == self.cells.pop(lookup)
            assert self.runs_on or len(segments) <= 1
            for number, segment in enumerate(segments):
                size = segment["stop"] - segment["start"]
                is_new = number > 0 or known is None
                if is_new:
                    if number:
                        self.whole.append(current)
                    current = []
                if self.runs_on:
                    assert bool(batch["resets"][row, at]) == is_new
                own = targets[row, at : at + size].tolist()
                assert not current or tokens[row, at] == current[-1]
                assert tokens[row, at + 1 : at + size].tolist() == own[:-1]
                current = [*current, *own]
                for token in own:
                    self.read[segment["source"], segment["epoch"], token] += 1
                assert set(batch["segment_ids"][row, at : at + size].tolist()) == {sum(map(len, rows[:row])) + number}
                at += size
            assert (targets[row, at:] == -100).all()
            if self.runs_on:
                assert int(batch["resets"][row].sum()) == len(segments) - (known is not None)
            is_last = not self.runs_on and batch["is_last"][row]
            end = -1 if is_last else int(batch["end_ids" if self.runs_on else "group_ids"][row])
            if end >= 0:
                cell = int(batch["end_cell_index" if self.runs_on else "cell_index"][row])
                self.open[end], self.cells[end] = current, cell + 1
            elif segments:
                self.whole.append(current)


LENGTHS = st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=6), min_size=1, max_size=4).filter(
    lambda layout: any(map(any, layout)) and all(map(any, layout))
)


@settings(max_examples=60)
@given(
    LENGTHS,
    st.integers(1, 5),
    st.integers(1, 9),
    st.booleans(),
    st.integers(1, 3),
    st.sampled_from([0, 0, 1, 2]),
    st.integers(1, 4),
    st.data(),
)
def test_each_document_is_read_once_and_in_order(layout, rows, row_tokens, runs_on, num_shards, cut, groups, data):
    """On all shards together, through any resumes in between."""
    expected = [document for document in documents_of(layout) if document]
    if cut:
        size = cut * row_tokens
        expected = [document[at : at + size] for document in expected for at in range(0, len(document), size)]
    found: list[list[int]] = []
    options = {"rows": rows, "row_tokens": row_tokens, "runs_on": runs_on, "max_group_cells": cut, "groups": groups}
    options["weights"] = {"zero": ConstantWeight(0.0)}
    with corpus({"one": layout, "zero": [[5]]}) as streams:
        for shard in range(num_shards):
            reader = blend(streams, shard=shard, num_shards=num_shards, **options)
            follower = Follower((rows, row_tokens), runs_on)
            stop = data.draw(st.integers(0, 6))
            for number, batch in enumerate(reader):
                follower.take(batch)
                if number == stop:
                    state = json.loads(json.dumps(reader.state_dict()))
                    again = blend(streams, shard=shard, num_shards=num_shards, **options)
                    again.load_state_dict(state)
                    rest = [*again]
                    assert [*map(same, rest)] == [*map(same, reader)]  # of the uncut one
                    for each in rest:
                        follower.take(each)
                    break
            assert not follower.open
            assert max(follower.read.values(), default=1) == 1
            found += follower.whole
    assert sorted(found) == sorted(expected)


def same(batch: Mapping[str, Any]) -> str:
    """A batch as text, from which another one differs."""
    arrays = {key: (value.dtype.name, value.tolist()) for key, value in batch.items() if isinstance(value, np.ndarray)}
    return repr({key: arrays.get(key, str(value)) for key, value in batch.items()})


@pytest.mark.parametrize("runs_on", [True, False])
def test_weights_that_change_at_a_resume_are_as_if_they_had_been_a_schedule(runs_on):
    layout, at = {"one": [[9, 30, 2]] * 9, "two": [[5, 14]] * 3, "three": [[7]] * 3}, 6
    first, then = {"one": 1.0, "two": 3.0, "three": 0.0}, {"one": 2.0, "two": 0.5, "three": 1.0}
    planned = {name: ScheduledWeight("step", {0: first[name], at: then[name]}) for name in layout}
    before, after = ({name: ConstantWeight(own[name]) for name in layout} for own in (first, then))
    options = {"runs_on": runs_on, "repeat": True, "num_streams_mixed": 7}
    with corpus(layout) as streams:
        whole, stopped, resumed = (blend(streams, weights=each, **options) for each in (planned, before, after))
        assert [same(next(stopped)) for _ in range(at)] == [same(next(whole)) for _ in range(at)]
        assert len([next(resumed) for _ in range(30)]) == 30  # so that all its streams are open
        resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        assert [same(next(resumed)) for _ in range(40)] == [same(next(whole)) for _ in range(40)]
        assert resumed.state_dict() == whole.state_dict()


def test_a_source_is_removed_once_no_lane_reads_it():
    weights = {"one": ConstantWeight(1.0), "two": ConstantWeight(1.0)}
    with corpus({"one": [[9, 30, 2]] * 3, "two": [[5, 14]] * 3}) as streams:
        reader = blend(streams, repeat=True)
        next(reader)
        left = blend({"one": streams["one"]}, repeat=True)
        with pytest.raises(UserError, match="lacks two, of which documents are being read"):
            left.load_state_dict(reader.state_dict())
        off = blend(streams, weights={**weights, "two": ConstantWeight(0.0)}, repeat=True)
        off.load_state_dict(reader.state_dict())
        while any(place is not None and place.source == "two" for place in off.places):
            next(off)
        left.load_state_dict(json.loads(json.dumps(off.state_dict())))
        assert [same(next(left)) for _ in range(40)] == [same(next(off)) for _ in range(40)]


@settings(max_examples=60)
@given(LENGTHS, st.booleans(), st.lists(st.tuples(*[st.integers(1, 3)] * 3, st.integers(0, 7)), max_size=4))
@example([[30] * 6], True, [(1, 2, 2, 4), (1, 2, 1, 3), (1, 1, 2, 3)])
def test_nothing_is_read_twice_or_lost_over_changes_of_shards_rows_and_groups(layout, runs_on, changes):
    """Unfinished groups continue first, from where they were; a second change may come while some still wait."""
    states: list[Any] = []
    followers = Follower((0, 4), runs_on)
    with corpus({"one": layout}) as streams:
        for num_shards, rows, groups, batches in [*changes, (2, 2, 1, 10**6)]:
            how: dict[str, Any] = {"num_shards": num_shards, "rows": rows, "groups": groups, "runs_on": runs_on}
            shards = [blend(streams, shard=shard, **how) for shard in range(num_shards)]
            followers.shape = (rows, 4)
            for number, shard in enumerate(shards):
                if states:
                    shard.load_state_dict(states[number] if len(states) == num_shards else states)
                assert set(shard.groups_in_flight) <= followers.open.keys()
            if states:
                assert sorted(id for shard in shards for id in shard.groups_in_flight) == sorted(followers.open)
            for shard in shards:
                for _, batch in zip(range(batches), shard, strict=False):
                    followers.take(batch)
            states = [json.loads(json.dumps(shard.state_dict())) for shard in shards]
    assert not followers.open
    assert sorted(followers.whole) == sorted(document for document in documents_of(layout) if document)
    assert set(followers.read.values()) == {1}


@pytest.mark.parametrize(("num_shards", "groups"), [(1, 1), (2, 1), (4, 1), (1, 16), (2, 5)])
def test_rows_are_always_full_and_each_epoch_has_every_token_once(num_shards, groups):
    layout = [[7, 30, 2, 11], [5, 5, 9], [40, 1, 3, 8], [12, 12], [6, 17, 3]]
    read: Counter[tuple[str, int, int]] = Counter()
    whole = []  # epochs that a shard has read whole
    with corpus({"one": layout}) as streams:
        for shard in range(num_shards):
            follower = Follower((2, 4), True)
            reader = blend(streams, shard=shard, num_shards=num_shards, rows=2, repeat=True, groups=groups)
            for _, batch in zip(range(400), reader, strict=False):
                follower.take(batch)
                assert (batch["targets"] != -100).all()
            read += follower.read
            whole.append(min(place.epoch for place in reader.places if place is not None))
    tokens = Counter(epoch for _, epoch, _ in read)
    assert max(read.values()) == 1
    assert min(whole) >= 3
    assert {tokens[epoch] for epoch in range(min(whole))} == {sum(map(sum, layout))}


def test_the_next_row_of_a_document_comes_a_spread_of_steps_later():
    """With c m groups, c steps of m micro-batches have rows of different documents only."""
    layout = [[40] * 8 for _ in range(8)]
    spread, m = 3, 2
    with corpus({"one": layout}) as streams:
        reader = blend(streams, rows=2, repeat=True, groups=spread * m)
        rows = [batch["instability_meta_json"].rows for _, batch in zip(range(60), reader, strict=False)]
    first = [{(segments[0]["stream"], segments[0]["document"]) for segments in each} for each in rows]
    steps = [set.union(*first[at : at + m]) for at in range(0, 60, m)]
    for at in range(len(steps) - spread):
        assert len(set.union(*steps[at : at + spread])) == spread * m * 2
        continued = steps[at] & steps[at + spread]
        assert len(continued) >= m  # documents last ten rows, so that most continue


def test_what_is_left_moves_into_fewer_groups_and_no_micro_batch_is_empty():
    with corpus({"one": [[60, 2, 2, 3, 3, 4, 40]]}) as streams:
        reader = blend(streams, rows=2, groups=4)
        fills = [(batch["targets"] != -100).sum() for batch in reader]
        again = blend(streams, rows=2, groups=4, repeat=True)
        again.load_state_dict(reader.state_dict())
        assert (next(again)["targets"] != -100).all()
    with corpus({"one": [[60, 2, 2, 3, 3, 4, 40]]}) as streams:
        before = [(batch["targets"] != -100).sum() for batch in blend(streams, rows=2)]
    assert min(fills) > 0
    assert len(fills) <= len(before) + 4


def test_few_documents_are_begun_equally_often_on_any_number_of_shards():
    """Also where one of them is longer than a shard's part of an epoch."""
    sizes = [5, 1, 40, 200, 17]
    for num_shards in (2, 3):
        begun = Counter[int]()
        with corpus({"one": [sizes]}) as streams:
            how: dict[str, Any] = {"num_shards": num_shards, "rows": 1, "repeat": True}
            shards = [blend(streams, shard=shard, **how) for shard in range(num_shards)]
            for _ in range(3000 // num_shards):
                for shard in shards:
                    for segment in next(shard)["instability_meta_json"].rows[0]:
                        begun[segment["document"]] += segment["start"] == 0
        assert max(begun.values()) - min(begun.values()) <= 2, begun
        assert sum(begun.values()) > 100
    with corpus({"one": [[5, 9]]}) as streams:
        parts = [blend(streams, shard=shard, num_shards=3).sources[0].dataset for shard in range(3)]
        assert [(len([*part]), part.times_begun) for part in parts] == [(1, (1, 1)), (1, (1, 1)), (0, None)]


@settings(max_examples=25)
@given(st.integers(2, 4), st.integers(0, 10**6))
def test_weights_are_shares_of_the_tokens_that_are_read(num_sources, seed):
    """Within a document for each lane, and 1 + ln S where weights change."""
    rng = np.random.default_rng(seed)
    layout = {f"s{i}": [rng.integers(1, 30, size=8).tolist() for _ in range(2)] for i in range(num_sources)}
    longest = max(size for own in layout.values() for lengths in own for size in lengths)
    constants = {name: ConstantWeight(float(rng.uniform(0.1, 3))) for name in layout}
    moving = {
        name: ScheduledWeight("linear", {0: float(rng.uniform(0, 2)), 40: float(rng.uniform(0.1, 3))})
        for name in layout
    }
    with corpus(layout) as streams:
        for weights, bound in ((constants, 2), (moving, 3 + np.log(num_sources))):
            reader = blend(streams, rows=2, repeat=True, weights=weights)
            read = dict.fromkeys(layout, 0)
            for number, batch in zip(range(1, 81), reader, strict=False):
                given, expected = np.array(reader._counts), np.array(reader._due)
                assert np.abs(given - expected).max() <= bound * longest + 1e-6
                for segment in chain.from_iterable(batch["instability_meta_json"].rows):
                    read[segment["source"]] += segment["stop"] - segment["start"]
                assert sum(read.values()) == number * 8 == sum(reader._counts)
                assert [*read.values()] == reader._counts


def test_a_weight_that_becomes_zero_lets_the_document_be_finished_and_no_other_begin():
    weights = {"one": ScheduledWeight("step", {0: 10.0, 3: 0.0}), "two": ConstantWeight(9.0)}  # "three": 1
    with corpus({"one": [[200, 200]], "two": [[3] * 20], "three": [[3] * 20]}) as streams:
        reader = blend(streams, rows=2, repeat=True, weights=weights)
        rows = [batch["instability_meta_json"].rows for _, batch in zip(range(80), reader, strict=False)]
    found = [(at, each) for at, own in enumerate(rows) for each in chain.from_iterable(own) if each["source"] == "one"]
    begun = [at for at, segment in found if segment["start"] == 0]
    assert max(begun) < 3
    assert sum(segment["stop"] - segment["start"] for _, segment in found) == 200 * len(begun)
    _, two, three = reader._counts  # the rest is shared out by weight, also while a document of "one" is read
    assert abs(three - (two + three) / 10) <= 6, (two, three)


def test_all_weights_zero_is_refused_once_the_lanes_are_dry():
    weights = {"one": ScheduledWeight("step", {0: 1.0, 1: 0.0, 30: 1.0})}
    with corpus({"one": [[9, 9, 9]]}) as streams:
        reader = blend(streams, rows=1, repeat=True, weights=weights)
        with pytest.raises(UserError, match="weight zero"):
            list(reader)


@settings(max_examples=30)
@given(LENGTHS, st.integers(1, 4), st.integers(1, 6))
def test_a_ledger_of_as_many_slots_as_lanes_carries_every_state(layout, rows, row_tokens):
    """What is looked up is what was stored behind the row before; nothing is evicted or left behind."""
    with corpus({"one": layout}) as streams:
        reader = blend(streams, rows=rows, row_tokens=row_tokens)
        ledger = Ledger(LedgerOptions(capacity=rows, wipe_mode="none"), state_width=1)
        stored: dict[int, float] = {}
        for step, batch in enumerate(reader):
            ledger.begin_step(step)
            state = ledger.lookup(batch["group_ids"], batch["cell_index"])
            expected = [stored.get(group, 0.0) for group in batch["group_ids"].tolist()]
            assert state[:, 0].tolist() == expected
            ends = {key: batch[key] for key in ("end_ids", "end_cell_index")}
            new = torch.arange(1.0, rows + 1)[:, None] + 10 * step
            ledger.store(batch["group_ids"], batch["cell_index"], batch["is_last"], new, **ends)
            stored = dict(zip(batch["end_ids"].tolist(), new[:, 0].tolist(), strict=True))
            stored.pop(-1, None)
            assert ledger.last_extra_metrics["ledger/live_groups"] == len(stored)
        found = ledger.last_extra_metrics
    assert found["ledger/cold_starts"] == found["ledger/live_groups"] == 0


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 6), st.randoms())
def test_the_deal_covers_every_byte_once_and_evenly(sizes, num_shards, random):
    order = random.sample(range(len(sizes)), len(sizes))
    parts = deal_parts(tuple(sizes), tuple(order), num_shards)
    for stream, size in enumerate(sizes):
        own = sorted((part.low, part.high) for shard in parts for part in shard if part.stream == stream)
        assert [low for low, _ in own] == [0, *(high for _, high in own[:-1])]
        assert own[-1][1] == size
    loads = [sum(part.high - part.low for part in shard) for shard in parts]
    assert max(loads) - min(loads) <= 1


def test_documents_that_wait_for_a_row_are_not_swept(tmp_path):
    with corpus({"one": [[40] * 4]}) as streams:
        wide = blend(streams, rows=4)
        next(wide)
        narrow = blend(streams, rows=1)
        narrow.load_state_dict(json.loads(json.dumps(wide.state_dict())))
        ledger = Ledger(LedgerOptions(capacity=4, wipe_mode="periodic_stale", stale_threshold=2), state_width=1)
        ledger.begin_step(0)
        ledger.store(np.array(narrow.groups_in_flight), np.zeros(4, int), np.zeros(4, bool), torch.ones(4, 1))
        ledger.keep(narrow.waiting_groups)
        wider = blend(streams, rows=2)
        wider.load_state_dict(narrow.state_dict())
        assert wider.groups_in_flight == [*narrow.waiting_groups[-3:], *narrow.groups_in_flight[:1]]
        for step, batch in enumerate(narrow, start=1):
            ledger.begin_step(step)
            state = ledger.lookup(batch["group_ids"], batch["cell_index"])
            ends = {key: batch[key] for key in ("end_ids", "end_cell_index")}
            ledger.store(batch["group_ids"], batch["cell_index"], batch["is_last"], state + 1, **ends)
        found = ledger.last_extra_metrics
    assert found["ledger/cold_starts"] == found["ledger/evictions/stale"] == found["ledger/live_groups"] == 0


def test_a_file_that_was_cut_is_refused_before_a_group_that_begins_is_read(tmp_path):
    np.save(tmp_path / "a.npy", np.tile([1, 2, 0], 40).astype(np.uint16))
    reader = blend({"one": discover_direct([tmp_path / "a.npy"])}, rows=1, row_tokens=8, runs_on=False, eod=0)
    next(reader)
    os.truncate(tmp_path / "a.npy", 130)
    with pytest.raises(UserError, match="was cut from 368 to 130 bytes"):
        next(reader)


@pytest.mark.slow
def test_memory_stays_flat_over_50_000_files(tmp_path):
    """Once some were read: files that were read are given back, and little more than their names is kept."""
    np.save(tmp_path / "file.npy", np.arange(8, dtype=np.uint16))
    for path in (paths := [tmp_path / f"{number}.npy" for number in range(50_000)]):
        path.symlink_to(tmp_path / "file.npy")
    maps, reader = Path("/proc/self/maps"), blend({"one": discover_direct(paths)}, rows=10, row_tokens=100)
    held = [(resident_bytes(), maps.read_text().count("\n")) for number, _ in enumerate(reader) if number in (50, 399)]
    (first, mapped), (last, still_mapped) = held
    assert still_mapped <= mapped + 30
    assert last - first <= 500 * 43_000


def test_states_of_other_rows_are_refused_by_name():
    with corpus({"one": [[9, 9]]}) as streams:
        reader = blend(streams)
        with pytest.raises(UserError, match="not one of full rows"):
            reader.load_state_dict({key: value for key, value in reader.state_dict().items() if key != "lanes"})
        foreign = BlendSource("own", [], ConstantWeight(1.0))
        with pytest.raises(TypeError, match="every source must be a ShardSource"):
            LaneBlend([foreign], seed=0, rows=1, row_tokens=4, runs_on=True, tokenizer=WideTokens())


@pytest.mark.parametrize("num_documents", [60, 9])
@pytest.mark.parametrize("cut", [0, 1])
def test_the_least_and_the_most_that_a_document_was_begun_are_those_of_a_table(num_documents, cut):
    """On shards that are epochs apart, and over changes of their number; of few documents, bounds."""
    sizes = [(1, 9, 40, 3)[number % 4] if number < num_documents // 2 else 2 for number in range(num_documents)]
    layout = [sizes[at::3] for at in range(3)]
    whole, states, gap = [size for file in layout for size in file], [], 0
    table = Counter({(at, first): 0 for at, size in enumerate(whole) for first in (range(0, size, 4) if cut else [0])})
    starts = [0, *accumulate(whole)]
    rng = np.random.default_rng(0)
    with corpus({"one": layout}) as streams:
        for num_shards in (3, 2, 1, 3):
            how: dict[str, Any] = {"num_shards": num_shards, "rows": 2, "repeat": True, "max_group_cells": cut}
            shards = [blend(streams, shard=shard, per_source=True, **how) for shard in range(num_shards)]
            for shard in shards if states else ():
                shard.load_state_dict(states)
            for number in [*range(num_shards), *rng.integers(num_shards, size=150).tolist()]:
                batch = next(shards[number])
                for begin in np.flatnonzero(batch["resets"]):
                    token = int(batch["targets"].ravel()[begin])
                    at = bisect_right(starts, token) - 1
                    table[at, token - starts[at]] += 1
                drained = [found for shard in shards if (found := shard.drain_step_metrics())]
                if len(drained) == num_shards:
                    reduced = reduce_over_ranks(drained, [*drained[0]], device="cpu", world_size=1)
                    least, most = reduced["data/epochs_least"], reduced["data/epochs_most"]
                    assert (least, most) == (reduced["data/epochs_least/one"], reduced["data/epochs_most/one"])
                    true = min(table.values()), max(table.values())
                    assert least <= true[0] <= true[1] <= most
                    assert (least, most) == true or num_documents < 8 * num_shards, (num_shards, true)
                    gap = max(gap, true[1] - true[0])
            states = [json.loads(json.dumps(shard.state_dict())) for shard in shards]
    assert gap > 1, "the shards were never apart"
    assert min(table.values()) > 2
