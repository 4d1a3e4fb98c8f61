"""Micro-steps become a step, and steps that do not log lose nothing."""

from __future__ import annotations

import json
import math

import pytest
import torch

from trainer.metrics.aggregate import Recorder, SumCount


def test_a_gauge_is_averaged_over_the_micro_steps_that_reported_it() -> None:
    window = Recorder()
    for values in ({"grad_norm": 1.0}, {}, {"grad_norm": 4.0}):
        window.add(values)
    assert window.drain_metrics() == {"grad_norm": 2.5}


def test_each_kind_is_put_together_in_its_own_way() -> None:
    window = Recorder()
    window.add({"ledger/cold_starts": 2.0, "loss_spike": 1.0, "ledger/live_groups": 5.0, "loss": (6.0, 3.0)})
    window.add({"ledger/cold_starts": 3.0, "loss_spike": 0.0, "ledger/live_groups": 4.0, "loss": (1.0, 1.0)})
    assert window.drain_metrics() == {
        "ledger/cold_starts": 5.0,
        "loss_spike": 1.0,
        "ledger/live_groups": 4.0,
        "loss": SumCount(7.0, 4.0),
    }
    assert window.drain_metrics() == {}


def test_tensors_stay_tensors_and_carry_no_graph() -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    window = Recorder()
    for _ in range(2):
        window.add({"loss": (weight * 3, torch.tensor(2)), "grad_norm": weight * 1})
    result = window.drain_metrics()
    total, count = result["loss"]  # type: ignore[misc]
    assert isinstance(total, torch.Tensor)
    assert not total.requires_grad
    assert (float(total), float(count)) == (12.0, 4.0)
    assert float(result["grad_norm"]) == 2.0  # type: ignore[arg-type]


@pytest.mark.parametrize("tensor", [False, True])
def test_nan_is_a_value_and_not_an_absence(tensor: bool) -> None:
    nan = torch.tensor(torch.nan) if tensor else math.nan
    for first, second in ((nan, 1.0), (1.0, nan)):
        window = Recorder()
        for value in (first, second):
            window.add({"grad_norm": value, "loss_spike": value, "ledger/cold_starts": value})
        assert all(math.isnan(float(value)) for value in window.drain_metrics().values())  # type: ignore[arg-type]


def test_keys_and_pairs_are_checked() -> None:
    with pytest.raises(KeyError, match="not among the metric_keys: lr"):
        Recorder(["loss"]).add({"lr": 1.0})
    with pytest.raises(TypeError, match="lr: must be a number, got 'high'"):
        Recorder().add({"lr": "high"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="grad_norm: a \\(sum, count\\) pair, but its window reduction is mean"):
        Recorder().add({"grad_norm": (1.0, 2.0)})


def test_a_key_outside_the_catalog_is_a_gauge() -> None:
    window = Recorder()
    for value in (1.0, 3.0):
        window.add({"my/thing": value})
    assert window.drain_metrics() == {"my/thing": 2.0}


def test_a_total_of_which_a_part_is_not_known_is_not_known_and_stays_so_over_a_restart() -> None:
    window = Recorder()
    for value in (1.0, None, 2.0):
        window.add({"ledger/cold_starts": value, "grad_norm": value, "loss_spike": value, "lr": value})
    again = Recorder()
    again.load_state_dict(json.loads(json.dumps(window.state_dict())))
    for each in (window, again):
        assert each.drain_metrics() == {"ledger/cold_starts": None, "grad_norm": 1.5, "loss_spike": None, "lr": 2.0}
        each.add({"ledger/cold_starts": 1.0})
        assert each.drain_metrics() == {"ledger/cold_starts": 1.0}
