"""Pool metrics of several ranks and of several sources: reduced by the catalog, some of them with nothing to report."""

from __future__ import annotations

import random

import numpy as np
import pytest

from trainer.data.blend import BlendDataset, BlendSource
from trainer.data.pool import EXHAUST_EVENTS, pool_metric_keys
from trainer.data.weights import ConstantWeight

A = "stream_mixing/active/"
KEYS = (*pool_metric_keys(["a", "b"]), EXHAUST_EVENTS)
SUMS = {A + "modalities/a", A + "modalities/b", EXHAUST_EVENTS}


def plain_reduction(key, values):
    """The operation that a key's name promises."""
    if key in SUMS:
        return sum(values)
    return min(values) if key.endswith("_min") else max(values)


class Reporting:
    """A source that reports what a test puts into `metrics`."""

    metric_keys = KEYS

    def __init__(self):
        self.metrics: dict[str, float] = {}

    def __iter__(self):
        while True:
            yield {"tokens": np.zeros((1, 1))}

    def drain_step_metrics(self):
        drained = dict(self.metrics)
        if drained:
            self.metrics[EXHAUST_EVENTS] = 0.0
        return drained


def blend_of(sources):
    return BlendDataset([BlendSource(f"s{i}", s, ConstantWeight(1.0)) for i, s in enumerate(sources)], seed=0)


def drained_pools(blend):
    return {key: value for key, value in blend.drain_step_metrics().items() if key in KEYS}


def test_a_blend_merges_what_its_sources_reported_last_and_counts_events_once():
    generator = random.Random(0)
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


@pytest.mark.parametrize("bad", [None, 10**400], ids=lambda bad: type(bad).__name__)
def test_a_bad_value_of_one_source_costs_its_key_alone(bad, capsys):
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
    assert said.count("modalities/a' is left out: must be a number") == said.count("'my/unlisted' is left out") == 1
    assert "is off" not in said


def test_a_source_whose_metrics_raise_is_off_alone_and_its_keys_are_not_known(capsys):
    class Failing(Reporting):
        def drain_step_metrics(self):
            raise ValueError("no metrics")

    class NoList(Reporting):
        metric_keys = 7

    class Other(Reporting):
        metric_keys = ("my/mean", A + "modalities/b")

    blend = blend_of([Failing(), other := Other(), NoList()])
    other.metrics = dict.fromkeys(other.metric_keys, 3.0)
    for _ in range(20):
        next(blend)
        drained = blend.drain_step_metrics()
    assert all(drained[key] is None for key in set(KEYS) - {EXHAUST_EVENTS})
    assert drained["my/mean"] == 3.0
    said = capsys.readouterr().err
    assert said.count("s0 failed and is off from now on: ValueError: no metrics") == 1
    assert said.count("s2 failed and is off from now on: TypeError") == 1
