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


class Layered(DropoutModel):
    """Residual layers, the first of which has something wrong with it.

    Args:
        cuts_off: no gradient reaches the first layer.
        multiplier: of the first layer's output; its weights begin that much smaller.
    """

    def __init__(self, vocab_size: int, dim: int, num_layers: int, *, cuts_off: bool, multiplier: float) -> None:
        super().__init__(vocab_size, dim)
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(num_layers))
        self.cuts_off, self.multiplier = cuts_off, multiplier
        with torch.no_grad():
            for parameter in self.layers[0].parameters():
                parameter /= multiplier

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> ModelOutput:
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            y = torch.tanh(layer(x) * (self.multiplier if number == 0 else 1.0))
            x = x + (y.detach() if number == 0 and self.cuts_off else y)
        return ModelOutput(self.head(x), None)


def layered(vocab_size: int, dim: int, num_layers: int, cuts_off: bool = False, multiplier: float = 1.0) -> Layered:
    """For `[model] target`."""
    return Layered(vocab_size, dim, num_layers, cuts_off=cuts_off, multiplier=multiplier)
