"""Properties of stream mixing that must hold for any layout of documents: coverage, order, and resuming anywhere."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.properties.test_full_rows import same
from tests.support.streams import WideTokens, mixing_dataset, streams_of

PROFILE = settings(max_examples=40, deadline=None, derandomize=True)

layouts = st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=6), min_size=1, max_size=5).filter(
    lambda layout: any(length for stream in layout for length in stream)
)
settings_of = st.fixed_dictionaries(
    {
        "batching_mode": st.sampled_from(["per_stream", "device_per_stream"]),
        "pick_mode": st.sampled_from(["weighted", "uniform", "round_robin"]),
        "num_streams_mixed": st.integers(1, 4),
        "batch_size": st.integers(1, 4),
        "seq_len": st.integers(1, 5),
        "max_group_cells": st.integers(0, 4),
        "seed": st.integers(0, 3),
    }
)


def dataset(streams, *, rank=0, world_size=1, **kwargs):
    given = {"tokenizer": WideTokens(), "repeat": False, **kwargs}
    return mixing_dataset(streams, rank=rank, world_size=world_size, **given)


def meta(batch):
    return json.loads(str(batch["instability_meta_json"]))


def state_of(part):
    """Its state, as a checkpoint holds it."""
    return json.loads(json.dumps(part.state_dict()))


def world(streams, world_size, **kwargs):
    return [dataset(streams, rank=rank, world_size=world_size, **kwargs) for rank in range(world_size)]


def tokens_read(batches):
    return Counter(
        (meta(batch)["stream"], token)
        for batch in batches
        for token in batch["targets"][batch["targets"] >= 0].tolist()
    )


def all_tokens(layout):
    sizes = {f"{'ab'[i % 2]}/s{i}.jsonl": sum(lengths) for i, lengths in enumerate(layout)}
    return Counter((name, token) for name, size in sizes.items() for token in range(size))


def check_rows(batches, cells):
    """No group twice in a batch; collects the cell indices of each group in the order of reading."""
    for batch in batches:
        groups = [g for g in batch["group_ids"].tolist() if g >= 0]
        assert len(groups) == len(set(groups))
        for group, cell in zip(batch["group_ids"].tolist(), batch["cell_index"].tolist(), strict=True):
            if group >= 0:
                cells[group].append(cell)


@pytest.mark.parametrize("batching_mode", ["per_stream", "device_per_stream"])
@pytest.mark.parametrize("world_size", [1, 3, 8])
@settings(PROFILE, max_examples=20)
@given(layouts, settings_of)
def test_an_epoch_reads_every_token_once_over_all_ranks_and_groups_in_order(world_size, batching_mode, layout, kwargs):
    kwargs = dict(kwargs, batching_mode=batching_mode)
    with streams_of(layout) as streams:
        per_rank = [list(rank) for rank in world(streams, world_size, **kwargs)]
        batches = [batch for rank in per_rank for batch in rank]
        assert tokens_read(batches) == all_tokens(layout)
        cells, last = defaultdict(list), {}
        check_rows(batches, cells)
        assert all(order == list(range(len(order))) for order in cells.values())
        groups = [{group for batch in rank for group in batch["group_ids"].tolist()} - {-1} for rank in per_rank]
        assert sum(map(len, groups)) == len(cells)  # a group is on one rank
        for b in batches:
            last |= zip(b["group_ids"][b["is_last"]], b["cell_index"][b["is_last"]], strict=True)
        assert last == {group: order[-1] for group, order in cells.items()}
        if batching_mode == "per_stream":
            for together in zip(*per_rank, strict=True):
                assert len({meta(batch)["stream"] for batch in together}) == 1


@PROFILE
@given(layouts, settings_of)
def test_inputs_are_the_tokens_before_the_targets(layout, kwargs):
    begins = {f"{'ab'[i % 2]}/s{i}.jsonl": set(itertools.accumulate([0, *each])) for i, each in enumerate(layout)}
    with streams_of(layout) as streams:
        for batch in dataset(streams, **kwargs):
            begins_at = np.isin(batch["targets"], list(begins[meta(batch)["stream"]]))
            is_target = batch["targets"] != -100
            expected = np.where(begins_at, 1999, batch["targets"] - 1)
            assert (batch["tokens"] == np.where(is_target, expected, 0)).all()


@PROFILE
@given(layouts, settings_of, st.integers(1, 3), st.integers(0, 40), st.booleans(), st.integers(0, 12))
def test_resuming_anywhere_gives_the_samples_of_an_uninterrupted_run(
    layout, kwargs, world_size, stop, is_resharded, first
):
    """Also if the run was cut anew before: its points are part of its state."""
    with streams_of(layout) as streams:
        before = world(streams, world_size + 1, repeat=True, **kwargs)
        for rank in before:
            list(itertools.islice(rank, first))
        states = [rank.state_dict() for rank in before]
        for whole, resumed in zip(*(world(streams, world_size, repeat=True, **kwargs) for _ in range(2)), strict=True):
            if is_resharded:
                whole.load_state_dict(states)
            list(itertools.islice(whole, stop))
            resumed.load_state_dict(state := state_of(whole))
            assert resumed.state_dict() == state
            assert all(same(next(resumed)) == same(next(whole)) for _ in range(20))


@PROFILE
@given(
    layouts, settings_of, st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), min_size=1, max_size=3), st.data()
)
def test_resuming_on_other_worlds_loses_and_repeats_nothing(layout, kwargs, worlds, data):
    with streams_of(layout) as streams:
        read, cells, states = [], defaultdict(list), None
        for world_size, batches in [*worlds, (data.draw(st.integers(1, 4)), 10_000)]:
            now = dict(kwargs, num_streams_mixed=data.draw(st.integers(1, 4)), batch_size=data.draw(st.integers(1, 4)))
            ranks, part = world(streams, world_size, **now), []
            for rank in ranks:
                if states is not None:
                    rank.load_state_dict(states)
                part += itertools.islice(rank, batches)
            check_rows(part, cells)
            read += part
            states = [state_of(rank) for rank in ranks]
        assert tokens_read(read) == all_tokens(layout)
        assert all(order == list(range(len(order))) for order in cells.values())


@PROFILE
@given(layouts, settings_of, st.integers(2, 4), st.integers(1, 4), st.integers(0, 30))
def test_resharding_ranks_that_stand_in_different_epochs_keeps_each_epoch_whole(layout, kwargs, before, after, stop):
    """Ranks that pick alone drift apart: one may be in a later epoch than another when the run is cut."""
    kwargs = dict(kwargs, batching_mode="device_per_stream", repeat=True)
    with streams_of(layout) as streams:
        read, ranks = defaultdict(list), world(streams, before, **kwargs)
        for rank in ranks:
            for batch in itertools.islice(rank, stop):
                read[meta(batch)["epoch"]].append(batch)
        states = [rank.state_dict() for rank in ranks]
        last = max(state["epoch"] for state in states)
        for rank in world(streams, after, **kwargs):
            rank.load_state_dict(states)
            for batch in itertools.islice(rank, 2000):
                if meta(batch)["epoch"] > last or batch["group_ids"].tolist() == [-1]:
                    break
                read[meta(batch)["epoch"]].append(batch)
        for epoch in range(last + 1):
            assert tokens_read(read[epoch]) == all_tokens(layout), epoch
