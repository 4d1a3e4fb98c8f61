"""Windows that cannot be measured, in part or at all: each is skipped, counted and told, never guessed."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.gns_windows import loss_sum, micro, rows, window
from trainer.metrics.noise_scale.estimate import Window
from trainer.metrics.noise_scale.hooks import GradientNoiseScale


def test_a_micro_batch_without_tokens_carries_no_weight(model: nn.Module, gns: GradientNoiseScale) -> None:
    window(gns, model, 2)
    before = gns.local_sums()
    model.zero_grad()
    gns.begin_window(2)
    for k in range(2):
        micro(gns, model, rows(k), torch.tensor([1.0, 2.0, 0.0, 5.0 + k]))
    micro(gns, model, rows(7), torch.zeros(4), last=True)
    assert torch.equal(gns.local_sums(), before)


def test_a_gradient_without_tokens_is_a_fault(model: nn.Module, gns: GradientNoiseScale) -> None:
    gns.begin_window()
    micro(gns, model, rows(0), torch.ones(4))
    gns.begin_micro(True)
    loss_sum(model, rows(1), torch.ones(4)).backward()
    gns.end_micro(0.0, torch.zeros(4))
    assert gns.step() == {"gns/skipped": 1.0}


@pytest.mark.parametrize(("value", "kappa"), [(float("nan"), 0.0), (float("inf"), 1.0)])
def test_a_gradient_that_is_not_finite_is_a_counted_skip(
    model: nn.Module, gns: GradientNoiseScale, value: float, kappa: float
) -> None:
    for k in range(6):
        window(gns, model, 2, first_seed=2 * k)
        before = gns.step()
    model.zero_grad()
    gns.begin_window(2)
    micro(gns, model, rows(0), torch.ones(4))
    gns.begin_micro(True)
    (value * loss_sum(model, rows(1), torch.ones(4))).backward()
    gns.end_micro(kappa, torch.ones(4))
    after = gns.step()
    assert after.pop("gns/skipped") == 1.0
    before.pop("gns/skipped")
    assert after == before


class Twice(nn.Module):
    """One linear layer used twice, each time through reentrant checkpointing: its hook runs twice a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def test_a_hook_that_runs_twice_is_a_skip_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = Twice()
    gns = GradientNoiseScale(model)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            gns.begin_window(2)
            for k in range(2):
                gns.begin_micro(k == 1)
                x = rows(k).requires_grad_()
                model(x).square().sum().backward()
                gns.end_micro(1.0, 4)
            metrics = gns.step()
    assert metrics == {"gns/skipped": 2.0}
    assert [record.message for record in caplog.records if "use_reentrant=False" in record.message] != []
    assert len(caplog.records) == 1


def test_unused_and_frozen_parameters_contribute_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    model.register_parameter("unused", nn.Parameter(torch.ones(100)))
    for parameter in model[1].parameters():
        parameter.requires_grad_(False)
    gns = GradientNoiseScale(model)
    window(gns, model, 2)
    assert isinstance(gns.finish(gns.local_sums().tolist(), float(gns.grad_sq())), Window)
    expected = sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None)
    assert float(gns.grad_sq()) == pytest.approx(expected)


class Switch(nn.Module):
    """Uses the second layer only for some micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.use_second = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x) if self.use_second else x


def test_the_middle_is_left_out_if_a_used_parameter_was_not_seen_in_it() -> None:
    model = Switch()
    gns = GradientNoiseScale(model)
    gns.begin_window(4)
    for k in range(4):
        model.use_second = k == 0
        micro(gns, model, rows(k), torch.ones(4), last=k == 3)
    result = gns.finish(gns.local_sums().tolist(), float(gns.grad_sq()))
    assert isinstance(result, Window)
    assert (result.between, result.within) == (None, None)


def test_pairs_are_unknown_where_the_gradient_is_not_the_running_sum() -> None:
    model = Switch()
    gns = GradientNoiseScale(model)
    for uses_second in ([True, True, True], [True, False, True]):
        model.zero_grad()
        gns.begin_window(3, pairs=True)
        for k, uses in enumerate(uses_second):
            model.use_second = uses
            micro(gns, model, rows(k), torch.ones(4), last=k == 2)
        norms = gns.pair_norms()
        assert norms is not None
        assert norms[:, 2].isfinite().tolist() == uses_second
    gns.begin_window(1)
    assert gns.pair_norms() is None


def test_a_backward_between_micro_batches_does_not_disturb_the_middle() -> None:
    model = Switch()
    gns = GradientNoiseScale(model)
    gns.begin_window(4)
    for k in range(4):
        model.use_second = True
        torch.autograd.grad(loss_sum(model, rows(k), torch.ones(4)), list(model.parameters()))
        model.use_second = False
        micro(gns, model, rows(k), torch.ones(4), last=k == 3)
    result = gns.finish(gns.local_sums().tolist(), float(gns.grad_sq()))
    assert isinstance(result, Window)
    assert result.between is not None


def test_hooks_that_never_run_are_a_fault_and_closing_removes_them(model: nn.Module, gns: GradientNoiseScale) -> None:
    gns.close()
    window(gns, model, 2)
    assert gns.step() == {"gns/skipped": 1.0}
