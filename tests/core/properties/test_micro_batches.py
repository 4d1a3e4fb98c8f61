"""How many micro-batches a step has: plans against a loop that counts."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config.data_tables import BatchScheduleTable, plan_of
from trainer.data.weights import ScheduledWeight, first_all_zero, positions

PLANS = st.dictionaries(st.integers(0, 40), st.integers(1, 5), min_size=1, max_size=5)
QUICK = settings(max_examples=80, deadline=None, derandomize=True)


def planned(points):
    return plan_of(BatchScheduleTable(schedule="step", points=points))


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
