"""How many micro-batches a step has: schedules against a loop that counts, and the rule of `auto`."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config.data_tables import BatchScheduleTable, plan_of
from trainer.data.blend import BlendDataset, BlendSource
from trainer.data.weights import ConstantWeight, ScheduledWeight, first_all_zero, positions
from trainer.lab.batch_growth import may_double, permits
from trainer.options import AutoRule, MicroBatches

PLANS = st.dictionaries(st.integers(0, 40), st.integers(1, 5), min_size=1, max_size=5)
QUICK = settings(max_examples=80, deadline=None, derandomize=True)


def planned(points, unit="steps", lr="none"):
    return plan_of(BatchScheduleTable(schedule="step", points=points, unit=unit, lr=lr))  # type: ignore[arg-type]


def by_hand(points, x):
    reached = [at for at in points if at <= x]
    return points[max(reached) if reached else min(points)]


@QUICK
@given(points=PLANS)
def test_batches_and_steps_of_a_plan_are_those_of_a_loop_that_counts(points):
    plan = planned(points)
    steps = [step for step in range(1, 60) for _ in range(by_hand(points, step))]
    assert [plan.at(step, 10**9) for step in range(1, 60)] == [by_hand(points, step) for step in range(1, 60)]
    assert [plan.step_of(batch) for batch in range(len(steps))] == steps
    assert positions("step", np.arange(len(steps)), plan).tolist() == steps
    assert [plan.batches_before(step) for step in range(1, 60)] == [steps.index(step) for step in range(1, 60)]
    assert (plan.least, plan.most) == (min(points.values()), max(points.values()))


@QUICK
@given(points=PLANS, zero=st.dictionaries(st.integers(0, 30), st.sampled_from([0.0, 1.0]), min_size=1, max_size=4))
def test_a_weight_by_steps_is_zero_in_the_batches_of_its_steps(points, zero):
    plan, weight = planned(points), ScheduledWeight("step", zero, unit="step")
    batches = range(plan.batches_before(60))
    expected = [batch for batch in batches if weight.evaluate(plan.step_of(batch)) == 0]
    start, end = first_all_zero([weight], micro_batches=plan) or (0, -1)
    last = len(batches) - 1 if end is None else end
    assert list(range(start, last + 1)) == expected[: last + 1 - start]
    assert expected[last + 1 - start :][:1] != [last + 1]


@QUICK
@given(
    points=st.dictionaries(st.integers(0, 3000), st.integers(1, 5), min_size=1, max_size=5), micro=st.integers(1, 90)
)
def test_a_plan_by_tokens_is_one_by_steps_if_all_batches_are_full(points, micro):
    plan, tokens, found = planned(points, "tokens"), 0, []
    for step in range(1, 80):
        found.append(plan.at(step, tokens))
        assert found[-1] == by_hand(points, tokens)
        tokens += found[-1] * micro
    by_steps = plan.by_steps(micro)
    assert by_steps.is_known_ahead
    assert [by_steps.at(step, 0) for step in range(1, 80)] == found


@QUICK
@given(
    start=st.integers(1, 3),
    room=st.integers(2, 40),
    every=st.integers(1, 7),
    multiple=st.floats(0.1, 10),
    lows=st.lists(st.none() | st.floats(0, 200), min_size=60, max_size=60),
)
def test_auto_doubles_only_with_permission_and_never_more_often_than_every_n_steps(start, room, every, multiple, lows):
    rule = AutoRule(max=start * room, multiple=multiple, every=every)
    plan = MicroBatches(((0, start),), auto=rule)
    m, since, fastest, fast_since = start, 1, start, 1
    for step, low in enumerate(lows, start=1):
        if may_double(rule, m, after=step, steps_with_m=step + 1 - since) and permits(rule, low=low, batch=4.0 * m):
            assert low is not None
            assert low > multiple * 4 * m
            assert (step + 1) - since >= every
            assert step >= every
            m, since = 2 * m, step + 1
        if may_double(rule, fastest, after=step, steps_with_m=step + 1 - fast_since):
            fastest, fast_since = 2 * fastest, step + 1
        assert m <= fastest == plan.fastest().at(step + 1, 0) <= plan.most <= rule.max
    assert 2 * plan.most > rule.max
    # A bound that is always high enough is always heeded.
    assert permits(rule, low=multiple * 4.0 * (1 + 1e-9), batch=4.0)
    assert not permits(rule, low=multiple * 4.0, batch=4.0)
    assert not permits(rule, low=None, batch=4.0)
    assert not permits(rule, low=5.0, batch=0.0)


@pytest.mark.parametrize(("lr", "power"), [("none", 0.0), ("sqrt", 0.5), ("linear", 1.0)])
def test_the_learning_rate_follows_the_batch_by_the_rule_that_is_named(lr, power):
    plan = planned({0: 2, 7: 3, 9: 16}, lr=lr)
    assert [plan.lr_factor(m) for m in (2, 3, 16)] == [math.pow(m / 2, power) for m in (2, 3, 16)]


def test_every_batch_has_the_tokens_before_where_its_step_is_not_known_ahead():
    asked = []

    class Source:
        def __iter__(self):
            return self

        def __next__(self):
            return self.next_with_tokens_before(0)

        def next_with_tokens_before(self, tokens_before):
            asked.append(tokens_before > 0)
            return {"tokens": np.zeros((1, 2))}

    blend = BlendDataset(
        [BlendSource("x", Source(), ConstantWeight(1))],
        seed=0,
        micro_batches=planned({0: 1, 1000: 6}, "tokens"),
        history_every=3,
        history_tokens=4,
    )
    for _ in range(5):
        next(blend)
    assert asked == [True] * 5
