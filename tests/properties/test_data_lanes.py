"""Properties of the lanes of a reader, and of the slices that shards read."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.streams import mixing_dataset, streams_of
from trainer.data.mixing import num_rows, schedule

PROFILE = settings(max_examples=200, deadline=None, derandomize=True)
lengths_of = st.lists(st.integers(1, 12), min_size=0, max_size=30).map(lambda values: np.array(values, dtype=np.int64))


@PROFILE
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


@settings(max_examples=50, deadline=None, derandomize=True)
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
