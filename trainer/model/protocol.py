"""What a model must offer to be trained here: the `SequenceModel` protocol and the `ModelOutput` it returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor
from torch.nn import Parameter


class ModelOutput(NamedTuple):
    """What one forward pass returns."""

    logits: Tensor
    """Scores over the vocabulary, [B, T, V]; row t predicts `targets[:, t]`."""

    state: Tensor | None
    """The state after each row's last position, [B, state_width]; None from a model without state."""


@runtime_checkable
class SequenceModel(Protocol):
    """A `torch.nn.Module` that predicts the next token and may carry a state from one cell of a group to the next.

    A model with `state_width == 0` carries none: it is given `state=None` and returns `state=None`.

    Needed: to be a `torch.nn.Module`, `state_width`, and a `forward` that takes `tokens` and `state` by name and returns
    something with `.logits` and `.state`. Optional: `flops_per_token` (without it no MFU is logged), and
    `resets`, which is passed only with `data.pack = true`. `train check` tries one forward pass.
    """

    state_width: int
    """Numbers in one group's state; 0: the model has no state."""

    def flops_per_token(self, seq_len: int) -> float:
        """Floating-point operations per trained token (forward and backward, a multiply-add counts as two). Optional."""
        ...

    def __call__(self, tokens: Tensor, state: Tensor | None = None, resets: Tensor | None = None) -> ModelOutput:
        """Run `tokens` (int64 [B, T]) on from `state` ([B, state_width]; None: from zero).

        `resets` (bool [B, T]; None: nowhere) is True where the model starts again from zero inside a row. Optional: it is
        passed by name only where rows are packed, so a model for other data need not take it.
        """
        ...

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """As `torch.nn.Module.parameters`."""
        ...
