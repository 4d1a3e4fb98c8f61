"""Loss and accuracy by type of the target token: a diagnostic, not part of the loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TokenTypeMismatch(ValueError):
    """The token types do not match the batch; the caller skips the diagnostic for this batch."""


class TokenTypeSums(NamedTuple):
    """Sums over one micro-batch by token type, on the device; each [num_types]."""

    loss: Tensor
    num_correct: Tensor
    num_tokens: Tensor


def token_type_sums(
    token_loss: Tensor, is_correct: Tensor, token_types: Tensor, num_types: int, *, mask: Tensor | None = None
) -> TokenTypeSums:
    """Sum loss, correct predictions and targets by the type of the target.

    Args:
        token_loss: loss of each target, [B, T].
        is_correct: bool [B, T].
        token_types: type of each target, integers [B, T]; values outside 0..num_types-1 (such as -1) are not counted.
        num_types: number of types.
        mask: bool [B, T], False where the target is masked: such a position has no loss and must not count, whatever its
            type. None: the types say it, as -1.

    Raises:
        TokenTypeMismatch: the shapes differ.
    """
    if not token_loss.shape == is_correct.shape == token_types.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (token_loss, is_correct, token_types))
        raise TokenTypeMismatch(f"losses, predictions and token types must have the same shape, got {shapes}")
    types = torch.arange(num_types, device=token_types.device)
    # A masked sum, not a scatter: its order of additions is fixed on every device.
    belongs = token_types.reshape(-1, 1) == types  # [B * T, num_types]
    if mask is not None:
        belongs &= mask.reshape(-1, 1)
    loss = token_loss.detach().reshape(-1, 1).masked_fill(~belongs, 0.0).sum(0)
    return TokenTypeSums(loss, (belongs & is_correct.reshape(-1, 1)).sum(0), belongs.sum(0))
