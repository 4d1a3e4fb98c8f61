"""The central property of the model: a sequence run in cells with carried state equals the sequence run whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainer.data.batch import accepted_inputs
from trainer.lab.gated_delta import build as build_gated_delta
from trainer.lab.nested_state import carry_flat
from trainer.model import build

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
