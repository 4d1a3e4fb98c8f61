"""The chunked gated delta rule against the recurrence that defines it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.model.gated_delta import gated_delta_rule, short_convolution


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
