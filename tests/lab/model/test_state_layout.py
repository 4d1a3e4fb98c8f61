"""Structured states: flat and back, whatever their nest, and refused where the batch is not first."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_leaves, tree_structure

from trainer.errors import UserError
from trainer.lab.nested_state import NestLayout, carry_flat
from trainer.model.protocol import ModelOutput

FLOATS = (torch.float32, torch.bfloat16)
SHAPES = st.lists(st.integers(1, 3), max_size=3).map(tuple)
DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
]
NESTS = st.recursive(
    st.tuples(SHAPES, st.sampled_from(DTYPES)).map(lambda leaf: ("leaf", *leaf)),
    lambda inner: st.lists(inner, min_size=1, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, min_size=1),
    max_leaves=5,
)


def filled(nest: Any, rows: int) -> Any:
    if isinstance(nest, tuple):
        _, shape, dtype = nest
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(rows, *shape, dtype=dtype)
        return torch.randint(-(2**62), 2**62, (rows, *shape)).to(dtype)
    return (
        [filled(each, rows) for each in nest]
        if isinstance(nest, list)
        else {k: filled(v, rows) for k, v in nest.items()}
    )


@given(nest=NESTS, rows=st.integers(1, 4))
def test_any_nest_comes_back_bit_for_bit(nest, rows):
    layout, state = NestLayout(filled(nest, 2)), filled(nest, rows)
    flat = layout.flatten(state)
    assert flat.shape == (rows, layout.width)
    assert flat.dtype in (torch.float32, torch.float64)
    found = layout.unflatten(flat)
    assert tree_structure(found) == tree_structure(state)
    for one, other in zip(tree_leaves(found), tree_leaves(state), strict=True):
        assert torch.equal(one.to(other.dtype), other)
        double = {torch.complex64: torch.complex128} if other.is_complex() else dict.fromkeys(FLOATS, torch.float64)
        assert one.dtype == (double.get(other.dtype, other.dtype) if flat.dtype == torch.float64 else other.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_ledger_of_any_dtype_keeps_integers_exactly(dtype):
    counts = torch.tensor([0, -1, 2**24 + 1, 2**63 - 1])
    layout = NestLayout(counts)
    assert torch.equal(layout.unflatten(layout.flatten(counts).to(dtype).float()), counts)


def test_gradients_pass_through_complex_and_real_leaves():
    state = (torch.randn(2, 3, dtype=torch.complex64, requires_grad=True), torch.randn(2, requires_grad=True))
    layout = NestLayout(state)
    found = layout.unflatten(layout.flatten((*state,)))
    (found[0].abs().square().sum() + found[1].sum()).backward()
    torch.testing.assert_close(state[0].grad, 2 * state[0].detach())
    assert torch.equal(state[1].grad, torch.ones(2))


def test_a_state_of_another_layout_is_refused():
    layout = NestLayout([torch.zeros(2, 3), torch.zeros(2, 4)])
    for second in (torch.zeros(2, 3), None):
        with pytest.raises(ValueError, match=r"another layout than state\[0\] \[3\], state\[1\] \[4\]"):
            layout.flatten([torch.zeros(2, 3), second])
    assert layout.to_json() == [["state[0]", [3]], ["state[1]", [4]]]


class Stateful(nn.Module):
    """Adds up what it has read, and returns the sum in a nest of its own."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.weight, self.make = nn.Parameter(torch.ones(5, 5)), make

    def forward(self, tokens: torch.Tensor, state: Any = None) -> ModelOutput:
        sums = self.weight[tokens].cumsum(1)
        if state is not None:
            sums = sums + state["sum"][:, None]
        return ModelOutput(sums, self.make(sums[:, -1]))


def test_a_module_with_a_nest_carries_rows_and_stays_what_it_was():
    model = carry_flat(Stateful(lambda end: {"sum": end}))
    assert (model.state_width, list(model.state_dict())) == (5, ["weight"])
    tokens = torch.arange(10).reshape(2, 5) % 5
    whole = model(tokens=tokens, state=None)
    first = model(tokens=tokens[:, :2])
    for second in (model(tokens=tokens[:, 2:], state=first.state), model(tokens[:, 2:], first.state)):
        torch.testing.assert_close(second.state, whole.state)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.weight.zero_()
    assert float(copied(tokens=tokens).state.abs().sum()) == 0.0
    assert float(model(tokens=tokens).state.abs().sum()) > 0.0


class Takes48(Stateful):
    def forward(self, tokens: torch.Tensor, state: Any = None) -> ModelOutput:
        if tokens.shape[1] != 48:
            raise RuntimeError(f"wants 48 tokens, got {tokens.shape[1]}")
        return super().forward(tokens, state)


def test_the_layout_is_found_at_a_length_that_the_model_takes():
    assert carry_flat(Takes48(lambda end: {"sum": end}), seq_len=48).state_width == 5
    with pytest.raises(RuntimeError, match="got 50"):  # the error is that of the length that a run has
        carry_flat(Takes48(lambda end: {"sum": end}), seq_len=50)


def test_a_state_that_is_missing_later_is_told_as_missing():
    model = carry_flat(Stateful(lambda end: {"sum": end}))
    model.make = lambda end: None
    rows = torch.zeros(2, 5)
    with pytest.raises(ValueError, match=r"it returns no state in train\(\); .* state\['sum'\] \[5\]"):
        model(tokens=torch.zeros(2, 4, dtype=torch.long), state=rows)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda end: {"sum": end.t()}, r"state\['sum'\] \[2\] does not have the batch as"),
        (lambda end: [end] * len(end), "does not have the batch as its first"),
        (lambda end: {"sum": end[0]}, "does not have the batch as its first dimension"),
        (lambda end: (end, 3), r"state\[1\] is a int, not a tensor"),
        (lambda end: (end, torch.zeros(7, 2)), "every tensor needs the batch as its first dimension"),
        (lambda end: [], "it holds no tensor"),
    ],
)
def test_what_cannot_be_kept_per_row_is_refused_with_its_place(make, problem):
    with pytest.raises(UserError, match=problem):
        carry_flat(Stateful(make))
