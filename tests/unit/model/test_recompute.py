"""Activation checkpointing by blocks keeps every number, and the inputs of blocks alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from trainer.errors import UserError
from trainer.model import build, gated_delta, transformer
from trainer.model.wrappers import recompute_blocks


def saved_numbers(model: nn.Module, tokens: Tensor) -> tuple[int, list[Tensor]]:
    """Numbers that the forward keeps for the backward beside parameters, and the gradients."""
    kept: dict[int, int] = {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
        return tensor

    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(tokens=tokens).logits.square().mean()
    loss.backward()
    return sum(kept.values()), [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("make", [build, gated_delta.build, transformer.build])
def test_gradients_are_equal_and_less_is_kept(make):
    torch.manual_seed(0)
    model = make(31, 64, 4)
    tokens = torch.randint(31, (3, 40))
    plain, expected = saved_numbers(model, tokens)
    recompute_blocks(model)
    for each in (model, copy.deepcopy(model)):
        kept, gradients = saved_numbers(each, tokens)
        torch.testing.assert_close(gradients, expected, rtol=0, atol=0)
        assert kept < 0.3 * plain
        assert all(isinstance(block.forward.args[0].__self__, type(block)) for block in each.blocks)
        assert [block.forward.args[0].__self__ for block in each.blocks] == list(each.blocks)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(UserError, match=r"train.activation_checkpointing: .* Linear has no nn.ModuleList named blocks"):
        recompute_blocks(nn.Linear(2, 2))
