"""Properties of the deal of slices to ranks: level for any sizes, the same as ever for old states, cheap after reshards."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.deal import cut_slices
from trainer.data.epochs import QueueKey

MAX_GROUP_CELLS = 64
IMPROBABLE = 1e-9


def slices_of(cells, world_size):
    """Cells of each slice of a stream that is one document."""
    full, rest = divmod(cells, MAX_GROUP_CELLS)
    groups = np.array([MAX_GROUP_CELLS] * full + [rest] * (rest > 0), dtype=np.int64)
    ends = np.concatenate([[0], np.cumsum(groups)])
    found: np.ndarray = np.diff(ends[cut_slices(groups, world_size)])
    return found


def cells_by_rank(sizes, world_size, key):
    """Cells that each rank reads in an epoch, and how far from the mean they may be but in one case of 1e9 (Hoeffding)."""
    turns = np.array(key.turns) % world_size
    loads, squares = np.zeros(world_size, dtype=np.int64), 0.0
    for size in np.unique(sizes).tolist():
        slices = slices_of(size, world_size)
        begins = np.bincount(turns[sizes == size], minlength=world_size)
        loads += sum(times * np.roll(slices, turn) for turn, times in enumerate(begins.tolist()))
        squares += float(begins.sum() * (slices.max() - slices.min()) ** 2)
    return loads, math.sqrt(squares * math.log(2 * world_size / IMPROBABLE) / 2)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=300), st.integers(1, 64), st.integers(0, 99))
def test_ranks_are_as_level_as_chance_allows_for_any_sizes(sizes, world_size, seed):
    key = QueueKey("s", seed, len(sizes), shared=True)
    loads, bound = cells_by_rank(np.array(sizes), world_size, key)
    assert loads.sum() == sum(sizes)
    assert np.abs(loads - loads.mean()).max() <= bound + 1e-9


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 300), st.integers(1, 400), st.integers(1, 64), st.integers(0, 99))
def test_ranks_differ_by_at_most_one_stream_if_all_are_alike(size, num_streams, world_size, seed):
    key = QueueKey("s", seed, num_streams, shared=True)
    loads, _ = cells_by_rank(np.full(num_streams, size), world_size, key)
    assert loads.max() - loads.min() <= size
