"""Models for tests, named by import path in configs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer.model.protocol import ModelOutput


class DropoutModel(nn.Module):
    """Without state, but with randomness of its own in training."""

    state_width = 0

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> ModelOutput:
        return ModelOutput(self.head(self.dropout(self.embedding(tokens))), None)


def dropout(vocab_size: int, dim: int, num_layers: int) -> DropoutModel:
    """For `[model] target`."""
    return DropoutModel(vocab_size, dim)


class NoHead(DropoutModel):
    """Its output layer has a name that nobody knows."""

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__(vocab_size, dim)
        self.unembedding = self.head
        del self.head

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> ModelOutput:
        return ModelOutput(self.unembedding(self.embedding(tokens)), None)


def no_head(vocab_size: int, dim: int, num_layers: int) -> NoHead:
    """For `[model] target`."""
    return NoHead(vocab_size, dim)


class Scaled(DropoutModel):
    """With a parameter that has no rows."""

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__(vocab_size, dim)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> ModelOutput:
        return ModelOutput(self.scale * self.head(self.embedding(tokens)), None)


def scaled(vocab_size: int, dim: int, num_layers: int) -> Scaled:
    """For `[model] target`."""
    return Scaled(vocab_size, dim)
