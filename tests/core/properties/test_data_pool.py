"""The pool of active readers against references that know nothing of it: its metrics, its picks, its lanes and slices."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.streams import mixing_dataset, streams_of
from trainer.data.pool import ActivePool
from trainer.lab.stream_mixing import num_rows, schedule

PROFILE = settings(max_examples=40, deadline=None, derandomize=True)
ACTIVE = "stream_mixing/active/"
EXHAUST, PICKS = "stream_mixing/refill/exhaust_events", ACTIVE + "picks"
Key = tuple[int, str]  # epoch and stream: one reader


def key_of(batch):
    meta = json.loads(str(batch["instability_meta_json"]))
    return meta["epoch"], meta["stream"]


class FromScratch:
    """The table of metrics worked out anew at every pick, from what was picked when and what is still to come: `future`, the
    key and the number of rows of every batch, to the end of the last epoch that is looked at."""

    def __init__(self, future, pick_mode, modalities):
        self.future, self.pick_mode, self.modalities = future, pick_mode, modalities
        self.remaining = functools.cache(self._remaining)
        self.probability = functools.cache(self._probability)
        self.pools: dict[int, list[Key]] = {}  # who was active at each pick since the beginning
        self.queues: dict[int, tuple[list[str], int]] = {}  # by epoch: streams in order, and how many had their turn

    def _remaining(self, at, key):
        return sum(each == key for each, _ in self.future[at:])

    def fraction(self, at, key):
        return sum(n for k, n in self.future[at:] if k == key) / max(sum(n for k, n in self.future if k == key), 1)

    def _probability(self, at, key):
        pool = self.pools[at]
        left = sum(self.remaining(at, each) for each in pool)
        return {"weighted": self.remaining(at, key) / left, "uniform": 1 / len(pool), "round_robin": 0.0}[
            self.pick_mode
        ]

    def waiting(self, at, key):
        """The picks up to this one for which the reader has been waiting."""
        active = [t for t in sorted(self.pools) if t <= at and key in self.pools[t]]
        picked = [t for t in active if self.future[t][0] == key]
        return [t for t in active if t > picked[-1]] if picked else active

    def absence(self, modality):
        """Minus the logarithm of the chance that a stream of it did not come, of those that came since one did."""
        nats, opened = 0.0, {key for key, _ in self.future}
        for epoch, (queue, taken) in self.queues.items():
            for at, stream in enumerate(queue[:taken]):
                left = [each.split("/")[0] for each in queue[at:]]
                if left[0] == modality:
                    nats = 0.0
                elif (epoch, stream) in opened:
                    nats -= math.log(1 - left.count(modality) / len(left))
        return nats

    def expected(self, at, drained):
        """What the pick `at` has to report if the last drain was just before the pick `drained`."""
        pool = self.pools[at]
        remaining = [self.remaining(at, key) for key in pool]
        fractions = [self.fraction(at, key) for key in pool]
        waits = [self.waiting(at, key) for key in pool]
        surprises = [
            math.fsum(-math.log(1 - self.probability(t, key)) for t in wait)
            for key, wait in zip(pool, waits, strict=True)
        ]
        ended = sum(self.remaining(t, self.future[t][0]) == 1 for t in range(drained, at + 1))
        modalities = Counter(stream.split("/")[0] for _, stream in pool)
        return {
            ACTIVE + "remaining_min": min(remaining),
            ACTIVE + "remaining_max": max(remaining),
            ACTIVE + "remaining_fraction_min": min(fractions),
            ACTIVE + "remaining_fraction_max": max(fractions),
            ACTIVE + "steps_since_pick_max": max(map(len, waits)),
            ACTIVE + "pick_surprise_max": max(surprises),
            **{ACTIVE + f"modalities/{m}": modalities[m] for m in self.modalities},
            **{f"stream_mixing/refill/absence/{m}": self.absence(m) for m in self.modalities},
            EXHAUST: ended,
            PICKS: at + 1 - drained,
        }


layouts = st.lists(st.lists(st.integers(1, 16), min_size=1, max_size=3), min_size=1, max_size=6)
settings_of = st.fixed_dictionaries(
    {
        "batching_mode": st.sampled_from(["per_stream", "device_per_stream"]),
        "pick_mode": st.sampled_from(["weighted", "uniform", "round_robin"]),
        "num_streams_mixed": st.integers(1, 5),
        "batch_size": st.integers(1, 3),
        "max_group_cells": st.integers(1, 4),
        "seed": st.integers(0, 3),
        "world_size": st.integers(1, 3),
    }
)


@PROFILE
@given(layouts, settings_of, st.data())
def test_metrics_equal_a_reference_from_scratch_at_every_pick_through_refills_epochs_and_a_resume(layout, kwargs, data):
    kwargs = {**kwargs, "rank": data.draw(st.integers(0, kwargs["world_size"] - 1))}
    with streams_of(layout, "abc") as streams:

        def fresh():
            return mixing_dataset(streams, **kwargs)

        batches = list(itertools.takewhile(lambda batch: key_of(batch)[0] < 2, itertools.islice(fresh(), 400)))
        if len(batches) == 400:
            return  # a rank to which no cell ever falls: it has no pool
        future = [(key_of(batch), int((batch["group_ids"] >= 0).sum())) for batch in batches]
        every = data.draw(st.integers(1, 3))
        labels = {stream.modality for stream in streams}
        resume = data.draw(st.integers(0, len(future) - 1))
        reference, dataset, drained = FromScratch(future, kwargs["pick_mode"], labels), fresh(), 0
        for at in range(len(future)):
            if at == resume:
                state = json.loads(json.dumps(dataset.state_dict()))
                before = dataset.drain_step_metrics()
                dataset, drained = fresh(), at
                dataset.load_state_dict(state)
                # The same pool as seen before; what was counted has been drained with it, and is not counted again.
                assert dataset.drain_step_metrics() == {
                    **before,
                    **dict.fromkeys({EXHAUST, PICKS} & before.keys(), 0.0),
                }
            assert dataset._fill_pool()
            reference.pools[at] = [(future[at][0][0], reader.stream.relative_path) for reader in dataset._pool.readers]
            assert key_of(next(dataset)) == future[at][0]
            paths = [dataset.streams[part.stream].relative_path for part in dataset._queue]
            reference.queues[dataset.epoch] = paths, dataset._index
            if at % every == 0 or at == len(future) - 1:
                expected = reference.expected(at, drained)
                found = dataset.drain_step_metrics()
                assert found.keys() == expected.keys()
                assert found == pytest.approx(expected, abs=1e-12, rel=1e-9)
                drained = at + 1


class Closed:
    """A reader of so many picks."""

    remaining_fraction = 1.0

    def __init__(self, size: int) -> None:
        self.size, self.taken, self.stream, self.last = size, 0, SimpleNamespace(modality="m"), -1

    @property
    def remaining_picks(self) -> int:
        return self.size - self.taken


def sequences(pick_mode, epochs):
    """The order of picks in each of many epochs of a closed pool: streams of 2, 2 and 1 batches."""
    options = {"num_streams_mixed": 3, "batch_size": 2, "pick_mode": pick_mode}
    with streams_of([[4] * 4, [4] * 4, [4] * 2], "abc") as streams:
        dataset = mixing_dataset(streams, **options)
        return Counter("".join(next(dataset)["dataset_segments"][0] for _ in range(5)) for _ in range(epochs))


@pytest.mark.parametrize(("pick_mode", "is_uniform"), [("weighted", True), ("uniform", False)])
def test_weighted_picks_of_a_closed_pool_are_a_uniform_permutation(pick_mode, is_uniform):
    """Chi-square over all 30 orders of a, a, b, b, c, in 900 epochs; 29 degrees of freedom, p = 0.001 at 58.3."""
    orders = {"".join(order) for order in itertools.permutations("aabbc")}
    seen = sequences(pick_mode, 900)
    assert len(orders) == 30
    assert set(seen) <= orders
    statistic = sum((seen[order] - 30) ** 2 / 30 for order in orders)
    assert statistic < 58.3 if is_uniform else statistic > 90  # another law is told apart


@PROFILE
@given(st.lists(st.integers(2, 30), min_size=1, max_size=5), st.lists(st.floats(0, 1, exclude_max=True), min_size=2))
@pytest.mark.parametrize("pick_mode", ["weighted", "uniform", "round_robin"])
def test_picks_that_are_recorded_together_count_as_one_by_one(pick_mode, sizes, uniforms):
    found = []
    for one_by_one in (True, False):
        pool: Any = ActivePool(["m"], pick_mode)
        for size in sizes:
            pool.add(Closed(size))
        slots = pool.choose(uniforms)
        for picks in [[slot] for slot in slots] if one_by_one else [slots]:
            pool.record(picks)
        observed = pool.observed()
        found.append([*observed["seen"].values(), *np.ravel(observed["waits"])])
    assert found[1] == pytest.approx(found[0], rel=1e-12)


lengths_of = st.lists(st.integers(1, 12), min_size=0, max_size=30).map(lambda values: np.array(values, dtype=np.int64))


@settings(PROFILE, max_examples=200)
@given(lengths_of, st.integers(1, 5))
def test_groups_go_longest_first_to_the_lane_with_the_fewest_cells(cells, num_lanes):
    loads, lane_of = [0] * num_lanes, {}
    for group in sorted(range(len(cells)), key=lambda g: -cells[g]):
        lane_of[group] = loads.index(min(loads))
        loads[lane_of[group]] += int(cells[group])
    by_load, ends, expected = sorted(range(num_lanes), key=lambda lane: -loads[lane]), [0] * num_lanes, []
    for group, size in enumerate(cells.tolist()):
        lane = by_load.index(lane_of[group])
        expected.append((lane, ends[lane]))
        ends[lane] += size
    assert list(zip(*map(np.ndarray.tolist, schedule(cells, num_lanes)), strict=True)) == expected
    assert num_rows(cells, num_lanes) == max(loads)


@settings(PROFILE, max_examples=50)
@given(st.integers(1, 60), st.integers(1, 8), st.integers(0, 9))
def test_shards_take_turns_in_the_slices_of_streams(num_streams, num_shards, seed):
    """Where each stream is one group, a shard has as many as any other, but for one."""
    with streams_of([[4]] * num_streams) as streams:
        owners: Counter[int] = Counter()
        for shard in range(num_shards):
            kwargs = {"batching_mode": "device_per_stream", "repeat": False, "seed": seed}
            batches = mixing_dataset(streams, rank=shard, world_size=num_shards, **kwargs)
            owners[shard] = sum(len(batch["group_ids"]) for batch in batches)
        assert sum(owners.values()) == num_streams
        assert set(owners.values()) <= {num_streams // num_shards, math.ceil(num_streams / num_shards)}


def waits(num_mixed: int, picks: int, seed: int) -> Iterator[int]:
    """Waits of a pool of K readers with n picks per slice, refilled from 4 K streams, over 10 K n picks."""
    pool: Any = ActivePool(["m"], "weighted")
    draw, unread = np.random.Generator(np.random.Philox(seed)), 0
    for at in range(10 * num_mixed * picks):
        if not pool.readers:
            unread = 3 * num_mixed
            for _ in range(num_mixed):
                pool.add(Closed(picks))
        (slot,) = pool.choose([draw.random()])
        reader = pool.readers[slot]
        pool.record([slot])
        if reader.last >= 0:
            yield at - reader.last
        reader.last = at
        if not reader.remaining_picks:
            pool.replace(slot, Closed(picks) if unread else None)
            unread -= unread > 0


@pytest.mark.parametrize("num_mixed", [4, 8])
@pytest.mark.parametrize("picks", [20, 50, 100])
def test_no_wait_is_longer_than_2_k_n(num_mixed: int, picks: int) -> None:
    longest = max(max(waits(num_mixed, picks, seed)) for seed in range(3))
    assert longest <= 2 * num_mixed * picks
    assert longest > 0.4 * num_mixed * picks  # the bound is tight: a threshold far below is not safe
