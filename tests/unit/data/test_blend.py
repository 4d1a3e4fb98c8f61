"""Blending: shares follow the weights, states resume exactly, and sources may be anything that iterates."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from trainer.data.blend import BlendDataset, BlendSource, UnreadSource, without_sources
from trainer.data.layout import Stream
from trainer.data.mixing import StreamMixingDataset
from trainer.data.weights import ConstantWeight, ScheduledWeight, WeightSpec
from trainer.errors import UserError

Write = Callable[..., list[Stream]]
Make = Callable[..., StreamMixingDataset]
PREFIX = "stream_mixing/active/"
LAYOUT = {"a": [[40, 9, 3], [30, 30]], "b": [[8] * 9], "c": [[100], [5, 6, 7]]}


class Plain:
    """A user's own dataset: `tokens` and `targets` only, no state; ends after `size` batches."""

    def __init__(self, size: int = 10**9) -> None:
        self.size = size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for i in range(self.size):
            yield {"tokens": np.full((2, 3), i), "targets": np.full((2, 3), i)}


class Counting(Plain):
    """One with a state, which nobody looks at."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def plain(weights: dict[str, WeightSpec], *, sizes: dict[str, int] | None = None, **kwargs: Any) -> BlendDataset:
    sources = [BlendSource(name, Plain((sizes or {}).get(name, 10**9)), weight) for name, weight in weights.items()]
    return BlendDataset(sources, **{"seed": 0, **kwargs})


def names(blend: BlendDataset, count: int) -> list[str]:
    return [next(blend)["dataset_labels"][0] for _ in range(count)]


def test_sources_that_end_are_left_out_and_the_last_one_ends_the_blend() -> None:
    blend = plain({"a": ConstantWeight(1), "b": ConstantWeight(1)}, sizes={"a": 5, "b": 30})
    order = [batch["dataset_labels"][0] for batch in blend]
    assert Counter(order) == {"a": 5, "b": 30}
    assert blend.drain_step_metrics() == {
        "blend/max_share_error": pytest.approx(30 / 35 - 0.5),
        "blend/ended_sources": 2.0,
    }
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(blend)


@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize("has_reported", [False, True])
@pytest.mark.parametrize("weight", [ConstantWeight(1), ScheduledWeight("step", {0: 1.0, 30: 0.0})])
def test_an_ended_source_has_no_readers_and_no_gauges(
    write_streams: Write, mixing: Make, is_resumed: bool, has_reported: bool, weight: WeightSpec
) -> None:
    """Also if it is never asked again, since its weight has become zero, and if it has reported gauges before."""
    streams = write_streams({"a": [[8] * 4], "b": [[8] * 400]})

    def blended() -> BlendDataset:
        parts = zip("ab", (weight, ConstantWeight(1)), strict=True)
        return BlendDataset(
            [
                BlendSource(m, mixing([s for s in streams if s.modality == m], name=m, repeat=False), w)
                for m, w in parts
            ],
            seed=0,
        )

    blend = blended()
    for _ in itertools.islice(blend, 30):
        if has_reported:
            blend.drain_step_metrics()
    if is_resumed:
        state = blend.state_dict()
        blend = blended()
        blend.load_state_dict(state)
    for _ in range(20):
        next(blend)
        metrics = blend.drain_step_metrics()
    assert metrics[PREFIX + "modalities/a"] == 0.0
    assert metrics[PREFIX + "modalities/b"] == 1.0
    assert metrics[PREFIX + "remaining_min"] == metrics[PREFIX + "remaining_max"] > 300


def test_all_weights_zero_is_refused_at_its_batch() -> None:
    blend = plain({"a": ScheduledWeight("step", {0: 1.0, 7: 0.0, 9: 1.0}), "b": ConstantWeight(0)})
    assert names(blend, 7) == ["a"] * 7
    with pytest.raises(UserError, match=r"at batch 7 every source .* weight zero \(a, b\)"):
        next(blend)


def test_what_stays_at_zero_for_ever_does_not_keep_a_finite_blend_going() -> None:
    off = ScheduledWeight("step", {0: 1.0, 3: 0.0})
    blend = plain({"a": ConstantWeight(1), "b": off}, sizes={"a": 20})
    assert Counter(batch["dataset_labels"][0] for batch in blend)["a"] == 20


def test_a_blend_without_or_with_equal_names_is_refused() -> None:
    with pytest.raises(UserError, match="at least one source"):
        BlendDataset([], seed=0)
    source = BlendSource("a", Plain(), ConstantWeight(1))
    with pytest.raises(UserError, match="two sources are called 'a'"):
        BlendDataset([source, source], seed=0)


def blended(
    streams: Sequence[Stream], mixing: Make, *, weight: float = 1.0, seed: int = 0, **kwargs: Any
) -> BlendDataset:
    return BlendDataset(
        [
            BlendSource("x", mixing(streams[:2], name="x", **kwargs), ConstantWeight(weight)),
            BlendSource("y", mixing(streams[2:], name="y", **kwargs), ScheduledWeight("linear", {0: 1.0, 50: 3.0})),
        ],
        seed=seed,
    )


@pytest.mark.parametrize("stop", [0, 7, 90])
@pytest.mark.parametrize("repeat", [True, False])
def test_resuming_a_blend_gives_the_samples_and_the_shares_of_an_uninterrupted_run(
    write_streams: Write, mixing: Make, stop: int, repeat: bool
) -> None:
    streams = write_streams(LAYOUT)
    whole = blended(streams, mixing, repeat=repeat)
    for _, _batch in zip(range(stop), whole, strict=False):
        pass
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = blended(streams, mixing, repeat=repeat)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    # Every pool's last pick is part of the metrics again; events were drained with the run that stopped.
    events = "stream_mixing/refill/exhaust_events"
    before, after = whole.drain_step_metrics(), resumed.drain_step_metrics()
    assert after == {**before, **({events: 0.0} if events in before else {})}
    for _ in range(30):
        a, b = next(whole, None), next(resumed, None)
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a["instability_meta_json"] == b["instability_meta_json"]
            assert (a["tokens"] == b["tokens"]).all()
    assert whole.drain_step_metrics().get("blend/max_share_error") == resumed.drain_step_metrics().get(
        "blend/max_share_error"
    )
    assert whole.state_dict() == resumed.state_dict()


def test_a_state_taken_after_every_batch_is_the_one_that_is_taken_once(write_streams: Write, mixing: Make) -> None:
    streams = write_streams(LAYOUT)
    often = blended(streams, mixing, repeat=False)
    for number, _ in enumerate(often, start=1):
        once = blended(streams, mixing, repeat=False)
        list(itertools.islice(once, number))
        assert often.state_dict() == once.state_dict()


def test_weights_may_change_and_sources_may_be_added_at_a_restart(write_streams: Write, mixing: Make) -> None:
    streams = write_streams(LAYOUT)
    blend = blended(streams, mixing)
    for _ in range(9):
        next(blend)
    changed = blended(streams, mixing, weight=5.0)
    changed.sources.append(BlendSource("z", mixing(streams, name="z"), ConstantWeight(1)))
    grown = BlendDataset(changed.sources, seed=0)
    grown.load_state_dict(blend.state_dict())
    before = {source["fingerprint"]["namespace"]: source for source in blend.state_dict()["sources"]}
    after = {source["fingerprint"]["namespace"]: source for source in grown.state_dict()["sources"]}
    assert {name: after[name] for name in before} == before
    assert grown.state_dict()["counts"][2] == 0
    with pytest.raises(UserError, match="has a source 'z', which is missing"):
        blend.load_state_dict(grown.state_dict())
    with pytest.raises(UserError, match="was made with 0, this run has 3"):
        blended(streams, mixing, seed=3).load_state_dict(blend.state_dict())
    with pytest.raises(UserError, match="not one of a blend"):
        blend.load_state_dict({"version": 1})


def drawn(blend: BlendDataset, name: str, count: int) -> list[list[int]]:
    """The next batches of one source."""
    batches = (batch["tokens"].tolist() for batch in blend if batch["dataset_labels"][0] == name)
    return list(itertools.islice(batches, count))


def test_without_a_source_the_others_continue_exactly(write_streams: Write, mixing: Make) -> None:
    streams = write_streams(LAYOUT)
    blend = blended(streams, mixing)
    for _ in range(9):
        next(blend)
    state = json.loads(json.dumps(blend.state_dict()))
    gone, kept = state["names"]
    smaller = BlendDataset([source for source in blended(streams, mixing).sources if source.name == kept], seed=0)
    smaller.load_state_dict(without_sources(state, [gone]))
    off = blended(streams, mixing)
    off.sources[0] = BlendSource(gone, UnreadSource(), ConstantWeight(0))
    off = BlendDataset(off.sources, seed=0)
    off.load_state_dict(state)
    expected = drawn(blend, kept, 20)
    assert drawn(smaller, kept, 20) == drawn(off, kept, 20) == expected
    assert off.state_dict()["sources"][0] == state["sources"][0]


def test_a_source_of_weight_0_keeps_its_place_over_worlds_of_any_size(write_streams: Write, mixing: Make) -> None:
    streams = write_streams(LAYOUT)

    def world(size: int, *, is_off: bool) -> list[BlendDataset]:
        parts = [mixing(streams, rank=rank, world_size=size) for rank in range(size)]
        return [
            BlendDataset(
                [
                    BlendSource("a", UnreadSource() if is_off else part, ConstantWeight(0 if is_off else 1)),
                    BlendSource("plain", Counting(), ConstantWeight(1)),
                ],
                seed=0,
            )
            for part in parts
        ]

    begun = world(2, is_off=False)
    for blend in begun:
        list(itertools.islice(blend, 12))
    direct = world(3, is_off=False)
    for blend in direct:
        blend.load_state_dict([each.state_dict() for each in begun])
    states = [each.state_dict() for each in begun]
    for size in (3, 1, 3):
        through = world(size, is_off=True)
        for rank, blend in enumerate(through):
            blend.load_state_dict(states[rank] if len(states) == size else states)
        states = [json.loads(json.dumps(each.state_dict())) for each in through]
    back = world(3, is_off=False)
    for rank, blend in enumerate(back):
        blend.load_state_dict(states[rank])
    assert [drawn(blend, "source", 10) for blend in back] == [drawn(blend, "source", 10) for blend in direct]


def test_a_source_without_state_trains_but_does_not_resume() -> None:
    blend = plain({"a": ConstantWeight(1)})
    fresh = blend.state_dict()
    next(blend)
    assert blend.state_dict()["sources"] == [None]
    plain({"a": ConstantWeight(1)}).load_state_dict(fresh)
    with pytest.raises(UserError, match="a: gave 1 batches before the checkpoint, and cannot be resumed"):
        plain({"a": ConstantWeight(1)}).load_state_dict(blend.state_dict())


def test_blends_nest(write_streams: Write, mixing: Make) -> None:
    streams = write_streams(LAYOUT)

    def nested() -> BlendDataset:
        inner = blended(streams, mixing)
        other = BlendSource("z", mixing(streams, name="z"), ConstantWeight(1))
        return BlendDataset([BlendSource("inner", inner, ConstantWeight(2)), other], seed=4)

    whole, resumed = nested(), nested()
    labels = {next(whole)["dataset_labels"][0] for _ in range(40)}
    assert labels == {"x", "y", "z"}
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert [next(whole)["instability_meta_json"] for _ in range(20)] == [
        next(resumed)["instability_meta_json"] for _ in range(20)
    ]
