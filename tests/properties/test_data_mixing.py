"""Properties of stream mixing that must hold for any layout of documents: coverage, order, and resuming anywhere."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.streams import WideTokens, mixing_dataset, streams_of

SEQ_LEN = 4
PROFILE = settings(max_examples=60, deadline=None, derandomize=True)

layouts = st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=6), min_size=1, max_size=5).filter(
    lambda layout: any(length for stream in layout for length in stream)
)
settings_of = st.fixed_dictionaries(
    {
        "batching_mode": st.sampled_from(["per_stream", "device_per_stream"]),
        "pick_mode": st.sampled_from(["weighted", "uniform", "round_robin"]),
        "num_streams_mixed": st.integers(1, 4),
        "batch_size": st.integers(1, 4),
        "max_group_cells": st.integers(1, 4),
        "pack": st.booleans(),
        "seed": st.integers(0, 3),
    }
)


def dataset(streams, *, rank=0, world_size=1, **kwargs):
    given = {"tokenizer": WideTokens(), "seq_len": SEQ_LEN, "repeat": False, **kwargs}
    return mixing_dataset(streams, rank=rank, world_size=world_size, **given)


def world(streams, world_size, **kwargs):
    return [dataset(streams, rank=rank, world_size=world_size, **kwargs) for rank in range(world_size)]


def tokens_read(batches):
    found: Counter[tuple[str, int]] = Counter()
    for batch in batches:
        stream = json.loads(batch["instability_meta_json"])["stream"]
        found.update((stream, token) for token in batch["targets"][batch["targets"] >= 0].tolist())
    return found


def all_tokens(streams, layout):
    by_name = {f"{'ab'[i % 2]}/s{i}.jsonl": sum(lengths) for i, lengths in enumerate(layout)}
    return Counter((s.relative_path, token) for s in streams for token in range(by_name[s.relative_path]))


def check_rows(batches, cells):
    """No group twice in a batch; collects the cell indices of each group in the order of reading."""
    for batch in batches:
        groups = [g for g in batch["group_ids"].tolist() if g >= 0]
        assert len(groups) == len(set(groups))
        for group, cell in zip(batch["group_ids"].tolist(), batch["cell_index"].tolist(), strict=True):
            if group >= 0:
                cells[group].append(cell)


@pytest.mark.parametrize("batching_mode", ["per_stream", "device_per_stream"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@settings(PROFILE, max_examples=25)
@given(layouts, settings_of)
def test_an_epoch_reads_every_token_once_over_all_ranks_and_groups_in_order(world_size, batching_mode, layout, kwargs):
    kwargs = dict(kwargs, batching_mode=batching_mode)
    with streams_of(layout) as streams:
        per_rank = [list(rank) for rank in world(streams, world_size, **kwargs)]
        batches = [batch for rank in per_rank for batch in rank]
        assert tokens_read(batches) == all_tokens(streams, layout)
        cells: dict[int, list[int]] = defaultdict(list)
        check_rows(batches, cells)
        assert all(order == list(range(len(order))) for order in cells.values())
        groups = [{group for batch in rank for group in batch["group_ids"].tolist()} - {-1} for rank in per_rank]
        assert sum(map(len, groups)) == len(cells)  # a group is on one rank
        last = {
            g: c
            for b in batches
            for g, c in zip(b["group_ids"][b["is_last"]], b["cell_index"][b["is_last"]], strict=True)
        }
        assert last == {group: order[-1] for group, order in cells.items()}
        if kwargs["batching_mode"] == "per_stream":
            assert len({len(rank) for rank in per_rank}) == 1
            for together in zip(*per_rank, strict=True):
                assert len({json.loads(batch["instability_meta_json"])["stream"] for batch in together}) == 1


@PROFILE
@given(layouts, settings_of)
def test_inputs_are_the_tokens_before_the_targets(layout, kwargs):
    with streams_of(layout) as streams:
        firsts = {
            f"{'ab'[i % 2]}/s{i}.jsonl": set(itertools.accumulate([0, *lengths])) for i, lengths in enumerate(layout)
        }
        for batch in dataset(streams, **kwargs):
            begins = firsts[json.loads(batch["instability_meta_json"])["stream"]]
            for row, (inputs, targets) in enumerate(
                zip(batch["tokens"].tolist(), batch["targets"].tolist(), strict=True)
            ):
                for at, (before, target) in enumerate(zip(inputs, targets, strict=True)):
                    if target == -100:
                        assert before == 0
                        continue
                    assert before == (1999 if target in begins else target - 1)
                    if "resets" in batch:
                        assert batch["resets"][row, at] == (target in begins and at > 0)
            assert ("resets" in batch) == kwargs["pack"]


def same(a, b):
    return a.keys() == b.keys() and all(
        np.array_equal(a[key], b[key]) if isinstance(a[key], np.ndarray) else a[key] == b[key] for key in a
    )


@PROFILE
@given(layouts, settings_of, st.integers(1, 3), st.integers(0, 40))
def test_resuming_anywhere_gives_the_samples_of_an_uninterrupted_run(layout, kwargs, world_size, stop):
    with streams_of(layout) as streams:
        for rank in range(world_size):
            whole = dataset(streams, rank=rank, world_size=world_size, repeat=True, **kwargs)
            for _ in range(stop):
                next(whole)
            state = json.loads(json.dumps(whole.state_dict()))
            expected = [next(whole) for _ in range(25)]
            resumed = dataset(streams, rank=rank, world_size=world_size, repeat=True, **kwargs)
            resumed.load_state_dict(state)
            assert resumed.state_dict() == state
            assert all(same(next(resumed), batch) for batch in expected)


@PROFILE
@given(
    layouts, settings_of, st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), min_size=1, max_size=3), st.data()
)
def test_resuming_on_other_worlds_loses_and_repeats_nothing(layout, kwargs, worlds, data):
    with streams_of(layout) as streams:
        read: list[dict[str, Any]] = []
        cells: dict[int, list[int]] = defaultdict(list)
        states: list[dict[str, Any]] | None = None
        for world_size, batches in [*worlds, (data.draw(st.integers(1, 4)), 10_000)]:
            now = dict(kwargs, num_streams_mixed=data.draw(st.integers(1, 4)), batch_size=data.draw(st.integers(1, 4)))
            ranks = world(streams, world_size, **now)
            part = []
            for rank in ranks:
                if states is not None:
                    rank.load_state_dict(states)
                part += list(itertools.islice(rank, batches))
            check_rows(part, cells)
            read += part
            states = [json.loads(json.dumps(rank.state_dict())) for rank in ranks]
        assert tokens_read(read) == all_tokens(streams, layout)
        assert all(order == list(range(len(order))) for order in cells.values())


@PROFILE
@given(layouts, settings_of, st.integers(2, 4), st.integers(1, 4), st.integers(0, 30))
def test_resharding_ranks_that_stand_in_different_epochs_keeps_each_epoch_whole(layout, kwargs, before, after, stop):
    """Ranks that pick alone drift apart: one may be in a later epoch than another when the run is cut."""
    kwargs = dict(kwargs, batching_mode="device_per_stream", repeat=True)
    with streams_of(layout) as streams:
        read: dict[int, list[dict[str, Any]]] = defaultdict(list)
        ranks = world(streams, before, **kwargs)
        for rank in ranks:
            for batch in itertools.islice(rank, stop):
                read[json.loads(batch["instability_meta_json"])["epoch"]].append(batch)
        states = [rank.state_dict() for rank in ranks]
        last = max(state["epoch"] for state in states)
        for rank in world(streams, after, **kwargs):
            rank.load_state_dict(states)
            for batch in itertools.islice(rank, 2000):
                meta = json.loads(batch["instability_meta_json"])
                if meta["epoch"] > last or meta["group_ids"] == [-1]:
                    break
                read[meta["epoch"]].append(batch)
        for epoch in range(last + 1):
            assert tokens_read(read[epoch]) == all_tokens(streams, layout), epoch


@PROFILE
@given(layouts, settings_of, st.integers(1, 3), st.integers(0, 12), st.integers(0, 12))
def test_a_resharded_run_resumes_exactly_too(layout, kwargs, world_size, first, second):
    """The chapters of a run that was cut anew are part of its state."""
    with streams_of(layout) as streams:
        states = []
        for rank in world(streams, world_size + 1, repeat=True, **kwargs):
            list(itertools.islice(rank, first))
            states.append(rank.state_dict())
        for whole, again in zip(*(world(streams, world_size, repeat=True, **kwargs) for _ in range(2)), strict=True):
            whole.load_state_dict(states)
            list(itertools.islice(whole, second))
            again.load_state_dict(json.loads(json.dumps(whole.state_dict())))
            assert all(same(next(again), next(whole)) for _ in range(20))
