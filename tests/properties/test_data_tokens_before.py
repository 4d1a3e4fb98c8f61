"""`tokens_before` equals what the row's group really held before the cell, for any corpus, cut, packing, world and resume."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.streams import mixing_dataset
from trainer.data.blend import BlendDataset, BlendSource
from trainer.data.layout import Stream, discover_nested
from trainer.data.mixing import StreamMixingDataset
from trainer.data.tokenizer import BytesTokenizer
from trainer.data.weights import ConstantWeight
from trainer.errors import UserError

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


class Tokens(BytesTokenizer):
    """Wide enough for every id of a test."""

    vocab_size = 2000
    bos_id = 1999

    def __init__(self) -> None:
        super().__init__()
        self.token_type_table = None


def write(folder: str, layout: list[list[int]]) -> list[Stream]:
    """Streams in which every token has an id of its own."""
    ids = itertools.count()
    for number, lengths in enumerate(layout):
        path = Path(folder) / "a" / f"s{number}.jsonl"
        path.parent.mkdir(exist_ok=True)
        documents = [{"tokens": list(itertools.islice(ids, size))} for size in lengths]
        path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return discover_nested(folder)


def dataset(streams: list[Stream], *, name: str = "source", **kwargs: Any) -> StreamMixingDataset:
    return mixing_dataset(streams, name=name, tokenizer=Tokens(), **{"repeat": False, **kwargs})


class Oracle:
    """Remembers the inputs of every row that was read, group by group."""

    def __init__(self) -> None:
        self.inputs: dict[int, list[int]] = defaultdict(list)
        self.num_continued = 0

    def check(self, batch: Batch, n: int, *, pack: bool) -> None:
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

    def read(self, batch: Batch) -> None:
        for row, group in enumerate(batch["group_ids"].tolist()):
            is_target = batch["targets"][row] != -100
            self.inputs[group] += batch["tokens"][row][is_target].tolist()


def same(a: Batch, b: Batch) -> bool:
    return list(a) == list(b) and all(
        a[key].tobytes() == b[key].tobytes() and a[key].dtype == b[key].dtype
        if isinstance(a[key], np.ndarray)
        else a[key] == b[key]
        for key in a
    )


def without(batch: Batch) -> Batch:
    return {key: value for key, value in batch.items() if key not in ADDED}


@PROFILE
@given(
    layouts,
    settings_of,
    st.integers(1, 25),
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 12)), min_size=0, max_size=2),
    st.integers(1, 3),
)
def test_tokens_before_are_the_groups_own_in_any_world_and_after_any_resume(
    layout: list[list[int]], kwargs: dict[str, Any], n: int, worlds: list[tuple[int, int]], last_world: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        streams = write(folder, layout)
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


def test_the_property_above_sees_groups_that_continue() -> None:
    with tempfile.TemporaryDirectory() as folder:
        oracle = Oracle()
        for batch in dataset(write(folder, [[30, 7], [20]]), seq_len=4, max_group_cells=5, tokens_before=6):
            oracle.check(batch, 6, pack=False)
            oracle.read(batch)
        assert oracle.num_continued == 11  # of 5 + 3 and 2 and 5 cells, those that are no first ones


@PROFILE
@given(layouts, settings_of, st.integers(1, 4), st.integers(1, 3), st.integers(1, 12), st.integers(0, 15))
def test_a_blend_adds_them_on_the_steps_asked_for_and_changes_nothing_else(
    layout: list[list[int]], kwargs: dict[str, Any], every: int, micro_batches: int, n: int, stop: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        streams = write(folder, layout)

        def blend(**history: int) -> BlendDataset:
            sources = [
                BlendSource(name, dataset(streams, name=name, **kwargs), ConstantWeight(weight))
                for name, weight in (("x", 1.0), ("y", 2.0))
            ]
            return BlendDataset(sources, seed=kwargs["seed"], micro_batches=micro_batches, **history)

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


def test_every_batch_has_at_least_its_own_tokens_before() -> None:
    """A data set's own n and the steps' n: the larger one counts."""
    with tempfile.TemporaryDirectory() as folder:
        source = dataset(write(folder, [[40]]), seq_len=4, batch_size=1, tokens_before=3)
        blend = BlendDataset([BlendSource("x", source, ConstantWeight(1))], seed=0, history_every=2, history_tokens=8)
        assert [batch["tokens_before"].shape[1] for batch in itertools.islice(blend, 4)] == [3, 8, 3, 8]


def test_a_blend_in_a_blend_hands_the_request_on() -> None:
    with tempfile.TemporaryDirectory() as folder:
        inner = BlendDataset(
            [BlendSource("x", dataset(write(folder, [[40]]), seq_len=4, batch_size=1), ConstantWeight(1))], seed=0
        )
        outer = BlendDataset([BlendSource("in", inner, ConstantWeight(1))], seed=0, history_every=2, history_tokens=8)
        assert ["tokens_before" in batch for batch in itertools.islice(outer, 4)] == [False, True, False, True]


def test_a_source_of_ones_own_may_give_them_itself_or_not_at_all() -> None:
    own = [{"tokens": np.zeros((1, 2)), "tokens_before": np.ones((1, 4))}, {"tokens": np.zeros((1, 2))}]
    blend = BlendDataset([BlendSource("own", own, ConstantWeight(1))], seed=0, history_every=1, history_tokens=8)
    assert [batch.get("tokens_before", np.zeros(0)).size for batch in blend] == [4, 0]


def test_a_rank_without_rows_gets_the_columns_too() -> None:
    with tempfile.TemporaryDirectory() as folder:
        streams = write(folder, [[40]])
        kwargs: dict[str, Any] = {
            "seq_len": 4,
            "world_size": 2,
            "max_group_cells": 99,
            "pack": True,
            "tokens_before": 5,
        }
        batches = [batch for rank in (0, 1) for batch in dataset(streams, rank=rank, **kwargs)]
        idle = [batch for batch in batches if batch["group_ids"].tolist() == [-1]]
        assert idle
        for batch in idle:
            assert batch["tokens_before"].tolist() == [[0] * 5]
            assert batch["resets_before"].tolist() == [[False] * 5]


@pytest.mark.parametrize("wrong", [-1, 2.0, True, None])
def test_a_wrong_number_of_tokens_is_refused(wrong: Any) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.raises(UserError, match="tokens_before"):
        dataset(write(folder, [[4]]), seq_len=4, tokens_before=wrong)
