"""Carry through the ledger: sequences cut into cells, in batches of any make-up, equal the sequences run whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from trainer.lab.gated_delta import build as build_gated_delta
from trainer.lab.nested_state import carry_flat
from trainer.ledger import Ledger, LedgerOptions
from trainer.model import ModelOutput, build

VOCAB = 13


@dataclass(frozen=True)
class Case:
    """Groups of one token row each, cut into cells, and the micro-batches in which the cells come."""

    tokens: Tensor  # [G, T]
    resets: Tensor | None  # [G, T]
    bounds: list[int]  # where each cell begins, and the end
    batches: list[tuple[int, list[int]]]  # a cell, and the groups of which it comes


def make_case(seed: int, *, num_groups: int, cell_lengths: list[int], has_resets: bool) -> Case:
    """Groups of all the same cell lengths (rows of a batch must be equally long), started and visited at random.

    At each step some of the groups that stand at the same cell come, in any order, so that a group's neighbours in the
    batch, its row and the steps that it waits all vary.
    """
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    shape = (num_groups, sum(cell_lengths))
    bounds = np.cumsum([0, *cell_lengths]).tolist()
    done = [0] * num_groups
    batches = []
    while min(done) < len(cell_lengths):
        index = int(rng.choice([cell for cell in done if cell < len(cell_lengths)]))
        ready = rng.permutation([group for group in range(num_groups) if done[group] == index])
        chosen = ready[: int(rng.integers(1, len(ready) + 1))].tolist()
        batches.append((index, chosen))
        for group in chosen:
            done[group] += 1
    tokens = torch.randint(0, VOCAB, shape, generator=generator)
    resets = torch.rand(shape, generator=generator) < 0.15 if has_resets else None
    return Case(tokens, resets, bounds, batches)


def run(model: nn.Module, case: Case, rows: list[int], span: slice, state: Tensor | None) -> ModelOutput:
    resets = {} if case.resets is None else {"resets": case.resets[rows, span]}
    return model(tokens=case.tokens[rows, span], state=state, **resets)


def gated_delta(*sizes: int) -> nn.Module:
    return carry_flat(build_gated_delta(*sizes, heads=2))


def check_outputs(case: Case, model: nn.Module, tolerance: float, dtype: torch.dtype) -> None:
    """Logits and states of every cell are those of the uncut run."""
    num_groups = len(case.tokens)
    whole = run(model, case, list(range(num_groups)), slice(None), None)
    # As many slots as groups in flight: each group that ends makes room for another.
    ledger = Ledger(LedgerOptions(capacity=num_groups), state_width=model.state_width, dtype=dtype)
    for step, (cell, rows) in enumerate(case.batches, start=1):
        groups, index = np.array(rows) + 1000, np.full(len(rows), cell)
        span, is_last = slice(*case.bounds[cell : cell + 2]), cell == len(case.bounds) - 2
        ledger.begin_step(step)
        output = run(model, case, rows, span, ledger.lookup(groups, index))
        torch.testing.assert_close(output.logits, whole.logits[rows, span], rtol=tolerance, atol=tolerance)
        if is_last:
            torch.testing.assert_close(output.state, whole.state[rows], rtol=tolerance, atol=tolerance)
        ledger.store(groups, index, np.full(len(rows), is_last), output.state)
    metrics = ledger.drain_metrics()
    assert metrics["ledger/cold_starts"] == metrics["ledger/evictions/lru"] == metrics["ledger/live_groups"] == 0


CASES = {
    "seed": st.integers(0, 10_000),
    "num_groups": st.integers(1, 5),
    "cell_lengths": st.lists(st.integers(1, 23), min_size=1, max_size=6),
    "has_resets": st.booleans(),
}


@pytest.mark.parametrize("builder", [build, gated_delta], ids=["rglru", "gated_delta"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 5e-5)])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(num_layers=st.integers(1, 3), **CASES)
def test_outputs_and_states_through_the_ledger_equal_the_uncut_run(
    builder: Callable[..., nn.Module], dtype: torch.dtype, tolerance: float, num_layers: int, seed: int, **kinds: object
) -> None:
    torch.manual_seed(seed)
    model = builder(VOCAB, 8, num_layers).to(dtype)
    check_outputs(make_case(seed, **kinds), model, tolerance, dtype)
