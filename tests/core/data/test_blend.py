"""Blending: shares follow the weights and their schedules, states resume exactly, and sources may be anything that iterates."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter

import numpy as np
import pytest
import torch

from trainer.data.blend import BlendDataset, BlendSource, UnreadSource
from trainer.data.pool import EXHAUST_EVENTS, PICKS, pool_metric_keys
from trainer.data.weights import ConstantWeight, ScheduledWeight
from trainer.errors import UserError
from trainer.options import MicroBatches

PREFIX = "stream_mixing/active/"
LAYOUT = {"a": [[40, 9, 3], [30, 30]], "b": [[8] * 9], "c": [[100], [5, 6, 7]]}


class Plain:
    """A user's own dataset: no state; ends after `size` batches."""

    def __init__(self, size=10**9):
        self.size = size

    def __iter__(self):
        for i in range(self.size):
            yield {"tokens": np.full((2, 3), i)}


def plain(weights, *, sizes=None, **kwargs):
    sources = [BlendSource(name, Plain((sizes or {}).get(name, 10**9)), weight) for name, weight in weights.items()]
    return BlendDataset(sources, **{"seed": 0, **kwargs})


def names(blend, count):
    return [next(blend)["dataset_labels"][0] for _ in range(count)]


def test_sources_that_end_are_left_out_and_the_last_one_ends_the_blend(caplog):
    blend = plain({"a": ConstantWeight(1), "b": ConstantWeight(1)}, sizes={"a": 5, "b": 30})
    order = [batch["dataset_labels"][0] for batch in blend]
    assert Counter(order) == {"a": 5, "b": 30}
    assert blend.drain_step_metrics() == {
        "blend/share_error/a": (5 - 35 / 2, 35),
        "blend/share_error/b": (30 - 35 / 2, 35),
        "blend/ended_sources": 2.0,
    }
    assert list(blend) == list(blend) == []
    BlendDataset([BlendSource("in", blend, ConstantWeight(1))], seed=0)  # whose metrics are not of the outer one
    assert caplog.messages == []
    packed = [{"targets": torch.zeros(2, 3), "segment_ids": torch.tensor([[0, 0, 1], [2, 3, 3]])}]
    assert next(BlendDataset([BlendSource("a", packed, ConstantWeight(1))], seed=0))["dataset_labels"] == ("a",) * 4


@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize("weight", [ConstantWeight(1), ScheduledWeight("step", {0: 1.0, 30: 0.0})])
def test_an_ended_source_has_no_readers_and_no_gauges(write_streams, mixing, is_resumed, weight):
    """Also if it is never asked again, since its weight has become zero, and although it has reported gauges before."""
    streams = write_streams({"a": [[8] * 4], "b": [[8] * 400]})

    def fresh():
        a, b = (mixing([s for s in streams if s.modality == name], name=name, repeat=False) for name in "ab")
        return BlendDataset([BlendSource("a", a, weight), BlendSource("b", b, ConstantWeight(1))], seed=0)

    blend = fresh()
    for _ in itertools.islice(blend, 30):
        blend.drain_step_metrics()
    if is_resumed:
        state = blend.state_dict()
        blend = fresh()
        blend.load_state_dict(state)
    for _ in range(20):
        next(blend)
        metrics = blend.drain_step_metrics()
    assert (metrics[PREFIX + "modalities/a"], metrics[PREFIX + "modalities/b"]) == (0.0, 1.0)
    assert metrics[PREFIX + "remaining_min"] == metrics[PREFIX + "remaining_max"] > 300


def test_all_weights_zero_is_refused_at_its_batch():
    blend = plain({"a": ScheduledWeight("step", {0: 1.0, 7: 0.0, 9: 1.0}), "b": ConstantWeight(0)})
    assert names(blend, 7) == ["a"] * 7
    with pytest.raises(UserError, match=r"at batch 7 every source .* weight zero \(a, b\)"):
        next(blend)


def test_what_stays_at_zero_for_ever_does_not_keep_a_finite_blend_going():
    off = ScheduledWeight("step", {0: 1.0, 3: 0.0})
    blend = plain({"a": ConstantWeight(1), "b": off}, sizes={"a": 20})
    assert Counter(batch["dataset_labels"][0] for batch in blend)["a"] == 20


