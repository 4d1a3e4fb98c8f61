"""Properties of slices, their deal to ranks, lanes and packing."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.deal import assign_lanes, cut_slices, most_cells, plan_length
from trainer.data.epochs import QueueKey
from trainer.data.groups import pack_rows
from trainer.data.reader import plan_lanes

PROFILE = settings(max_examples=200, deadline=None, derandomize=True)
lengths_of = st.lists(st.integers(1, 12), min_size=0, max_size=30).map(lambda values: np.array(values, dtype=np.int64))


@PROFILE
@given(lengths_of, st.integers(1, 5))
def test_slices_are_contiguous_cover_all_and_are_as_level_as_groups_allow(cells, num_slices):
    bounds = cut_slices(cells, num_slices)
    assert bounds[0] == 0
    assert bounds[-1] == len(cells)
    assert (np.diff(bounds) >= 0).all()
    ideal = cells.sum() / num_slices
    largest = cells.max(initial=0)
    assert all(abs(cells[a:b].sum() - ideal) <= largest for a, b in itertools.pairwise(bounds))
    boundaries = np.concatenate([[0], np.cumsum(cells)])
    for cut, bound in enumerate(bounds.tolist()):
        assert abs(boundaries[bound] - cut * ideal) <= np.abs(boundaries - cut * ideal).min() + 1e-9


@PROFILE
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=12), st.integers(1, 9), st.integers(1, 4))
def test_documents_are_cut_no_shorter_than_it_takes_for_ranks_not_to_wait(cells, num_slices, num_lanes):
    def idle(most):
        """The share of micro-batches without rows over all ranks, with all groups of a slice read side by side."""
        groups = [min(most, size - begin) for size in cells for begin in range(0, size, most)]
        bounds = cut_slices(np.array(groups), num_slices)
        picks = [max(*groups[a:b], math.ceil(sum(groups[a:b]) / num_lanes), 0) for a, b in itertools.pairwise(bounds)]
        return 1 - np.mean(picks) / max(picks)

    found, longest = most_cells(np.array(cells), num_slices, num_lanes), max(cells)
    tried = [longest] + [2**k for k in range(20, 5, -1) if 2**k < longest]
    if num_slices == 1 or longest <= 64:
        assert found == longest
    else:
        assert found in tried
        assert found == 64 or idle(found) <= 0.1 + 1e-9
        assert all(idle(most) > 0.1 - 1e-9 for most in tried[: tried.index(found)])


@PROFILE
@given(lengths_of, st.integers(1, 5))
def test_lanes_are_those_of_placing_groups_one_by_one(cells, num_lanes):
    loads = [0] * num_lanes
    expected = [0] * len(cells)
    for group in sorted(range(len(cells)), key=lambda g: -cells[g]):
        lane = loads.index(min(loads))
        expected[group] = lane
        loads[lane] += int(cells[group])
    by_load = sorted(range(num_lanes), key=lambda lane: -loads[lane])
    lanes, found = assign_lanes(cells, num_lanes)
    assert found.tolist() == [loads[lane] for lane in by_load]
    assert lanes.tolist() == [by_load.index(lane) for lane in expected]


@PROFILE
@given(lengths_of, st.integers(1, 5), st.integers(0, 5))
def test_a_plan_reads_each_cell_once_in_order_on_one_lane(cells, num_lanes, seed):
    offsets = np.concatenate([[0], np.cumsum(cells)])
    plan = plan_lanes(offsets[:-1], cells, np.random.default_rng(seed).random(len(cells)), num_lanes)
    assert plan.num_batches == plan_length(cells, num_lanes)
    split = min(3, plan.num_batches)
    parts = [plan.rows(a, b) for a, b in ((0, split), (split, plan.num_batches)) if a < b]
    read, positions = (np.concatenate([part[i] for part in parts] or [np.zeros((0, num_lanes))]) for i in (0, 1))
    batches = [row[row >= 0] for row in read]
    assert sorted(c for batch in batches for c in batch.tolist()) == list(range(offsets[-1]))
    owners = np.searchsorted(offsets, read, side="right") - 1
    assert (positions[read >= 0] == owners[read >= 0]).all()
    assert (positions[read < 0] == -1).all()
    place = {c: (t, lane) for t, batch in enumerate(batches) for lane, c in enumerate(batch.tolist())}
    for first, size in zip(offsets[:-1].tolist(), cells.tolist(), strict=True):
        t, lane = place[first]
        assert [place[first + i] for i in range(size)] == [(t + i, lane) for i in range(size)]
    for stop in range(plan.num_batches + 2):
        assert plan.cells_before(stop) == sum(len(batch) for batch in batches[:stop])
        done = [int(c) for batch in batches[:stop] for c in batch]
        taken = [sum(first <= c < first + size for c in done) for first, size in zip(offsets, cells, strict=False)]
        assert plan.taken(cells, stop).tolist() == taken


@PROFILE
@given(lengths_of, st.integers(12, 20))
def test_rows_are_filled_as_best_fit_decreasing_fills_them(lengths, capacity):
    rows = pack_rows(lengths, capacity)
    assert len(rows) == len(lengths)
    fill = np.bincount(rows, weights=lengths) if len(rows) else np.zeros(0)
    plain: list[int] = []  # the longest first, each into the fullest row with room
    for length in sorted(lengths.tolist(), reverse=True):
        fitting = [row for row in range(len(plain)) if plain[row] + length <= capacity]
        if fitting:
            plain[max(fitting, key=plain.__getitem__)] += length
        else:
            plain.append(length)
    assert sorted(fill.astype(int).tolist()) == sorted(plain)
    firsts = [rows.tolist().index(row) for row in range(len(fill))]
    assert firsts == sorted(firsts)


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
