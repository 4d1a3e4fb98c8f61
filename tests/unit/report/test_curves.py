"""Reducing a curve must not hide values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.tools.report.curves import make_curve, running_total

values = st.floats(allow_nan=True, allow_infinity=True, width=64)


@st.composite
def columns(draw):
    steps = sorted(draw(st.sets(st.integers(1, 10_000), min_size=1, max_size=300)))
    return steps, [draw(values) for _ in steps]


@given(columns(), st.integers(1, 50))
def test_every_value_is_in_the_range_of_the_one_point_that_covers_its_step(column, limit):
    steps, numbers = column
    curve = make_curve(steps, numbers, limit=limit)
    finite = [(step, value) for step, value in zip(steps, numbers, strict=True) if math.isfinite(value)]
    assert curve.bad_steps.tolist() == [
        step for step, value in zip(steps, numbers, strict=True) if not math.isfinite(value)
    ]
    assert curve.num_values == len(finite)
    assert len(curve.mean) <= limit
    for step, value in finite:
        (place,) = np.flatnonzero((curve.first <= step) & (step <= curve.last))
        assert curve.low[place] <= value <= curve.high[place]
    if finite:
        assert curve.low.min() == min(value for _, value in finite)
        assert curve.high.max() == max(value for _, value in finite)
        assert (curve.first[1:] > curve.last[:-1]).all()


@given(columns())
def test_few_values_are_kept_exactly(column):
    steps, numbers = column
    curve = make_curve(steps, numbers, limit=len(steps))
    assert not curve.is_reduced
    assert curve.mean.tolist() == [value for value in numbers if math.isfinite(value)]
    assert (curve.first == curve.last).all()


def test_the_mean_of_a_bucket_is_the_mean_of_its_values():
    generator = np.random.Generator(np.random.Philox(3))
    steps, numbers = np.arange(1, 1001), generator.normal(size=1000)
    curve = make_curve(steps, numbers, limit=7)
    assert len(curve.mean) == 7
    for first, last, mean in zip(curve.first, curve.last, curve.mean, strict=True):
        assert mean == pytest.approx(numbers[(steps >= first) & (steps <= last)].mean())


def test_a_spike_in_a_hundred_thousand_steps_keeps_its_height_and_its_step():
    numbers = np.ones(100_000)
    numbers[50_122] = 900.0
    curve = make_curve(np.arange(1, 100_001), numbers, limit=1500)
    place = int(curve.high.argmax())
    assert curve.high[place] == 900
    assert curve.first[place] <= 50_123 <= curve.last[place]


def test_a_constant_with_a_nan_is_not_constant():
    assert make_curve([1, 2], [3.0, 3.0], limit=5).is_constant
    assert not make_curve([1, 2, 3], [3.0, math.nan, 3.0], limit=5).is_constant
    assert not make_curve([1], [math.nan], limit=5).is_constant


def test_a_running_total_skips_values_that_are_not_finite():
    assert running_total([1.0, math.nan, 2.0]).tolist() == [1.0, 1.0, 3.0]
