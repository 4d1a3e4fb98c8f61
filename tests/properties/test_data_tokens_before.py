"""`tokens_before` equals what the row's group really held before the cell, for any corpus, cut, world and resume."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.properties.test_data_mixing import PROFILE, dataset, layouts, same, settings_of, state_of, world
from tests.support.streams import streams_of
from trainer.data.blend import BlendDataset, BlendSource
from trainer.data.weights import ConstantWeight
from trainer.micro_batches import MicroBatches


def asking(rank, n):
    """Its batches, each with the n tokens before its cells."""
    with contextlib.suppress(StopIteration):
        while True:
            yield rank.next_with_tokens_before(n)


class Oracle:
    """Remembers the inputs of every row that was read, group by group."""

    def __init__(self):
        self.inputs: dict[int, list[int]] = defaultdict(list)

    def check(self, batch, n):
        rows = len(batch["group_ids"])
        assert batch["tokens_before"].shape == (rows, n)
        assert batch["tokens_before"].dtype == np.int64
        for row, group in enumerate(batch["group_ids"].tolist()):
            held = self.inputs[group][-n:] if group >= 0 else []
            assert batch["tokens_before"][row].tolist() == [0] * (n - len(held)) + held
            assert group < 0 or len(held) == min(n, batch["cell_index"][row] * batch["tokens"].shape[1])

    def read(self, batch):
        for row, group in enumerate(batch["group_ids"].tolist()):
            is_target = batch["targets"][row] != -100
            self.inputs[group] += batch["tokens"][row][is_target].tolist()


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
            ranks = world(streams, world_size, **kwargs)
            for rank in ranks:
                if states is not None:
                    rank.load_state_dict(states)
                for batch in itertools.islice(asking(rank, n), batches):
                    oracle.check(batch, n)
                    oracle.read(batch)
            states = [state_of(rank) for rank in ranks]
        assert sum(len(held) for group, held in oracle.inputs.items() if group >= 0) == sum(map(sum, layout))


@settings(PROFILE, max_examples=25)
@given(layouts, settings_of, st.integers(1, 4), st.integers(1, 3), st.integers(1, 12), st.integers(0, 15))
def test_a_blend_adds_them_on_the_steps_asked_for_and_changes_nothing_else(
    layout, kwargs, every, micro_batches, n, stop
):
    with streams_of(layout, "a", is_unique=True) as streams:

        def blend(**history):
            x, y = (dataset(streams, name=name, **kwargs) for name in "xy")
            sources = [BlendSource("x", x, ConstantWeight(1.0)), BlendSource("y", y, ConstantWeight(2.0))]
            count = MicroBatches.constant(micro_batches)
            return BlendDataset(sources, seed=kwargs["seed"], micro_batches=count, **history)

        plain, oracle, whole = list(blend()), Oracle(), []
        assert not any("tokens_before" in batch for batch in plain)
        asked, resumed = (blend(history_every=every, history_tokens=n) for _ in range(2))
        for index, (batch, expected) in enumerate(zip(asked, plain, strict=True)):
            whole.append(batch)
            assert same({key: value for key, value in batch.items() if key != "tokens_before"}, expected)
            is_due = (index // micro_batches + 1) % every == 0
            assert ("tokens_before" in batch) == is_due
            if is_due:
                oracle.check(batch, n)
            oracle.read(batch)
            if index + 1 == stop:
                resumed.load_state_dict(state_of(asked))
        if 0 < stop <= len(plain):
            assert all(same(a, b) for a, b in zip(resumed, whole[stop:], strict=True))