@pytest.mark.parametrize("at", [700, 1100])
def test_weights_that_change_at_a_resume_are_as_if_they_had_been_a_schedule(write_streams, mixing, at):
    streams = write_streams(LAYOUT)

    def weighted(x, y, m=1):
        sources = [BlendSource(name, mixing(streams, name=name), weight) for name, weight in (("x", x), ("y", y))]
        return BlendDataset(sources, seed=0, per_source=True, micro_batches=MicroBatches.constant(m))

    planned = weighted(ScheduledWeight("step", {0: 1, at: 0}), ScheduledWeight("step", {0: 3, at: 2}))
    gone = ScheduledWeight("step", {0: 1, at + 1: 0}, unit="step")  # of larger steps than those before
    before, after = weighted(ConstantWeight(1), ConstantWeight(3)), weighted(gone, ConstantWeight(2), 4)
    assert names(before, at) == names(planned, at)
    assert before.drain_step_metrics()["blend/weight/x"] == 0.25
    after.load_state_dict(before.state_dict())
    assert names(after, 500) == names(planned, 500)
    assert after.state_dict() | {"plan": 0} == planned.state_dict() | {"plan": 0}
    for metrics in (after.drain_step_metrics(), planned.drain_step_metrics()):
        assert (metrics["blend/weight/x"], metrics["blend/weight/y"]) == (0.0, 1.0)


def test_a_blend_without_or_with_equal_names_is_refused():
    with pytest.raises(UserError, match="at least one source"):
        BlendDataset([], seed=0)
    with pytest.raises(UserError, match="two sources are called 'a'"):
        BlendDataset([BlendSource("a", Plain(), ConstantWeight(1))] * 2, seed=0)


def blended(streams, mixing, *, weight=1.0, seed=0, **kwargs):
    x, y = (mixing(own, name=name, **kwargs) for name, own in (("x", streams[:2]), ("y", streams[2:])))
    moving = ScheduledWeight("linear", {0: 1.0, 50: 3.0})
    return BlendDataset([BlendSource("x", x, ConstantWeight(weight)), BlendSource("y", y, moving)], seed=seed)


@pytest.mark.parametrize(("stop", "repeat"), [(0, True), (7, True), (90, True), (7, False), (90, False)])
def test_resuming_a_blend_gives_the_samples_and_the_shares_of_an_uninterrupted_run(write_streams, mixing, stop, repeat):
    streams = write_streams(LAYOUT)
    whole, resumed = (blended(streams, mixing, repeat=repeat) for _ in range(2))
    list(itertools.islice(whole, stop))
    state = json.loads(json.dumps(whole.state_dict()))
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    # Every pool's last pick is part of the metrics again; events were drained with the run that stopped.
    before, after = whole.drain_step_metrics(), resumed.drain_step_metrics()
    counters = before.keys() & {EXHAUST_EVENTS, PICKS}
    assert after == {**before, **dict.fromkeys(counters, 0.0)}
    for a, b in zip(*(itertools.islice(each, 30) for each in (whole, resumed)), strict=True):
        assert str(a["instability_meta_json"]) == str(b["instability_meta_json"])
        assert (a["tokens"] == b["tokens"]).all()
    assert whole.drain_step_metrics() == resumed.drain_step_metrics()
    assert whole.state_dict() == resumed.state_dict()


def test_weights_may_change_and_sources_may_be_added_at_a_restart(write_streams, mixing):
    streams = write_streams(LAYOUT)
    blend = blended(streams, mixing)
    list(itertools.islice(blend, 9))
    added = BlendSource("z", mixing(streams, name="z"), ConstantWeight(1))
    grown = BlendDataset([added, *blended(streams, mixing, weight=5.0).sources], seed=0)
    grown.load_state_dict(blend.state_dict())
    assert grown.state_dict()["sources"][1:] == blend.state_dict()["sources"]
    assert grown.state_dict()["counts"][0] == 0
    with pytest.raises(UserError, match="was made with 0, this run has 3"):
        blended(streams, mixing, seed=3).load_state_dict(blend.state_dict())


def drawn(blend, name, count):
    """The next batches of one source; no time of reading is negative."""
    found = []
    while len(found) < count:
        batch, metrics = next(blend), blend.drain_step_metrics()
        assert all(value >= 0 for key, value in metrics.items() if key.startswith("time/"))
        found += [batch["tokens"].tolist()] * (batch["dataset_labels"][0] == name)
    return found


