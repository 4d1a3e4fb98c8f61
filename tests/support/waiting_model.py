"""A model that waits for its device."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.support.dropout_model import DropoutModel
from trainer.model.protocol import ModelOutput


class WaitingModel(DropoutModel):
    """Asks whether there is a reset at all."""

    def forward(self, tokens: Tensor, state: Tensor | None = None, resets: Tensor | None = None) -> ModelOutput:
        """As if there were none, if there is none."""
        return super().forward(tokens, state, resets if resets is not None and bool(resets.any()) else None)


def build(vocab_size: int, dim: int, num_layers: int, **_: Any) -> WaitingModel:
    """For `model.target`."""
    return WaitingModel(vocab_size, dim)
