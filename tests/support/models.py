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


class Float64(nn.Module):
    """A GRU with dropout in float64, so that only the order of sums can differ."""

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.state_width = dim
        self.embedding = nn.Embedding(vocab_size, dim)
        self.dropout = nn.Dropout(0.3)
        self.cell = nn.GRUCell(dim, dim)
        self.head = nn.Linear(dim, vocab_size)
        self.double()

    def forward(self, tokens: Tensor, state: Tensor | None = None, resets: Tensor | None = None) -> ModelOutput:
        inputs = self.dropout(self.embedding(tokens))
        carried = inputs.new_zeros(len(tokens), self.state_width) if state is None else state.double()
        found = []
        for position in range(tokens.shape[1]):
            if resets is not None:
                carried = carried.masked_fill(resets[:, position, None], 0.0)
            carried = self.cell(inputs[:, position], carried)
            found.append(carried)
        return ModelOutput(self.head(torch.stack(found, dim=1)), carried)


def float64(vocab_size: int, dim: int, num_layers: int) -> Float64:
    """For `[model] target`."""
    return Float64(vocab_size, dim)
