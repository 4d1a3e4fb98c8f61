"""Properties of the deal of slices to ranks: level for any sizes, the same as ever for old states, cheap after reshards."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.epochs import EpochOrder, QueueKey, ReshardPoint
from trainer.data.reader import cut_slices

MAX_GROUP_CELLS = 64
IMPROBABLE = 1e-9


def slices_of(cells: int, world_size: int) -> np.ndarray:
    """Cells of each slice of a stream that is one document."""
    full, rest = divmod(cells, MAX_GROUP_CELLS)
    groups = np.array([MAX_GROUP_CELLS] * full + [rest] * (rest > 0), dtype=np.int64)
    ends = np.concatenate([[0], np.cumsum(groups)])
    found: np.ndarray = np.diff(ends[cut_slices(groups, world_size)])
    return found


def cells_by_rank(sizes: np.ndarray, world_size: int, key: QueueKey) -> tuple[np.ndarray, float]:
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
def test_ranks_are_as_level_as_chance_allows_for_any_sizes(sizes: list[int], world_size: int, seed: int) -> None:
    key = QueueKey("s", seed, len(sizes), shared=True)
    loads, bound = cells_by_rank(np.array(sizes), world_size, key)
    assert loads.sum() == sum(sizes)
    assert np.abs(loads - loads.mean()).max() <= bound + 1e-9


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 300), st.integers(1, 400), st.integers(1, 64), st.integers(0, 99))
def test_ranks_differ_by_at_most_one_stream_if_all_are_alike(
    size: int, num_streams: int, world_size: int, seed: int
) -> None:
    key = QueueKey("s", seed, num_streams, shared=True)
    loads, _ = cells_by_rank(np.full(num_streams, size), world_size, key)
    assert loads.max() - loads.min() <= size


@pytest.mark.parametrize(
    ("sizes", "world_size", "worst"),
    [
        (np.full(1, 10**6), 64, 1.01),
        (np.full(200, 20), 2, 1.01),
        (np.full(200, 20), 64, 1.29),  # 4 streams at most, 3.1 on average
        (np.random.default_rng(0).integers(1, 56, 200), 2, 1.2),
        (np.random.default_rng(0).integers(1, 56, 200), 8, 1.5),
        (np.where(np.arange(1000) % 2, 2, 60), 2, 1.15),  # sizes that follow the order of names
        (np.random.default_rng(0).integers(1, 8, 50_000), 64, 1.1),
        (np.concatenate([[100_000], np.full(1000, 20)]), 64, 1.2),
    ],
)
def test_the_fullest_rank_of_a_corpus_is_near_the_average(sizes: np.ndarray, world_size: int, worst: float) -> None:
    for seed in range(5):
        loads, _ = cells_by_rank(sizes, world_size, QueueKey("s", seed, len(sizes), shared=True))
        assert loads.max() / loads.mean() <= worst, seed


def test_orders_after_many_reshards_cost_one_permutation_per_rank_and_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed anew for each rank of each point, they doubled with every point and grew eightfold with 8 ranks."""
    calls = []
    original = QueueKey.permutation
    monkeypatch.setattr(QueueKey, "permutation", lambda *args: calls.append(1) or original(*args))
    for shared in (True, False):
        key = QueueKey("s", 0, 100, shared)
        points: list[ReshardPoint] = []
        for number in range(10):
            calls.clear()
            order = EpochOrder(key, 0, points).of_rank(0)
            assert len(calls) <= sum(len(point["cursors"]) for point in points) + 1
            assert len(set(order)) == len(order) > 20
            # Cursors of ranks alone differ; those of a shared pool are one.
            cursors = [[3 if shared else 3 + rank % 2, [[order[0], 1]]] for rank in range(8 - number % 2)]
            points.append(ReshardPoint(batch_size=2, batch_size_by_modality={}, cursors=cursors))
