"""Sums by token type against a loop over the tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.objective import TokenTypeMismatch, token_type_sums


@settings(max_examples=25, deadline=None, derandomize=True)
@given(types=st.lists(st.integers(-1, 4), min_size=1, max_size=30), seed=st.integers(0, 99))
def test_sums_equal_a_loop_over_the_tokens(types: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    loss = torch.rand(1, len(types), generator=generator)
    correct = torch.rand(1, len(types), generator=generator) < 0.5
    sums = token_type_sums(loss, correct, torch.tensor([types], dtype=torch.int8), 4)
    for kind in range(4):
        members = [i for i, other in enumerate(types) if other == kind]
        assert sums.num_tokens[kind] == len(members)
        assert sums.num_correct[kind] == sum(bool(correct[0, i]) for i in members)
        assert sums.loss[kind].item() == pytest.approx(sum(loss[0, i].item() for i in members), rel=1e-5)


def test_losses_of_uncounted_tokens_cannot_poison_the_sums() -> None:
    loss = torch.tensor([[1.0, float("nan")]])
    sums = token_type_sums(loss, torch.tensor([[True, False]]), torch.tensor([[0, -1]]), 2)
    assert sums.loss.tolist() == [1.0, 0.0]


def test_types_of_another_length_raise_what_the_guard_skips() -> None:
    with pytest.raises(TokenTypeMismatch, match=r"same shape, got \(1, 3\), \(1, 3\), \(1, 2\)"):
        token_type_sums(torch.zeros(1, 3), torch.zeros(1, 3, dtype=torch.bool), torch.zeros(1, 2), 2)
    assert issubclass(TokenTypeMismatch, ValueError)
