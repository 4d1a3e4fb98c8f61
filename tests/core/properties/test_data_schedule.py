"""Properties of schedules: of weights, and the shares that a blend realises; of micro-batches against a loop that counts."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config.data_tables import BatchScheduleTable
from trainer.config.schema import RunConfig, TrainTable
from trainer.data.blend import BlendDataset, BlendSource
from trainer.data.weights import ConstantWeight, ScheduledWeight, first_all_zero, positions

PROFILE = settings(max_examples=150, deadline=None, derandomize=True)

values = st.one_of(st.just(0.0), st.floats(1e-3, 100.0))
constants = st.builds(ConstantWeight, st.one_of(st.just(0.0), st.floats(0.1, 10.0)))
schedules = st.builds(
    ScheduledWeight,
    st.sampled_from(["linear", "step"]),
    st.dictionaries(st.integers(0, 20), values, min_size=1, max_size=6),
    scale=values,
    unit=st.sampled_from(["batch", "step"]),
)
specs_of = st.lists(st.one_of(schedules, schedules, schedules, constants), min_size=1, max_size=4)


def brute_force(spec, x):
    """The weight in exact arithmetic, by walking along the points one by one."""
    points = sorted((at, Fraction(value)) for at, value in spec.points.items())
    weight = points[0][1]
    for (left, low), (right, high) in itertools.pairwise(points):
        if x >= right:
            weight = high
        elif x > left and spec.kind == "linear":
            weight = low + (high - low) * Fraction(x - left, right - left)
    return weight * Fraction(spec.scale)


@PROFILE
@given(schedules, st.integers(0, 10**9))
def test_values_equal_exact_arithmetic_to_one_in_a_million_million(spec, far):
    for x in (*range(30), far):
        exact = brute_force(spec, x)
        assert abs(Fraction(spec.evaluate(x)) - exact) <= exact * Fraction(1, 10**12)
        assert (spec.evaluate(x) == 0) == (exact == 0)


@PROFILE
@given(schedules)
def test_zero_from_is_the_first_batch_after_which_the_weight_is_always_zero(spec):
    positive = [x for x in range(60) if spec.evaluate(x) > 0]
    expected = None if 59 in positive else max(positive, default=-1) + 1
    assert spec.zero_from() == expected


SCHEDULES: dict[str, dict[str, ScheduledWeight]] = {
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
    batches = itertools.repeat({"tokens": (0,)})
    blend = BlendDataset([BlendSource(name, batches, weight) for name, weight in weights.items()], seed=0)
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


PLANS = st.dictionaries(st.integers(0, 40), st.integers(1, 5), min_size=1, max_size=5)
QUICK = settings(max_examples=80, deadline=None, derandomize=True)


def planned(points):
    train = TrainTable(steps=1, micro_batches=BatchScheduleTable(schedule="step", points=points))
    return RunConfig.model_construct(train=train).micro_batches


def by_hand(points, x):
    reached = [at for at in points if at <= x]
    return points[max(reached) if reached else min(points)]


@QUICK
@given(points=PLANS)
def test_batches_and_steps_of_a_plan_are_those_of_a_loop_that_counts(points):
    plan = planned(points)
    steps = [step for step in range(1, 60) for _ in range(by_hand(points, step))]
    assert [plan.at(step) for step in range(1, 60)] == [by_hand(points, step) for step in range(1, 60)]
    assert [plan.step_of(batch) for batch in range(len(steps))] == steps
    assert positions("step", np.arange(len(steps)), plan).tolist() == steps
    assert [plan.batches_before(step) for step in range(1, 60)] == [steps.index(step) for step in range(1, 60)]
    assert (plan.least, plan.most) == (min(points.values()), max(points.values()))


@PROFILE
@given(specs_of, PLANS, st.integers(1, 80))
def test_first_all_zero_equals_trying_every_batch(specs, points, num_batches):
    plan = planned(points)

    def is_zero(batch):
        return all(spec.evaluate(batch if spec.unit == "batch" else plan.step_of(batch)) == 0 for spec in specs)

    expected = next((batch for batch in range(num_batches) if is_zero(batch)), None)
    assert first_all_zero(specs, plan, num_batches) == expected
