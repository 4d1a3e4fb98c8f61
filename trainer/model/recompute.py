"""Activation checkpointing block by block (Chen et al. 2016, arXiv 1604.06174)."""

from __future__ import annotations

import functools

from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.errors import UserError


def recompute_blocks(model: nn.Module) -> None:
    """Have the backward run each of `model.blocks` again from its input, instead of keeping its activations.

    A block must give the same when it is called again with the same inputs: one that writes into them, or into itself, would
    get another gradient (the contract's checks would show it).

    Raises:
        UserError: the model has no `nn.ModuleList` of that name.
    """
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.ModuleList) or not len(blocks):
        problem = f'is "block", but {type(model).__name__} has no nn.ModuleList named blocks'
        fix = 'choose "off", or name it so in a model of your own'
        raise UserError("train.activation_checkpointing", problem, fix)
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
