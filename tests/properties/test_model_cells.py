"""The central property of the model: a sequence run in cells with carried state equals the sequence run whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainer.data.batch import accepted_inputs
from trainer.model import build
from trainer.model.gated_delta import build as build_gated_delta
from trainer.model.state_layout import carry_flat

VOCAB = 13


def gated_delta(*sizes: int) -> nn.Module:
    return carry_flat(build_gated_delta(*sizes, heads=2))


BUILDERS = pytest.mark.parametrize("builder", [build, gated_delta], ids=["rglru", "gated_delta"])


def new_model(builder: Callable[..., nn.Module], seed: int, num_layers: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(seed)
    return builder(VOCAB, 8, num_layers).to(dtype)


@BUILDERS
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1000),
    num_layers=st.integers(1, 3),
    batch=st.integers(1, 3),
    cells=st.lists(st.integers(1, 23), min_size=1, max_size=6),
    has_resets=st.booleans(),
)
def test_cells_with_carried_state_equal_the_uncut_run(
    builder: Callable[..., nn.Module],
    dtype: torch.dtype,
    tolerance: float,
    seed: int,
    num_layers: int,
    batch: int,
    cells: list[int],
    has_resets: bool,
) -> None:
    model = new_model(builder, seed, num_layers, dtype)
    inputs = {"tokens": torch.randint(0, VOCAB, (batch, sum(cells)))}
    # A model need not accept resets: it gets them only with packed rows.
    if has_resets and "resets" in accepted_inputs(model):
        inputs["resets"] = torch.rand(batch, sum(cells)) < 0.1
    initial = torch.randn(batch, model.state_width, dtype=dtype)

    whole = model(**inputs, state=initial)
    state, logits, start = initial, [], 0
    for length in cells:
        window = slice(start, start + length)
        out = model(**{name: values[:, window] for name, values in inputs.items()}, state=state)
        state, start = out.state, start + length
        logits.append(out.logits)
    torch.testing.assert_close(torch.cat(logits, 1), whole.logits, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(state, whole.state, rtol=tolerance, atol=tolerance)


@BUILDERS
@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1000), first=st.integers(1, 20), second=st.integers(1, 20))
def test_gradients_of_a_cell_equal_those_of_the_uncut_run_from_a_detached_state(
    builder: Callable[..., nn.Module], seed: int, first: int, second: int
) -> None:
    model = new_model(builder, seed, 2, torch.float64)
    row = torch.randint(0, VOCAB, (2, first + second))
    weight = torch.randn(2, second, VOCAB, dtype=torch.float64)

    carried = model(row[:, :first]).state
    leaf = carried.detach().requires_grad_()
    (model(row[:, first:], leaf).logits * weight).sum().backward()
    in_cell = [p.grad.clone() for p in model.parameters()]

    # Undetached, the chain rule through the carried state must give the uncut run's gradient exactly.
    carried.backward(leaf.grad)
    chained = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    (model(row).logits[:, first:] * weight).sum().backward()
    uncut = [p.grad for p in model.parameters()]
    torch.testing.assert_close(chained, uncut, rtol=1e-8, atol=1e-9)
    assert any(not torch.allclose(a, b) for a, b in zip(in_cell, uncut, strict=True))
