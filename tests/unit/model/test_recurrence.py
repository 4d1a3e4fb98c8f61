"""The scan and the chunked gated delta rule against step-by-step oracles, and the gate coefficients at their limits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.model.gated_delta import DeltaMixer, gated_delta_rule, short_convolution
from trainer.model.recurrence import gated_coefficients, linear_scan


def sequential_scan(a: Tensor, b: Tensor, h0: Tensor) -> Tensor:
    """The definition: one position after the other."""
    h, states = h0, []
    for t in range(a.shape[1]):
        h = a[:, t] * h + b[:, t]
        states.append(h)
    return torch.stack(states, dim=1)


def inputs(num_steps: int, dtype: torch.dtype, batch: int = 2, dim: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_steps)
    a = torch.rand(batch, num_steps, dim, generator=generator, dtype=dtype)
    b = torch.randn(batch, num_steps, dim, generator=generator, dtype=dtype)
    h0 = torch.randn(batch, dim, generator=generator, dtype=dtype)
    return a.requires_grad_(), b.requires_grad_(), h0.requires_grad_()


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 7, 16, 17, 61, 256])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_scan_and_its_gradients_equal_the_sequential_recurrence(
    num_steps: int, dtype: torch.dtype, tolerance: float
) -> None:
    args = inputs(num_steps, dtype)
    weight = torch.randn(2, num_steps, 3, generator=torch.Generator().manual_seed(1), dtype=dtype)
    got, expected = linear_scan(*args), sequential_scan(*args)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    got_grads = torch.autograd.grad((got * weight).sum(), args)
    expected_grads = torch.autograd.grad((expected * weight).sum(), args)
    torch.testing.assert_close(got_grads, expected_grads, rtol=tolerance, atol=tolerance)


def test_scan_passes_gradcheck_and_opcheck() -> None:
    args = inputs(7, torch.float64)
    assert torch.autograd.gradcheck(linear_scan, args)
    detached = tuple(each.detach() for each in args)
    for is_reversed in (False, True):
        torch.library.opcheck(torch.ops.trainer.linear_scan.default, (*detached, is_reversed))


def test_zero_decay_is_exactly_a_restart() -> None:
    a, b, h0 = (x.detach() for x in inputs(30, torch.float32))
    a[:, 11] = 0.0
    h0[:] = 1e30
    after = linear_scan(a, b, h0)[:, 11:]
    torch.testing.assert_close(after, linear_scan(a[:, 11:], b[:, 11:], torch.zeros_like(h0)), rtol=1e-5, atol=1e-6)
    assert (after.abs() < 1e3).all()


def test_decays_that_underflow_stay_finite() -> None:
    a = torch.full((1, 4096, 2), 1e-20).requires_grad_()
    b = torch.ones(1, 4096, 2).requires_grad_()
    h = linear_scan(a, b, torch.ones(1, 2))
    h.sum().backward()
    torch.testing.assert_close(h, torch.ones_like(h))
    assert torch.isfinite(a.grad).all()
    assert torch.isfinite(b.grad).all()


def test_coefficients_equal_the_papers_formula_with_their_gradients() -> None:
    leaves = [torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    leaves.append(torch.randn(4, dtype=torch.float64, requires_grad=True))
    r, i, x, decay = leaves
    resets = torch.rand(2, 5) < 0.3
    a, b = gated_coefficients(r, i, x, decay, resets)
    # The paper writes a = sigmoid(-Lambda)^(c * sigmoid(r)) with the other sign of Lambda.
    plain_a = torch.sigmoid(-decay) ** (8.0 * torch.sigmoid(r))
    expected = plain_a * ~resets.unsqueeze(-1), torch.sqrt(1 - plain_a**2) * torch.sigmoid(i) * x
    torch.testing.assert_close(a, expected[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(b, expected[1], rtol=1e-9, atol=1e-12)
    weights = [torch.randn_like(a), torch.randn_like(b)]
    ours, others = (torch.autograd.grad(each, leaves, weights) for each in ((a, b), expected))
    torch.testing.assert_close(ours, others, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rate", [-200.0, 0.0, 200.0])
@pytest.mark.parametrize("gate", [-200.0, -100.0, 100.0])
def test_saturated_gates_have_finite_gradients(gate: float, rate: float) -> None:
    r = torch.full((1, 3, 2), gate, requires_grad=True)
    x = torch.ones(1, 3, 2, requires_grad=True)
    decay = torch.full((2,), rate, requires_grad=True)
    a, b = gated_coefficients(r, r, x, decay, None)
    (a.sum() + b.sum()).backward()
    assert all((leaf.grad.abs() < 100).all() for leaf in (r, x, decay))


def test_resets_zero_the_decay_and_leave_the_input() -> None:
    r, i, x = torch.randn(3, 1, 4, 2).unbind(0)
    resets = torch.tensor([[False, True, False, True]])
    plain_a, plain_b = gated_coefficients(r, i, x, torch.zeros(2), None)
    a, b = gated_coefficients(r, i, x, torch.zeros(2), resets)
    assert torch.equal(b, plain_b)
    assert torch.equal(a, plain_a * ~resets.unsqueeze(-1))
    assert (a[0, 1] == 0).all()


def make_case(
    seed: int, length: int, *, strongest: float = 0.5, resets: float = 0.0
) -> tuple[list[Tensor], Tensor | None]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    rows, heads, key, value = 2, 2, 5, 4
    keys = F.normalize(normal(rows, heads, length, key), dim=-1)
    inputs = [normal(rows, heads, length, key), keys, normal(rows, heads, length, value)]
    gates = [-strongest * uniform(rows, heads, length), uniform(rows, heads, length)]
    arguments = [*inputs, *gates, normal(rows, heads, key, value)]
    is_reset = uniform(rows, length) < resets if resets else None
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
    strongest=st.sampled_from([0.1, 5.0, 400.0]),
)
def test_chunks_of_any_length_equal_the_recurrence_with_their_gradients(seed, length, chunk, resets, strongest):
    """Also where decays underflow: 400 nats a step leave nothing of the state."""
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
    mixer.norm.eps = torch.finfo(torch.float32).eps  # the default depends on the type
    mixer.inputs.weight.data = torch.cat([torch.eye(32)[torch.randperm(32)] for _ in range(3)])
    mixer.output_gate.weight.data = mixer.out.weight.data = torch.eye(32)
    mixer.gates.weight.data.zero_()
    (inputs, weights), found = torch.randn(2, 2, 70, 32).bfloat16(), []
    for dtype in (torch.float32, torch.float64):
        x = inputs.to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            output, state = mixer.to(dtype)(x, None, None, None)
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
    for row in range(2):
        start = 0
        for t in range(20):
            if is_reset[row, t] and resets:
                start = t
            expected = sum(taps[j] * x[row, t - j] for j in range(4) if t - j >= start)
            torch.testing.assert_close(found[row, t], expected)
        visible = [x[row, t] if t >= start else torch.zeros(3, dtype=torch.float64) for t in (17, 18, 19)]
        torch.testing.assert_close(recent[row], torch.stack(visible))
