"""The learning rate over the run: known points, its shape, and a schedule of one's own."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.runs import write_tiny_config
from trainer.config.load import load_config, to_toml
from trainer.config.schema import SchedulerTable
from trainer.errors import UserError
from trainer.training.step.schedule import Length, lr_at, make_schedule


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


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
def test_a_run_that_is_shorter_than_its_warmup_ends_on_the_ramp(name):
    steps = 10
    table = SchedulerTable(name=name, warmup_steps=100, min_lr_ratio=0.1, decay_fraction=0.2)
    rates = [lr_at(step, steps=steps, peak=2.0, table=table) for step in range(1, steps + 1)]
    assert rates == pytest.approx([2.0 * step / 100 for step in range(1, steps + 1)])


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
def test_a_run_in_tokens_that_is_shorter_than_its_warmup_ends_on_the_ramp(tmp_path, name):
    sets = ["train.steps=0", "train.tokens=500", "scheduler.warmup_steps=0", "scheduler.warmup_tokens=2000"]
    config = load_config(write_tiny_config(tmp_path), [*sets, f"scheduler.name={name}", "optimizer.lr=2.0"])
    schedule = make_schedule(config, Length.of(config, 64))
    assert [schedule(reached) for reached in (64, 128, 500)] == pytest.approx([0.064, 0.128, 0.5])


def of_target(tmp_path, monkeypatch, body, *sets):
    (tmp_path / "own_rates.py").write_text(body)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "own_rates", raising=False)
    config = write_tiny_config(tmp_path)
    lines = [line for line in config.read_text().splitlines() if not line.startswith("warmup_steps")]
    config.write_text("\n".join(lines))
    loaded = load_config(config, ["scheduler.target=own_rates:rate", "train.steps=12", *sets])
    return make_schedule(loaded, Length.of(loaded, 0))


def test_a_schedule_of_ones_own_is_called_with_its_settings(tmp_path, monkeypatch):
    body = "def rate(step, *, steps, peak, power):\n    return peak * (1 - (step - 1) / steps) ** power\n"
    schedule = of_target(tmp_path, monkeypatch, body, "scheduler.args={power=2}", "optimizer.lr=0.5")
    assert [schedule(step) for step in (1, 7, 12)] == pytest.approx([0.5, 0.125, 0.5 / 144])


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("def rate(step):\n    return 1.0\n", r"scheduler.args: cannot call own_rates:rate with a step"),
        ("def rate(step, steps, peak):\n    return -peak\n", r"scheduler.target: own_rates:rate gave -0.*at step 1"),
        ("def rate(step, steps, peak):\n    return 1 / (steps - step)\n", r"fails at step 12: ZeroDivisionError"),
        ("def rate(step, steps, peak):\n    return float('nan')\n", r"gave nan at step 1, which is no"),
        ("def rate(step, steps, peak):\n    return '0.1'\n", r"gave '0.1' at step 1, which is no"),
        ("def rate(step, steps, peak):\n    return -1.0 if step == 7 else 1.0\n", r"gave -1.0 at step 7"),
        ("", r"scheduler.target: own_rates .*has no function rate"),
    ],
)
def test_one_that_cannot_be_used_is_refused_before_the_run(tmp_path, monkeypatch, body, text):
    with pytest.raises(UserError, match=text):
        of_target(tmp_path, monkeypatch, body)


def test_keys_that_would_have_no_effect_are_refused():
    with pytest.raises(ValueError, match="min_lr_ratio, warmup_steps would have no effect beside target"):
        SchedulerTable(target="a:b", warmup_steps=3, min_lr_ratio=0.5)
    with pytest.raises(ValueError, match="args are those of a target of your own"):
        SchedulerTable(args={"power": 2})


def test_a_resolved_config_with_parts_of_ones_own_is_a_config(tmp_path):
    """What a run writes down is what a resume reads."""
    text = '[train]\nsteps = 3\n[scheduler]\ntarget = "a:b"\nargs = { power = 2 }\n[optimizer]\ntarget = "a:c"\n'
    (tmp_path / "x.toml").write_text(text + '[[data.source]]\nname = "s"\nroot = "data"\n')
    config = load_config(tmp_path / "x.toml")
    (tmp_path / "resolved.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "resolved.toml") == config
