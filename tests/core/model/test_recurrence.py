"""The scan and the chunked gated delta rule against step-by-step oracles, and the gates at their limits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.lab.gated_delta import DeltaMixer, gated_delta_rule, short_convolution
from trainer.model.recurrence import gated_scan


def step_by_step(
    r: Tensor, i: Tensor, x: Tensor, decay: Tensor, resets: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition, one position after the other."""
    # The paper writes a = sigmoid(-Lambda)^(c * sigmoid(r)) with the other sign of Lambda.
    log_a = 8.0 * torch.sigmoid(r) * F.logsigmoid(-decay)
    b = torch.sqrt(-torch.expm1(2.0 * log_a)) * torch.sigmoid(i) * x
    a = log_a.exp() if resets is None else log_a.exp() * ~resets.unsqueeze(-1)
    states = []
    for t in range(x.shape[1]):
        state = a[:, t] * state + b[:, t]
        states.append(state)
    return torch.stack(states, dim=1), state


def inputs(num_steps: int, dtype: torch.dtype, share: float = 0.1) -> list[Tensor]:
    """Of `gated_scan`; some rates are so small, others so large that decays are close to 1 or underflow."""
    draw = torch.Generator().manual_seed(num_steps)
    r, i, x = (2.0 * torch.randn(3, 2, num_steps, 3, generator=draw, dtype=dtype)).unbind(0)
    decay, state = torch.tensor([-9.0, -3.0, 9.0], dtype=dtype), torch.randn(2, 3, generator=draw, dtype=dtype)
    leaves = [each.clone().requires_grad_() for each in (r, i, x, decay, state)]
    return [*leaves[:4], torch.rand(2, num_steps, generator=draw) < share, leaves[4]]


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 7, 16, 17, 61, 256])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 2e-5)])
def test_scan_and_its_gradients_equal_the_recurrence(num_steps: int, dtype: torch.dtype, tolerance: float) -> None:
    given = inputs(num_steps, dtype)
    found, expected = gated_scan(*given), step_by_step(*given)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=dtype) for x in found]
    leaves = [each for each in given if each.requires_grad]
    ours, others = (torch.autograd.grad(each, leaves, weights) for each in (found, expected))
    torch.testing.assert_close(ours, others, rtol=tolerance, atol=10 * tolerance)


def test_scan_passes_gradcheck_and_opcheck() -> None:
    *given, resets, state = inputs(7, torch.float64)
    assert torch.autograd.gradcheck(lambda *leaves: gated_scan(*leaves[:4], resets, leaves[4]), (*given, state))
    a, b, state = given[0].detach().sigmoid(), given[2].detach(), state.detach()
    torch.library.opcheck(torch.ops.trainer.linear_scan.default, (a, b, state, True))


@pytest.mark.parametrize("rate", [-200.0, 0.0, 200.0])
@pytest.mark.parametrize("gate", [-200.0, -100.0, 100.0])
def test_saturated_gates_have_finite_gradients(gate: float, rate: float) -> None:
    r, x = (torch.full((1, 300, 2), each, requires_grad=True) for each in (gate, 1.0))
    decay = torch.full((2,), rate, requires_grad=True)
    h, _ = gated_scan(r, r, x, decay, None, torch.ones(1, 2))
    h.mean().backward()
    assert torch.isfinite(h).all()
    assert all((leaf.grad.abs() < 10).all() for leaf in (r, x, decay))


def make_case(
    seed: int, length: int, *, strongest: float = 0.5, resets: float = 0.0
) -> tuple[list[Tensor], Tensor | None]:
    drawn = {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float64}
    queries, keys, values = torch.randn(3, 2, 2, length, 5, **drawn)
    decay, rate = torch.rand(2, 2, 2, length, **drawn)
    inputs = [queries, F.normalize(keys, dim=-1), values[..., :4].clone(), -decay.where(decay < 0.8, strongest), rate]
    arguments = [*inputs, torch.randn(2, 2, 5, 4, **drawn)]
    is_reset = torch.rand(2, length, **drawn) < resets if resets else None
    return [argument.requires_grad_() for argument in arguments], is_reset


