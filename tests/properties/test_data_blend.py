"""The shares that a blend realises over a long run follow its weights, whatever their kind."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.data.blend import BlendDataset, BlendSource
from trainer.data.weights import ConstantWeight, ScheduledWeight, WeightSpec


class Endless:
    """A source of empty batches."""

    def __iter__(self):
        while True:
            yield {"tokens": (0,)}


SCHEDULES: dict[str, dict[str, WeightSpec]] = {
    "constant": {"a": ConstantWeight(8), "b": ConstantWeight(1), "c": ConstantWeight(0), "d": ConstantWeight(3)},
    "linear": {
        "a": ScheduledWeight("linear", {0: 100, 5_000: 10, 12_000: 0}),
        "b": ScheduledWeight("linear", {2_000: 0, 18_000: 40}),
        "c": ConstantWeight(5),
    },
    "step": {
        "a": ScheduledWeight("step", {0: 1, 4_000: 6, 15_000: 0}),
        "b": ScheduledWeight("step", {0: 2, 9_000: 0, 10_000: 3}),
        "c": ScheduledWeight("step", {1_000: 0, 3_000: 2}),
    },
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_shares_of_20000_picks_follow_the_weights_all_along(kind):
    """Chi-square over 20 windows of 1,000 picks; within a window the expected counts are sums of the shares."""
    weights = SCHEDULES[kind]
    blend = BlendDataset([BlendSource(name, Endless(), weight) for name, weight in weights.items()], seed=0)
    order = [next(blend)["dataset_labels"][0] for _ in range(20_000)]
    table = np.array([[spec.evaluate(i) for spec in weights.values()] for i in range(20_000)])
    shares = table / table.sum(axis=1, keepdims=True)
    picked = np.array([[name == each for each in weights] for name in order])
    assert not picked[shares == 0].any()
    expected, seen = (each.reshape(20, 1000, -1).sum(axis=1) for each in (shares, picked))
    counted = expected >= 5  # where the approximation holds
    statistic = ((seen - expected)[counted] ** 2 / expected[counted]).sum()
    freedom = counted.sum() - (counted.sum(axis=1) > 0).sum()
    assert freedom >= 10
    # Wilson and Hilferty (1931): the cube root is close to normal; 3.09 standard deviations are p = 0.001.
    bound = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert statistic < bound
