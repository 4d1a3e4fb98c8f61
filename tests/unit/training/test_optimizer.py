"""Learning-rate schedules and the grouping of weight decay."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config.schema import OptimizerTable, SchedulerTable
from trainer.model.build import build
from trainer.training.step.optimizer import build_optimizer, lr_at


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", {1: 0.25, 4: 1.0, 5: 1.0, 24: 1.0}),
        ("linear", {1: 0.25, 4: 1.0, 14: 0.55, 24: 0.1}),
        ("cosine", {1: 0.25, 4: 1.0, 14: 0.55, 24: 0.1, 9: 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2}),
        ("wsd", {1: 0.25, 4: 1.0, 19: 1.0, 24: 0.1, 22: 1.0 - 0.9 * 3 / 5}),
    ],
)
def test_known_points(name, expected):
    table = SchedulerTable(name=name, warmup_steps=4, min_lr_ratio=0.1, decay_fraction=0.2)
    for step, height in expected.items():
        assert lr_at(step, steps=24, peak=3.0, table=table) == pytest.approx(3.0 * height)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(
    st.sampled_from(["constant", "linear", "cosine", "wsd"]),
    st.integers(1, 60),
    st.integers(0, 60),
    st.floats(0, 1),
    st.floats(0.01, 1),
)
def test_it_rises_to_the_peak_then_never_rises_again_and_stays_above_its_floor(name, steps, warmup, floor, decay):
    warmup = min(warmup, steps)
    table = SchedulerTable(name=name, warmup_steps=warmup, min_lr_ratio=floor, decay_fraction=decay)
    rates = [lr_at(step, steps=steps, peak=2.0, table=table) for step in range(1, steps + 1)]
    assert all(0 < rate <= 2.0 + 1e-12 for rate in rates) or floor == 0
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert all(rate >= 2.0 * floor - 1e-12 for rate in rates[warmup:])
    if steps > warmup and name != "constant":
        assert rates[-1] == pytest.approx(2.0 * floor, abs=1e-12)


def test_vectors_are_not_decayed():
    model = build(11, dim=8, num_layers=1)
    optimizer = build_optimizer(model, OptimizerTable(weight_decay=0.3))
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decays) == len(list(model.parameters()))
    for parameter in model.parameters():
        assert decays[id(parameter)] == (0.3 if parameter.ndim >= 2 else 0.0)


def test_a_frozen_parameter_is_left_out():
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    assert len(build_optimizer(model, OptimizerTable()).param_groups) == 1
