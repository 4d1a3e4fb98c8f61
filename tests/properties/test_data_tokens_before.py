"""`tokens_before` equals what the row's group really held before the cell, for any corpus, cut, packing, world and resume."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.streams import WideTokens, mixing_dataset, streams_of
from trainer.data.blend import BlendDataset, BlendSource
from trainer.data.weights import ConstantWeight
from trainer.micro_batches import MicroBatches

PROFILE = settings(max_examples=50, deadline=None, derandomize=True)
layouts = st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=6), min_size=1, max_size=4).filter(
    lambda layout: any(length for stream in layout for length in stream)
)
settings_of = st.fixed_dictionaries(
    {
        "batching_mode": st.sampled_from(["per_stream", "device_per_stream"]),
        "num_streams_mixed": st.integers(1, 3),
        "batch_size": st.integers(1, 4),
        "seq_len": st.integers(1, 5),
        "max_group_cells": st.integers(1, 5),
        "pack": st.booleans(),
        "seed": st.integers(0, 3),
    }
)
Batch = dict[str, Any]
ADDED = {"tokens_before", "resets_before"}


def dataset(streams, *, name="source", **kwargs):
    return mixing_dataset(streams, name=name, **{"tokenizer": WideTokens(), "repeat": False, **kwargs})


class Oracle:
    """Remembers the inputs of every row that was read, group by group."""

    def __init__(self):
        self.inputs: dict[int, list[int]] = defaultdict(list)
        self.num_continued = 0

    def check(self, batch, n, *, pack):
        rows = len(batch["group_ids"])
        assert batch["tokens_before"].shape == (rows, n)
        assert batch["tokens_before"].dtype == np.int64
        assert ("resets_before" in batch) == pack
        if pack:
            assert batch["resets_before"].shape == (rows, n)
            assert batch["resets_before"].dtype == np.bool_
            assert not batch["resets_before"].any()  # a packed row is a group of one cell
        for row, group in enumerate(batch["group_ids"].tolist()):
            held = self.inputs[group][-n:] if group >= 0 else []
            assert batch["tokens_before"][row].tolist() == [0] * (n - len(held)) + held
            assert group < 0 or len(held) == min(n, batch["cell_index"][row] * batch["tokens"].shape[1])
            self.num_continued += bool(held)

    def read(self, batch):
        for row, group in enumerate(batch["group_ids"].tolist()):
            is_target = batch["targets"][row] != -100
            self.inputs[group] += batch["tokens"][row][is_target].tolist()


def same(a, b):
    return list(a) == list(b) and all(
        a[key].tobytes() == b[key].tobytes() and a[key].dtype == b[key].dtype
        if isinstance(a[key], np.ndarray)
        else a[key] == b[key]
        for key in a
    )


def without(batch):
    return {key: value for key, value in batch.items() if key not in ADDED}


@PROFILE
@given(
    layouts,
    settings_of,
    st.integers(1, 25),
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 12)), min_size=0, max_size=2),
    st.integers(1, 3),
)
def test_tokens_before_are_the_groups_own_in_any_world_and_after_any_resume(layout, kwargs, n, worlds, last_world):
    with streams_of(layout, "a", is_unique=True) as streams:
        oracle, states = Oracle(), None
        for world_size, batches in [*worlds, (last_world, 10_000)]:
            ranks = [
                dataset(streams, rank=rank, world_size=world_size, tokens_before=n, **kwargs)
                for rank in range(world_size)
            ]
            for rank in ranks:
                if states is not None:
                    rank.load_state_dict(states)
                for batch in itertools.islice(rank, batches):
                    oracle.check(batch, n, pack=kwargs["pack"])
                    oracle.read(batch)
            states = [json.loads(json.dumps(rank.state_dict())) for rank in ranks]
        assert sum(len(held) for group, held in oracle.inputs.items() if group >= 0) == sum(map(sum, layout))


@PROFILE
@given(layouts, settings_of, st.integers(1, 4), st.integers(1, 3), st.integers(1, 12), st.integers(0, 15))
def test_a_blend_adds_them_on_the_steps_asked_for_and_changes_nothing_else(
    layout, kwargs, every, micro_batches, n, stop
):
    with streams_of(layout, "a", is_unique=True) as streams:

        def blend(**history):
            sources = [
                BlendSource(name, dataset(streams, name=name, **kwargs), ConstantWeight(weight))
                for name, weight in (("x", 1.0), ("y", 2.0))
            ]
            return BlendDataset(
                sources, seed=kwargs["seed"], micro_batches=MicroBatches.constant(micro_batches), **history
            )

        plain, oracle = list(blend()), Oracle()
        assert not any(ADDED & batch.keys() for batch in plain)
        asked, resumed = (blend(history_every=every, history_tokens=n) for _ in range(2))
        for index, (batch, expected) in enumerate(zip(asked, plain, strict=True)):
            assert same(without(batch), expected)
            is_due = (index // micro_batches + 1) % every == 0
            assert ("tokens_before" in batch) == is_due
            if is_due:
                oracle.check(batch, n, pack=kwargs["pack"])
            oracle.read(batch)
            if index + 1 == stop:
                resumed.load_state_dict(json.loads(json.dumps(asked.state_dict())))
                tail = list(resumed)
        if stop and stop <= len(plain):
            whole = list(blend(history_every=every, history_tokens=n))
            assert len(tail) == len(whole) - stop
            assert all(same(a, b) for a, b in zip(tail, whole[stop:], strict=True))
