"""The mixing dataset: its metrics against a slow reference, its modes, and what it refuses."""

from __future__ import annotations

import itertools
import json

import pytest

from trainer.errors import UserError

LAYOUT = {"a": [[40, 9, 3], [30, 30]], "b": [[8] * 9], "c": [[100], [5, 6, 7]]}
PREFIX = "stream_mixing/active/"


def meta(batch):
    return json.loads(str(batch["instability_meta_json"]))


def test_without_data_left_no_reader_is_active(write_streams, mixing):
    dataset = mixing(write_streams({"a": [[9, 4]], "b": [[4], [4]]}), repeat=False)
    assert list(dataset)
    expected = {PREFIX + "modalities/a": 0.0, PREFIX + "modalities/b": 0.0, PREFIX + "picks": 5.0}
    expected |= {"stream_mixing/refill/exhaust_events": 3.0}
    assert dataset.drain_step_metrics() == expected


def test_ranks_pick_alike_with_one_pool_and_each_for_itself_with_its_own(write_streams, mixing):
    """Two streams of equal slices, picked uniformly: but for which stream is in which slot, only the draws differ."""
    streams = write_streams({"a": [[4] * 200], "b": [[4] * 200]})

    def changes(rank, batching_mode):
        how = {"pick_mode": "uniform", "world_size": 4, "batch_size": 1}
        dataset = mixing(streams, batching_mode=batching_mode, rank=rank, **how)
        picked = [meta(next(dataset))["stream"] for _ in range(24)]
        return tuple(before != after for before, after in itertools.pairwise(picked))

    assert len({changes(rank, "per_stream") for rank in range(4)}) == 1
    assert len({changes(rank, "device_per_stream") for rank in range(4)}) == 4


def test_batch_sizes_differ_by_modality_and_keys_have_the_promised_types(write_streams, mixing):
    streams = write_streams({"a": [[4] * 20], "b": [[4] * 20]})
    for batch in (next(mixing(streams, batch_size_by_modality={"b": 5}, seed=s)) for s in range(8)):
        rows = 5 if batch["dataset_segments"][0] == "b" else 2
        assert batch["dataset_labels"] == ["source"] * rows
        for dtype, shape, keys in (
            ("int64", (rows, 4), ("tokens", "targets")),
            ("int8", (rows, 4), ("token_types",)),
            ("int64", (rows,), ("group_ids", "cell_index", "pack_num_samples")),
            ("bool", (rows,), ("is_last",)),
        ):
            assert {(batch[key].dtype.name, batch[key].shape) for key in keys} <= {(dtype, shape)}


def test_a_rank_whose_slice_has_ended_yields_a_masked_row(write_streams, mixing):
    streams = write_streams({"a": [[400]]})
    ranks = [list(mixing(streams, rank=r, world_size=2, repeat=False, max_group_cells=1000)) for r in (0, 1)]
    idle, busy = sorted(ranks, key=lambda rank: (rank[0]["targets"] >= 0).sum())
    assert len(idle) == len(busy) == 100
    assert all(b["group_ids"].tolist() == [-1] and (b["targets"] == -100).all() for b in idle)
    assert all((b["token_types"] == -1).all() and b["pack_num_samples"].tolist() == [0] for b in idle)
    alone = {"world_size": 3, "batching_mode": "device_per_stream", "max_group_cells": 1000}
    assert sorted(next(mixing(streams, rank=r, **alone))["group_ids"][0] == -1 for r in range(3)) == [0, 1, 1]
    assert sorted(len(list(mixing(streams, rank=r, **alone, repeat=False))) for r in range(3)) == [0, 0, 100]


def test_states_that_do_not_fit_are_refused_naming_what_differs(write_streams, mixing):
    streams = write_streams(LAYOUT)
    state, alone = mixing(streams).state_dict(), {"batching_mode": "device_per_stream", "world_size": 2}
    states = [mixing(streams, rank=r, **alone).state_dict() for r in (0, 1)]
    for dataset, wrong, message in (
        (mixing(streams, seed=5), state, "source source: the saved .* seed was 0 and is 5"),
        (mixing(streams, batching_mode="device_per_stream"), state, "batching_mode was"),
        (mixing(streams, name="other"), state, "namespace was 'source'"),
        (mixing(streams[1:]), state, "streams was '5 streams"),
        (mixing(streams, **alone), states[::-1], "these are not the states that all ranks"),
        (mixing(streams, **alone), [], "these are not the states that all ranks"),
        (mixing(streams, **alone), states[1], "that of data shard 1 of 2; give the states of all"),
    ):
        with pytest.raises(UserError, match=message):
            dataset.load_state_dict(wrong)


def test_a_list_of_states_on_the_same_world_gives_each_rank_its_own(write_streams, mixing):
    """Also where ranks have taken different numbers of batches, on which their picks depend."""
    streams = write_streams({"a": [[4] * 40, [4] * 40], "b": [[4] * 40]})
    alone = {"batching_mode": "device_per_stream", "world_size": 2, "pick_mode": "uniform", "num_streams_mixed": 3}
    ranks = [mixing(streams, rank=rank, **alone) for rank in (0, 1)]
    for rank, count in zip(ranks, (3, 8), strict=True):
        list(itertools.islice(rank, count))
    states = [rank.state_dict() for rank in ranks]
    for number, rank in enumerate(ranks):
        resumed = mixing(streams, rank=number, **alone)
        resumed.load_state_dict(states)
        assert resumed.state_dict() == states[number]
        assert [meta(next(resumed)) for _ in range(20)] == [meta(next(rank)) for _ in range(20)]


def test_a_smaller_pool_drops_readers_with_one_line_and_goes_on_with_them_first(write_streams, mixing):
    streams = write_streams(LAYOUT)
    dataset = mixing(streams, num_streams_mixed=4)
    next(dataset)
    active = [reader.stream.relative_path for reader in dataset._pool.readers]
    smaller = mixing(streams, num_streams_mixed=1)
    smaller.load_state_dict(dataset.state_dict())
    assert [epoch for epoch, _ in smaller.state_dict()["points"]] == [0]
    seen = dict.fromkeys(meta(next(smaller))["stream"] for _ in range(60))
    assert list(seen)[: len(active)] == active
    assert smaller.state_dict()["points"] == []  # reshard points go with their epoch


def test_what_cannot_be_meant_is_refused(write_streams, mixing):
    streams = write_streams({"a": [[4]]})
    for given, settings, message in (
        (streams, {"batch_size_by_modality": {"a": 0}}, "by_modality: Input should be .*, got 0; see"),
        (streams, {"holdout_fraction": 1.5}, "holdout_fraction"),
        (streams, {"split": "holdout", "holdout_fraction": 0.0}, "source source: no document is left"),
        ([], {}, "source source: has no streams; name its files"),
        ([*streams, *streams], {}, "twice"),
    ):
        with pytest.raises(UserError, match=message):
            next(mixing(given, **settings))


def test_a_rank_without_cells_does_not_hold_back_the_epoch_of_a_reshard(write_streams, mixing):
    streams = write_streams({"a": [[8]]})
    ranks = [mixing(streams, rank=r, world_size=2, batching_mode="device_per_stream") for r in (0, 1)]
    for dataset in ranks:
        for _ in range(11):
            next(dataset)
    alone = mixing(streams, batching_mode="device_per_stream")
    alone.load_state_dict([dataset.state_dict() for dataset in ranks])
    assert [epoch for epoch, _ in alone.state_dict()["points"]] == [5]
    assert meta(next(alone))["epoch"] == 5
