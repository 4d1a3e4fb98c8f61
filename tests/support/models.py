"""Models for tests, named by import path in configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.model.protocol import ModelOutput


def pretrained(family: str, directory: Path, vocab_size: int, **settings: Any) -> str:
    """The setting `model.args.from` of a new small model of `transformers`, written to a directory."""
    from scripts import families
    from trainer.lab.hugging_face import save

    ends = {"pad_token_id": None, "bos_token_id": vocab_size - 1, "eos_token_id": vocab_size - 1}
    if family == "kimi_linear":
        settings |= {"linear_num_heads": 4, "linear_head_dim": 8, "mlp_layer_types": ["dense"] * 2}
        settings["layer_types"] = ["linear_attention"] * 2
    save(families.small(family, vocab_size=vocab_size, **ends, **settings), directory)
    return str(directory)


class DropoutModel(nn.Module):
    """Without state, but with randomness of its own in training."""

    state_width = 0

    def __init__(self, vocab_size: int, dim: int, num_layers: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> ModelOutput:
        return ModelOutput(self.head(self.dropout(self.embedding(tokens))), None)


class Childless(nn.Module):
    """All parameters are the model's own: it has no part that could be gathered by itself."""

    state_width = 0

    def __init__(self, vocab_size: int, dim: int, num_layers: int = 1) -> None:
        super().__init__()
        self.inputs, self.outputs = (nn.Parameter(torch.randn(vocab_size, dim)) for _ in range(2))

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> ModelOutput:
        return ModelOutput(nn.functional.embedding(tokens, self.inputs) @ self.outputs.T, None)


class Scaled(DropoutModel):
    """With a parameter that has no rows."""

    def __init__(self, vocab_size: int, dim: int, num_layers: int = 1) -> None:
        super().__init__(vocab_size, dim)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> ModelOutput:
        return ModelOutput(self.scale * self.head(self.embedding(tokens)), None)


class Float64(nn.Module):
    """A GRU with dropout in float64, so that only the order of sums can differ."""

    def __init__(self, vocab_size: int, dim: int, num_layers: int = 1) -> None:
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


class StatefulDropout(nn.Module):
    """Sums over time, from its state, with dropout, a parameter that nothing uses and one that is used twice."""

    resets_in_one_pass = True

    def __init__(self, vocab_size: int, dim: int, num_layers: int = 1) -> None:
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


class WaitingModel(StatefulDropout):
    """Waits for its device: asks whether there is a reset at all."""

    def forward(self, tokens: Tensor, state: Tensor | None = None, resets: Tensor | None = None) -> ModelOutput:  # type: ignore[override]
        """As if there were none, if there is none."""
        return super().forward(tokens, state, resets if resets is not None and bool(resets.any()) else None)
