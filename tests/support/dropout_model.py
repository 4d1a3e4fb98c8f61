"""A model with dropout, a parameter that nothing uses and one that is used twice, and a state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainer.model.protocol import ModelOutput


class DropoutModel(nn.Module):
    """Maps tokens to logits by sums over time, from its state."""

    resets_in_one_pass = True

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.state_width = dim
        self.embedding = nn.Embedding(vocab_size, dim)
        self.inner = nn.Linear(dim, dim)
        self.unused = nn.Parameter(torch.ones(3))
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(dim, vocab_size)

    def forward(
        self, tokens: Tensor, state: Tensor | None = None, resets: Tensor | None = None, words: Any = None
    ) -> ModelOutput:
        """A row with a reset starts from nothing; words say nothing."""
        x = self.dropout(self.inner(self.embedding(tokens)))
        if state is not None:
            fresh = 1.0 if resets is None else (~resets.any(1, keepdim=True)).float()
            x = x + (fresh * state)[:, None]
        x = self.inner(x.cumsum(1).tanh())
        return ModelOutput(self.head(x), x[:, -1])


class WaitingModel(DropoutModel):
    """Waits for its device: asks whether there is a reset at all."""

    def forward(self, tokens: Tensor, state: Tensor | None = None, resets: Tensor | None = None) -> ModelOutput:  # type: ignore[override]
        """As if there were none, if there is none."""
        return super().forward(tokens, state, resets if resets is not None and bool(resets.any()) else None)


def build_waiting(vocab_size: int, dim: int, num_layers: int, **_: Any) -> WaitingModel:
    """For `model.target`."""
    return WaitingModel(vocab_size, dim)


def build(vocab_size: int, dim: int, num_layers: int, **_: Any) -> DropoutModel:
    """For `model.target`."""
    return DropoutModel(vocab_size, dim)
