"""How many lanes full rows have: by documents, memory and the spread; and a plan of steps of several sizes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.core.properties.test_full_rows import Follower, blend, corpus
from tests.support.gloo import make_step
from tests.support.in_process import plan_of
from tests.support.runs import write_tiny_config
from tests.support.streams import WideTokens, options_of
from trainer.data.collate import Place
from trainer.data.lanes import (
    COUNTED_FILES,
    MOST_OPEN,
    LaneLimit,
    count_documents,
    document_limits,
    documents_drawn_from,
    num_sets,
    streams_open,
)
from trainer.data.loader import take_apart
from trainer.data.weights import ConstantWeight, ScheduledWeight
from trainer.distributed.strategy import Strategy
from trainer.metrics.aggregate import reduce_over_ranks
from trainer.metrics.gradient_noise import GradientNoiseScale
from trainer.metrics.noise_scale import ROWS_BEFORE
from trainer.model.encoder import build
from trainer.options import MicroBatches
from trainer.training import build as built
from trainer.training.build import LANE_SETS, plan_lanes, recorded_sets


@pytest.mark.parametrize(
    "forged", [{"offset": -2}, {"offset": 10**19}, {"offset": 0.5}, {"epoch": 0.5}, {"group_id": 5}, {}]
)
def test_a_place_that_is_none_is_refused_when_it_is_loaded(forged):
    """A saved state whose second lane is elsewhere, or reads what the first one reads."""
    with corpus({"x": [[9, 9, 9, 9], [9, 9]]}) as streams:
        saved = blend(streams)
        next(saved)
        state = saved.state_dict()
        blend(streams).load_state_dict(state)
        first, second = (Place(*place) for place in state["lanes"][:2])
        state["lanes"][1] = second._replace(**forged) if forged else first
        with pytest.raises(ValueError, match=r"is in no document|is on two lanes"):
            blend(streams).load_state_dict(state)


@pytest.mark.parametrize(
    ("m", "rows", "spread", "lanes", "groups"),
    [
        (8, 4, 16, math.inf, 128),
        (8, 4, 16, 511, 64),  # half the spread
        (8, 4, 16, 32, 8),  # a document's next row comes in the next step
        (8, 4, 16, 31, 4),  # and in the same: a divisor of m
        (6, 1, 16, 5, 3),
        (3, 1, 1, 2, 1),
        (2, 8, 5, math.inf, 10),
        (2, 8, 16, 0.2, 1),
    ],
)
def test_the_largest_number_of_groups_that_the_lanes_allow(m, rows, spread, lanes, groups):
    found, reason = num_sets(m, rows, spread, [LaneLimit(math.inf, "never"), LaneLimit(lanes, "few")])
    assert found == groups
    assert reason == ("few" if groups < spread * m else "")


def test_a_source_of_few_documents_limits_by_its_share():
    documents, shares = {"big": 4000.0, "small": 80.0}, {"big": 0.9, "small": 0.1}
    limits = document_limits(documents, shares, num_shards=2)
    assert [round(each.lanes) for each in limits] == [556, 100]  # 4 documents for each lane that the share gives
    assert "small has about 80 documents" in limits[1].reason
    assert documents_drawn_from(documents, shares) == pytest.approx(1 / (0.81 / 4000 + 0.01 / 80))


def test_documents_are_counted_in_few_files_and_estimated_by_bytes_in_many():
    options = {"namespace": "one", "seq_len": 4, "tokenizer": WideTokens()}
    few, many = [[3] * (1 + at % 5) for at in range(COUNTED_FILES)], [[6] * 3 for _ in range(50)]
    with corpus({"few": few, "many": many}) as streams:
        cut, read, _ = options_of(options)
        assert count_documents(streams["few"], cut, read) == sum(map(len, few))
        assert count_documents(streams["many"], cut, read) == pytest.approx(150, rel=0.05)
        assert streams_open(streams["many"], 7, read) == 7
        assert streams_open(streams["many"], 10**6, read) == 50 < MOST_OPEN
        assert streams_open(streams["few"], 1, read) == 4


def test_a_resume_on_a_smaller_machine_keeps_the_lanes_of_the_checkpoint(tmp_path, monkeypatch):
    full_rows = 'data.mixing={batching_mode="per_row", batch_size=4}', "ledger.capacity=0"
    planned = partial(plan_of, write_tiny_config(tmp_path), *full_rows)
    growing = 'train.micro_batches={schedule="step",points={0=1,9=2}}'
    plan, cpu = planned(growing), torch.device("cpu")
    before = plan_lanes(plan, 10, cpu)
    saved = {"data_shards": 1, "config": plan.config.model_dump(mode="json"), LANE_SETS: [*before.sets.items()]}
    monkeypatch.setattr(built, "memory_of", lambda device: 16 * 4 * 40)
    after = plan_lanes(plan, 10, cpu)
    assert [*after.sets.values()] == [1, 1]
    assert after.sets != before.sets
    words = "with m = 1, 1 set of 4 lanes per data shard: the next row of a document comes 1 step later; with m = 2, 1"
    assert after.words(4).startswith(words)
    assert plan_lanes(replace(plan, limits=(10**9, 10**4)), 10, cpu) == before  # those of all ranks count
    why = plan_lanes(replace(planned("distributed.shards=4"), limits=(64 * 10**6, 10**4)), 10**6, cpu).reason
    assert why == "a lane's state takes 4 MB, and a data shard has 1 MB for them"
    resumed = replace(plan, recorded_sets=recorded_sets(plan, json.loads(json.dumps(saved))))
    assert plan_lanes(resumed, 10, cpu).sets == before.sets
    for other in ("data.mixing.spread=3", "data.source.first.weight=1"):
        assert recorded_sets(planned(growing, other), saved) == recorded_sets(plan, {}) == {}


def test_the_largest_share_is_taken_at_one_time_of_weights_by_batch_and_by_step():
    weights = ScheduledWeight("linear", {0: 1, 400: 5}), ScheduledWeight("linear", {1: 1, 101: 5}, unit="step")
    assert built._largest_shares(weights, MicroBatches.constant(4)) == pytest.approx([0.5, 0.5], abs=2e-3)
    weights = ScheduledWeight("step", {0: 1, 300: 0}), ScheduledWeight("linear", {0: 9, 300: 0})
    assert built._largest_shares(weights, MicroBatches.constant(1))[0] > 0.9  # before the jump


def test_steps_of_lanes_have_phases():
    model = build(8, dim=8, num_layers=1)
    how = {"gns": GradientNoiseScale(model), "lane_sets": {2: 4}}
    step, zeros = make_step(model, Strategy(), **how), np.zeros((1, 3), np.int64)
    carry = {"group_ids": np.array([5]), "cell_index": np.array([3]), "is_last": np.array([False])}
    rows = {"tokens": torch.as_tensor(zeros), "targets": torch.as_tensor(zeros), **carry}
    step.accumulate(1, [take_apart(rows, None)] * 2)
    assert step.gns is not None
    before = step.gns.local_sums()[ROWS_BEFORE]
    assert (step.gns.stretches.spread, before) == (2, 3.0)


def test_where_a_plan_changes_m_documents_go_on_and_those_beyond_the_lanes_wait():
    """More groups, then fewer than documents under way; through a resume in the middle of the wait."""
    rng = np.random.default_rng(0)
    layout = [rng.integers(60, 80, size=8).tolist() for _ in range(3)]
    plan, groups, last = MicroBatches(((0, 1), (3, 4), (6, 2), (10, 1))), {1: 2, 2: 6, 4: 12}, dict[int, int]()
    with corpus({"one": layout}) as streams:
        how: dict[str, Any] = {"rows": 2, "groups": groups, "micro_batches": plan}
        reader, follower, waiting = blend(streams, **how), Follower((2, 4), True), []
        for number, batch in enumerate(reader):
            follower.take(batch)
            waiting.append(len(reader.waiting_groups))
            last |= dict.fromkeys(batch["end_ids"].tolist(), number)
            assert [*map(last.get, reader.waiting_groups)] == sorted(map(last.__getitem__, reader.waiting_groups))
            if number == 24:
                state = json.loads(json.dumps(reader.state_dict()))
                reader = blend(streams, **how)
                reader.load_state_dict(state)
                break
        for batch in reader:
            follower.take(batch)
    assert max(waiting) == 24 - 4  # as many as were read at once, less the lanes that are left
    assert set(follower.read.values()) == {1}
    assert len(follower.read) == sum(map(sum, layout))
    assert not follower.open


def test_a_source_that_is_off_after_a_resume_keeps_its_place_and_its_documents():
    layout = {"a": [[30] * 4] * 2, "b": [[30] * 4] * 2}
    with corpus(layout) as streams:
        on = blend(streams, rows=4, groups=2)
        follower = Follower((4, 4), True)
        for _ in range(4):
            follower.take(next(on))
        state = json.loads(json.dumps(on.state_dict()))
        off = blend({"a": streams["a"]}, rows=4, groups=2, off=["b"])
        off.load_state_dict(state)
        assert off.waiting_groups
        assert set(off.waiting_groups) <= set(on.groups_in_flight)
        for _ in range(6):
            follower.take(next(off))
        again = blend(streams, rows=4, groups=2)
        again.load_state_dict(json.loads(json.dumps(off.state_dict())))
        for batch in again:
            follower.take(batch)
    assert set(follower.read.values()) == {1}
    assert len(follower.read) == 2 * 240
    assert not follower.open


@pytest.mark.parametrize("num_shards", [1, 3])
def test_shares_after_a_resume_on_other_shards_are_those_of_all(num_shards):
    layout, weights = {"a": [[9] * 40] * 3, "b": [[5] * 60] * 3}, {"a": ConstantWeight(1.0), "b": ConstantWeight(3.0)}
    with corpus(layout) as streams:
        how: dict[str, Any] = {"weights": weights, "repeat": True, "per_source": True}
        shards = [blend(streams, shard=shard, num_shards=2, **how) for shard in range(2)]
        for shard, number in zip(shards, (5, 60), strict=True):
            for _ in range(number):
                next(shard)
        states = [json.loads(json.dumps(shard.state_dict())) for shard in shards]
        counts = np.sum([state["counts"] for state in states], axis=0)
        after = [blend(streams, shard=shard, num_shards=num_shards, **how) for shard in range(num_shards)]
        for shard in after:
            shard.load_state_dict(states)
        drained = [shard.drain_step_metrics() for shard in after]
    reduced = reduce_over_ranks(drained, [*drained[0]], device="cpu", world_size=1)
    assert [reduced[f"blend/share/{name}"] for name in layout] == pytest.approx((counts / counts.sum()).tolist())
