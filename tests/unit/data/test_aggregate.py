"""Pool metrics of several ranks and of several sources: reduced by the catalog, some of them with nothing to report."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from tests.support.gloo import run_on_ranks
from tests.support.streams import mixing_dataset
from trainer.data.blend import BlendDataset, BlendSource
from trainer.data.layout import discover_nested
from trainer.data.mixing import EXHAUST_EVENTS, pool_metric_keys
from trainer.data.tokenizer import BytesTokenizer
from trainer.data.weights import ConstantWeight

A = "stream_mixing/active/"
KEYS = (*pool_metric_keys(["a", "b"]), EXHAUST_EVENTS)
SUMS = {A + "modalities/a", A + "modalities/b", EXHAUST_EVENTS}


def plain_reduction(key: str, values: list[float]) -> float:
    """The operation that a key's name promises."""
    if key in SUMS:
        return sum(values)
    return min(values) if key.endswith("_min") else max(values)


class Reporting:
    """A source that reports what a test puts into `metrics`; ends after `size` batches."""

    metric_keys = KEYS

    def __init__(self, size: int = 10**9) -> None:
        self.size = size
        self.metrics: dict[str, float] = {}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _ in range(self.size):
            yield {"tokens": np.zeros((1, 1))}

    def drain_step_metrics(self) -> dict[str, float]:
        drained = dict(self.metrics)
        if drained:
            self.metrics[EXHAUST_EVENTS] = 0.0
        return drained


def blend_of(sources: list[Reporting]) -> BlendDataset:
    return BlendDataset([BlendSource(f"s{i}", s, ConstantWeight(1.0)) for i, s in enumerate(sources)], seed=0)


def drained_pools(blend: BlendDataset) -> dict[str, float]:
    return {key: value for key, value in blend.drain_step_metrics().items() if key in KEYS}


@pytest.mark.parametrize("seed", range(2))
def test_a_blend_merges_what_its_sources_reported_last_and_counts_events_once(seed: int) -> None:
    generator = random.Random(seed)
    sources = [Reporting() for _ in range(3)]
    blend = blend_of(sources)
    said: dict[int, dict[str, float]] = {}
    for _ in range(200):
        index = int(next(blend)["dataset_labels"][0][1:])
        events = sources[index].metrics.get(EXHAUST_EVENTS, 0.0) + generator.randrange(2)
        sources[index].metrics = {**{key: float(generator.randrange(5)) for key in KEYS}, EXHAUST_EVENTS: events}
        said[index] = dict(sources[index].metrics)
        if generator.random() < 0.6:
            assert drained_pools(blend) == {
                key: plain_reduction(key, [each[key] for each in said.values()]) for key in KEYS
            }
            for each in said.values():
                each[EXHAUST_EVENTS] = 0.0


def test_an_exhausted_source_reports_its_last_events_and_no_readers() -> None:
    sources = [Reporting(size=1), Reporting()]
    blend = blend_of(sources)
    gauges = {key: 1.0 for key in KEYS if key != EXHAUST_EVENTS}
    sources[0].metrics = {**gauges, A + "remaining_max": 99.0, EXHAUST_EVENTS: 1.0}
    sources[1].metrics = {**gauges, EXHAUST_EVENTS: 0.0}
    while not blend.state_dict()["ended"][0]:  # several batches: nothing is drained in between
        next(blend)
    assert drained_pools(blend) == {**gauges, EXHAUST_EVENTS: 1.0}
    next(blend)
    assert drained_pools(blend) == {**gauges, EXHAUST_EVENTS: 0.0}


def pool_of_a_rank(rank: int, world_size: int, root: str) -> tuple[dict[str, float], dict[str, float], int]:
    """What a rank's own dataset reports after two picks, what all of them report, and the number of collectives."""
    calls: list[str] = []
    for name in ("all_reduce", "all_gather"):
        original = getattr(dist, name)
        setattr(dist, name, lambda *args, original=original, **kw: (calls.append(""), original(*args, **kw)))
    dataset = mixing_dataset(
        discover_nested(root),
        name="s",
        tokenizer=BytesTokenizer(),
        seq_len=4,
        batch_size=1,
        batching_mode="device_per_stream",
        rank=rank,
        world_size=world_size,
    )
    for _ in range(2):
        next(dataset)
    local = dataset.drain_step_metrics()
    reduced, num_calls = dataset.aggregate_step_metrics(local, world_size, "cpu"), len(calls)
    assert dataset.aggregate_step_metrics({}, world_size, "cpu") == {}  # nobody has anything to say
    return local, reduced, num_calls


