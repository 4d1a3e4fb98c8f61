"""The noise scale on the device: its sums are those of a separate backward for each micro-batch, to 1e-5."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from tests.support.gns_windows import loss_sum, make_model, rows
from tests.support.on_device import synchronization_forbidden
from trainer.metrics.noise_scale import estimate as noise_scale
from trainer.metrics.noise_scale.hooks import GradientNoiseScale
from trainer.model import build

pytestmark = pytest.mark.cuda


def flat(model: nn.Module) -> Tensor:
    """All gradients in one vector, float64 on the CPU."""
    return torch.cat([p.grad.double().cpu().flatten() for p in model.parameters() if p.grad is not None])


def weights_of(k: int, device: torch.device) -> Tensor:
    """Weights of the rows of micro-batch k."""
    return torch.tensor([1.0, 2.0, 0.0, 5.0 + k], device=device)


@pytest.mark.parametrize("is_bf16", [False, True])
def test_sums_of_the_built_in_model_equal_separate_backwards(device: torch.device, is_bf16: bool) -> None:
    torch.manual_seed(1)
    model = build(33, dim=32, num_layers=2).to(device)
    tokens = torch.randint(33, (3, 4, 17), generator=torch.Generator().manual_seed(2)).to(device)
    gns = GradientNoiseScale(model)

    def backward(k: int) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=is_bf16):
            logits = model(tokens[k, :, :-1]).logits
        nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[k, :, 1:].flatten()).backward()

    gns.begin_window(3)
    for k in range(3):
        gns.begin_micro(last=k == 2)
        backward(k)
        gns.end_micro(1.0, 4)
    found = gns.local_sums().tolist()
    alone = []
    for k in range(3):
        model.zero_grad()
        backward(k)
        alone.append(flat(model))
    expected = sum(float(gradient.square().sum()) for gradient in alone)
    assert found[noise_scale.SMALL_SQUARE] == pytest.approx(expected, rel=1e-5)


def test_a_window_does_not_wait_for_the_device(device: torch.device) -> None:
    model = make_model().to(device)
    gns = GradientNoiseScale(model)
    inputs = [rows(k).to(device) for k in range(4)]
    weights = weights_of(0, device)
    for number in range(3):
        with torch.no_grad():
            kappa = 0.1 * weights.sum()
        with synchronization_forbidden(device) if number else nullcontext():
            gns.begin_window(4, spread=4, by_rank=number == 2)
            for k in range(4):
                gns.begin_micro(k == 3, groups={k}, rows_before=1.0)
                (0.1 * loss_sum(model, inputs[k], weights)).backward()
                gns.end_micro(kappa, weights)
            sums = gns.local_sums()
        model.zero_grad()
        gns.finish(sums.tolist(), 1.0, grad_factor=1.0)
