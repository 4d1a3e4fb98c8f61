"""Schedules: values by hand, and what is refused."""

from __future__ import annotations

import math

import pytest

from trainer.data.weights import ConstantWeight, ScheduledWeight, compose_weights
from trainer.errors import UserError


@pytest.mark.parametrize("value", [-1.0, math.nan, 1e300, True, "3"])
def test_weights_that_are_no_weights_are_refused(value):
    with pytest.raises(UserError, match="must be"):
        ConstantWeight(value)
    with pytest.raises(UserError, match=r"points\.5"):
        ScheduledWeight("linear", {0: 1.0, 5: value})
    with pytest.raises(UserError, match="scale"):
        ScheduledWeight("linear", {0: 1.0}, scale=value)


@pytest.mark.parametrize(
    ("kind", "points", "unit", "message"),
    [
        ("linear", {}, "batch", "at least one point"),
        ("linear", {-1: 1.0}, "batch", "an integer"),
        ("cubic", {0: 1.0}, "batch", "linear, step"),
        ("step", {0: 1.0}, "epoch", "batch, step"),
    ],
)
def test_schedules_that_say_nothing_are_refused(kind, points, unit, message):
    with pytest.raises(UserError, match=message):
        ScheduledWeight(kind, points, unit=unit)


def test_weights_multiply_down_a_nested_blend():
    schedule = ScheduledWeight("linear", {0: 2.0, 10: 4.0}, unit="step")
    with pytest.raises(UserError, match=r"inner\.weight.*outer\.weight"):
        compose_weights(schedule, schedule, path_a="outer.weight", path_b="inner.weight")
    assert issubclass(UserError, ValueError), "what a caller that knows no UserError catches"
    assert compose_weights(ConstantWeight(2), ConstantWeight(3), path_a="a", path_b="b") == ConstantWeight(6)
    for pair in ((schedule, ConstantWeight(3)), (ConstantWeight(3), schedule)):
        product = compose_weights(*pair, path_a="a", path_b="b")
        assert product.unit == "step"
        assert [product.evaluate(x) for x in (0, 5, 10)] == [6, 9, 12]