@pytest.mark.distributed
def test_three_pools_one_of_them_empty_reduce_to_the_right_numbers_in_one_collective(tmp_path: Path) -> None:
    """Two streams of one group each: one of three ranks gets nothing."""
    for modality, length in (("a", 32), ("b", 12)):
        (tmp_path / modality).mkdir()
        (tmp_path / modality / "s.jsonl").write_text(f'{{"text": "{"x" * length}"}}\n')
    results = run_on_ranks(pool_of_a_rank, 3, str(tmp_path))
    present = [local for local, _, _ in results if local]
    assert len(present) == 2
    reduced = results[0][1]
    assert all(each == reduced and calls == 1 for _, each, calls in results)
    assert reduced.keys() == set(KEYS)
    for key in KEYS:
        assert reduced[key] == plain_reduction(key, [local[key] for local in present])
    assert reduced[A + "modalities/a"] == reduced[A + "modalities/b"] == 1
    assert reduced[A + "remaining_max"] == 7  # of 8 cells, before the second pick
    assert reduced[A + "remaining_min"] == 2
    assert reduced[EXHAUST_EVENTS] == 0


class Odd:
    def __float__(self) -> float:
        raise ZeroDivisionError


BAD = [None, 10**400, np.zeros(3), Odd()]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: type(bad).__name__)
def test_a_bad_value_of_one_source_costs_its_key_alone(bad: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sources = [Reporting(), Reporting()]
    blend = blend_of(sources)
    for _ in range(20):
        index = int(next(blend)["dataset_labels"][0][1:])
        sources[index].metrics = dict.fromkeys(KEYS, 1.0)
        if index == 0:
            sources[0].metrics |= {A + "modalities/a": bad, A + "remaining_min": bad, "my/unlisted": 1.0}
        drained = drained_pools(blend)
    expected = {key: plain_reduction(key, [1.0, 1.0]) for key in KEYS}
    assert drained == {**expected, A + "modalities/a": None, A + "remaining_min": None, EXHAUST_EVENTS: 1.0}
    said = capsys.readouterr().err
    assert (
        said.count("modalities/a' is left out: must be a number, got ") == said.count("remaining_min' is left out") == 1
    )
    assert (
        said.count("metrics of the source s0: metric 'my/unlisted' is left out: it is not among the metric_keys") == 1
    )
    assert "is off" not in said


def test_a_source_whose_drain_raises_is_off_alone_and_its_keys_are_not_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Failing(Reporting):
        def drain_step_metrics(self) -> dict[str, float]:
            raise ValueError("no metrics")

    class Other(Reporting):
        metric_keys = ("my/mean", A + "modalities/b")

    blend = blend_of([Failing(), other := Other()])
    other.metrics = dict.fromkeys(other.metric_keys, 3.0)
    for _ in range(20):
        next(blend)
        drained = blend.drain_step_metrics()
    assert drained.keys() >= set(KEYS)
    assert {key for key in set(KEYS) - {EXHAUST_EVENTS} if drained[key] is not None} == set()
    assert drained["my/mean"] == 3.0
    assert capsys.readouterr().err.count("s0 failed and is off from now on: ValueError: no metrics") == 1


@pytest.mark.parametrize("keys", ["my/text", 7], ids=repr)
def test_metric_keys_that_are_no_list_cost_that_source_s_metrics(keys: Any, capsys: pytest.CaptureFixture[str]) -> None:
    class Odd(Reporting):
        metric_keys = keys

    assert blend_of([Odd(), Reporting()]).metric_keys == ("blend/max_share_error", "blend/ended_sources", *KEYS)
    assert capsys.readouterr().err.count("metrics of the source s0 failed and is off from now on: TypeError") == 1


def test_a_pool_whose_metrics_fail_does_not_look_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "s.jsonl").write_text('{"text": "abcdefghijklmnop"}\n')
    options: dict[str, Any] = {"tokenizer": BytesTokenizer(), "seq_len": 4, "batch_size": 1, "rank": 0, "world_size": 1}
    dataset = mixing_dataset(discover_nested(str(tmp_path)), name="s", **options)
    blend = BlendDataset([BlendSource("s", dataset, ConstantWeight(1.0))], seed=0)
    next(blend)
    assert blend.drain_step_metrics()[A + "modalities/a"] == 1.0
    monkeypatch.setattr(dataset._pool, "snapshot", lambda: 1 / 0)
    next(blend)
    drained = blend.drain_step_metrics()
    assert drained[EXHAUST_EVENTS] is not None
    assert all(drained[key] is None for key in dataset.metric_keys if key != EXHAUST_EVENTS)