@pytest.mark.parametrize("first", [1, 2])
def test_a_source_of_weight_0_keeps_its_place_over_worlds_of_any_size(write_streams, mixing, first):
    streams = write_streams(LAYOUT)

    def world(size, *, is_off=False):
        for rank in range(size):
            part = UnreadSource() if is_off else mixing(streams, rank=rank, world_size=size)
            yield BlendDataset(
                [
                    BlendSource("a", part, ConstantWeight(0 if is_off else 1)),
                    BlendSource("b", mixing(streams, name="b", rank=rank, world_size=size), ConstantWeight(1)),
                ],
                seed=0,
                times=True,
            )

    def moved(states, ranks):
        for rank, blend in enumerate(ranks := list(ranks)):
            blend.load_state_dict(states[rank] if len(states) == len(ranks) else states)
        return ranks

    begun = list(world(first))
    for blend in begun:
        list(itertools.islice(blend, 12))
    states = [each.state_dict() for each in begun]
    direct = moved(states, world(3))
    for size in (3, 1, 3):
        states = [json.loads(json.dumps(each.state_dict())) for each in moved(states, world(size, is_off=True))]
    back = moved(states, world(3))
    assert [drawn(blend, "source", 10) for blend in back] == [drawn(blend, "source", 10) for blend in direct]


def test_a_source_without_state_does_not_resume_and_one_with_it_gets_a_list_on_other_ranks():
    blend = plain({"a": ConstantWeight(1)})
    fresh = blend.state_dict()
    next(blend)
    assert blend.state_dict()["sources"] == [None]
    plain({"a": ConstantWeight(1)}).load_state_dict(fresh)
    with pytest.raises(UserError, match="a: was read before the checkpoint, and cannot be resumed"):
        plain({"a": ConstantWeight(1)}).load_state_dict(blend.state_dict())
    off = BlendDataset([BlendSource("a", UnreadSource(), ConstantWeight(0))], seed=0)
    off.load_state_dict({**blend.state_dict(), "sources": [[7]]})
    own, state, given = Plain(), off.state_dict(), []
    assert state["sources"] == [[7]]  # a list is not taken for the states of all ranks
    own.load_state_dict = own.is_ended = given.append  # the latter is nothing that a source needs
    off.load_state_dict([state])  # of a world of one rank, now of several
    for saved in (state, [state], [state] * 2, off.state_dict()):
        BlendDataset([BlendSource("a", own, ConstantWeight(1))], seed=0).load_state_dict(saved)
    assert given == [[7], [[7]], [[7], [7]], [[7]]]


@pytest.mark.parametrize("value", [-1.0, math.nan, 1e300, True, "3"])
def test_weights_that_are_no_weights_are_refused(value):
    with pytest.raises(UserError, match="points"):
        ConstantWeight(value)
    with pytest.raises(UserError, match="scale"):
        ScheduledWeight("linear", {0: 1.0}, scale=value)


def test_schedules_that_say_nothing_are_refused():
    for kind, points, unit, message in (
        ("linear", {}, "batch", "at least 1 item"),
        ("linear", {-1: 1.0}, "batch", "greater than or equal to 0"),
        ("cubic", {0: 1.0}, "batch", "'linear' or 'step'"),
        ("step", {0: 1.0}, "epoch", "'batch' or 'step'"),
    ):
        with pytest.raises(UserError, match=message):
            ScheduledWeight(kind, points, unit=unit)


KEYS = pool_metric_keys(["a", "b"])
EVENTS = {EXHAUST_EVENTS, PICKS}
SUMS = {PREFIX + "modalities/a", PREFIX + "modalities/b", *EVENTS}


class Reporting:
    """A source that reports under every key how many batches it has given."""

    metric_keys = KEYS
    given = 0

    def __iter__(self):
        while True:
            self.given += 1
            yield {"tokens": np.zeros((1, 1))}

    def drain_step_metrics(self):
        return dict.fromkeys(KEYS, self.given)


def plain_reduction(key, values):
    """The operation that a key's name promises."""
    if key in SUMS:
        return sum(values)
    return min(values) if key.endswith("_min") else max(values)


def test_a_blend_merges_what_its_sources_reported_last_and_counts_events_once():
    sources = [Reporting() for _ in range(3)]
    blend = BlendDataset([BlendSource(f"s{i}", each, ConstantWeight(1)) for i, each in enumerate(sources)], seed=0)
    before = [0, 0, 0]
    for batches in (1, 2, 1, 7, 1, 2, 1):
        names(blend, batches)
        now = [source.given for source in sources]
        events = [new if new > old else 0 for old, new in zip(before, now, strict=True)]
        gauges = [given for given in now if given]
        expected = {key: plain_reduction(key, events if key in EVENTS else gauges) for key in KEYS}
        assert expected.items() <= blend.drain_step_metrics().items()
        before = now