def rule_by_steps(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    state: Tensor,
    resets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`gated_delta_rule` position by position, as its first formula says."""
    outputs = []
    for t in range(queries.shape[2]):
        if resets is not None:
            state = state.masked_fill(resets[:, t, None, None, None], 0.0)
        k, v, b = keys[:, :, t, :, None], values[:, :, t, None, :], rate[:, :, t, None, None]
        state = log_decay[:, :, t, None, None].exp() * state
        state = state - b * k @ (k.transpose(-1, -2) @ state) + b * k @ v
        outputs.append(queries[:, :, t, None, :] @ state)
    return torch.cat(outputs, dim=2), state


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    length=st.integers(1, 70),
    chunk=st.integers(1, 40),
    resets=st.sampled_from([0.0, 0.1, 0.6]),
    strongest=st.sampled_from([0.1, 5.0, 1e9]),
)
def test_chunks_of_any_length_equal_the_recurrence_with_their_gradients(seed, length, chunk, resets, strongest):
    """Also where decays underflow: 1e9 nats a step leave nothing of the state, and do not round those behind them."""
    arguments, is_reset = make_case(seed, length, strongest=strongest, resets=resets)
    found = gated_delta_rule(*arguments, is_reset, chunk=chunk)
    expected = rule_by_steps(*arguments, is_reset)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    gradients = [
        torch.autograd.grad(outputs.square().sum() + state.sin().sum(), arguments)
        for outputs, state in (found, expected)
    ]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_autocast_rounds_nothing_between_the_projections_and_the_norm(seed):
    """Against float64, with projections that bf16 represents: channels in another order."""
    torch.manual_seed(seed)
    mixer, unit = DeltaMixer(32, heads=2), torch.finfo(torch.bfloat16).eps / 2
    mixer.init_weights(1.0)
    mixer.inputs.weight.data = torch.cat([torch.eye(32)[torch.randperm(32)] for _ in range(3)])
    mixer.output_gate.weight.data = mixer.out.weight.data = torch.eye(32)
    mixer.gates.weight.data.zero_()
    (inputs, weights), found = torch.randn(2, 2, 70, 32).bfloat16(), []
    for dtype in (torch.float32, torch.float64):
        x = inputs.to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            output, state = mixer.to(dtype)(x, None, None)
        gradients = torch.autograd.grad((output * weights).sum(), [x, mixer.taps])
        found.append([each.double() for each in (state["memory"], output, *gradients)])
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-6)
    # Gate, normed output and their product are rounded once each; gradients six times, each by unit^2 / 3 in the mean square.
    torch.testing.assert_close(found[0][1], found[1][1], rtol=(1 + unit) ** 3 - 1, atol=1e-6)
    for gradient, exact in zip(found[0][2:], found[1][2:], strict=True):
        assert (gradient - exact).norm() < (6 / 3) ** 0.5 * unit * exact.norm()


@pytest.mark.parametrize("resets", [0.0, 0.3])
def test_the_short_convolution_is_that_of_documents_apart(resets):
    generator = torch.Generator().manual_seed(0)
    x, taps = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((2, 20, 3), (4, 3)))
    is_reset = torch.rand(2, 20, generator=generator) < resets
    found, recent = short_convolution(x, taps, torch.zeros(2, 3, 3, dtype=torch.float64), is_reset if resets else None)
    assert recent.untyped_storage().nbytes() == recent.nbytes  # a carried state does not hold the row
    for row in range(2):
        start = 0
        for t in range(20):
            if is_reset[row, t] and resets:
                start = t
            expected = sum(taps[j] * x[row, t - j] for j in range(4) if t - j >= start)
            torch.testing.assert_close(found[row, t], expected)
        visible = [x[row, t] if t >= start else torch.zeros(3, dtype=torch.float64) for t in (17, 18, 19)]
        torch.testing.assert_close(recent[row], torch.stack(visible))
