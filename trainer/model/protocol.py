"""The interface between the trainer and a model: the `SequenceModel` protocol and the `ModelOutput` that it returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol, runtime_checkable

from torch import Tensor
from torch.nn import Parameter

GATE_SHARPNESS: Final = 8.0
"""The constant c of `a = exp(-c * softplus(Lambda) * sigmoid(r))`, as in De et al. 2024 (arXiv 2402.19427)."""


class ModelOutput(NamedTuple):
    """The result of one forward pass."""

    logits: Tensor
    """Scores over the vocabulary, [B, T, V]; row t predicts `targets[:, t]`."""

    state: Tensor | None
    """The state after each row's last position, [B, state_width]; None from a model without state. A model without
    `state_width` may return any nest of tensors [B, ...], see `trainer.model.state_layout`."""


@runtime_checkable
class SequenceModel(Protocol):
    """A `torch.nn.Module` that predicts the next token and may carry a state from one cell of a group to the next.

    A model with `state_width == 0` has no state: it receives `state=None` and returns `state=None`. A model that lacks the
    attribute and returns no state breaks its contract (`trainer.contracts`).

    Required: a `torch.nn.Module` with `state_width` and a `forward` that takes `tokens` and `state` by name and returns
    an object with `.logits` and `.state`. Without `state_width`, `carry_flat` of `trainer.model.state_layout` finds it and
    lets a state be any nest of tensors; `[model] target` and `family` do. Optional: `flops_per_token` (without it no MFU is
    logged), `resets`, which is passed only with `data.pack = true`, and `shard_units()`, the modules that FSDP gathers one by
    one. `train check` runs one forward pass.
    """

    state_width: int
    """Size of one group's state; 0: the model has no state."""

    def flops_per_token(self, seq_len: int) -> float:
        """Floating-point operations per trained token, forward and backward; a multiply-add counts as two. Optional."""
        ...

    def __call__(self, tokens: Tensor, state: Tensor | None = None, resets: Tensor | None = None) -> ModelOutput:
        """Run `tokens` (int64 [B, T]) starting from `state` ([B, state_width]; None: zero).

        `resets` (bool [B, T]; None: nowhere) is True where the state resets to zero inside a row. Optional: it is passed
        by name and only with packed rows, so a model for other data need not accept it.
        """
        ...

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """Same as `torch.nn.Module.parameters`."""
        ...
