"""A model without its output layer, for a loss that computes the logits itself, a part at a time."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import UserError
from trainer.metrics.logger import get_logger

logger = get_logger(__name__)

KEY = "objective.chunk_tokens"
FEW_TOKENS = 8


def run_few_tokens(model: nn.Module, device: torch.device, *, seq_len: int, below: int = 1) -> Any:
    """The output of one row of a few tokens; of a whole cell, where the model takes no such row.

    Args:
        seq_len: tokens of a cell.
        below: token ids are.
    """
    few, cell = (torch.arange(length, device=device)[None] % below for length in (FEW_TOKENS, seq_len))
    try:
        return model(tokens=few, state=None)
    except Exception:  # noqa: BLE001 - a model of the user's own may raise anything
        return model(tokens=cell, state=None)


def output_layer(model: nn.Module) -> nn.Linear:
    """The layer that gives the logits: what `model.get_output_embeddings()` returns (as in `transformers`), or `model.head`.

    Raises:
        UserError: there is none, or it is not an `nn.Linear`.
    """
    getter = getattr(model, "get_output_embeddings", None)
    layer = getter() if getter is not None else getattr(model, "head", None)
    if not isinstance(layer, nn.Linear):
        problem = f"the model's output layer is not known ({type(model).__name__} has no nn.Linear named head)"
        raise UserError(KEY, problem, "name it head, or return it from get_output_embeddings(); or set 0")
    return layer


class Headless(nn.Module):
    """A model whose output has, instead of logits, what enters its output layer: [B, T, D].

    Args:
        model: implements `trainer.model.protocol`. It is itself as before when it is called without this wrapper.
        head: its output layer, which must be the last thing that a forward computes.
    """

    def __init__(self, model: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.model = model
        self._heads = [head]  # in a list: its parameters are the model's already

    def forward(self, **inputs: Any) -> Any:
        """Run the model; `output.logits` is [B, T, D], in whatever type the model gives it."""
        (head,) = self._heads
        head.forward = _as_it_is  # type: ignore[method-assign, assignment]
        try:
            return self.model(**inputs)
        finally:
            del head.forward


def _as_it_is(hidden: Tensor) -> Tensor:
    return hidden


@torch.no_grad()
def refuse_more_than_a_head(model: nn.Module, head: nn.Linear, device: torch.device, *, seq_len: int) -> None:
    """Refuse a model that does something to its logits, which a headless one would leave out.

    Args:
        seq_len: tokens of a cell.

    Raises:
        UserError: its logits for a few tokens are not what its output layer makes of the headless model's output.
    """
    try:
        inspect.signature(model.forward).bind(tokens=None, state=None)
    except TypeError:
        logger.warning(
            "%s: the model takes inputs that only the data have, so it was not seen whether it does more to its "
            "logits than its output layer",
            KEY,
        )
        return
    was_training = model.training
    model.eval()
    try:
        logits = run_few_tokens(model, device, seq_len=seq_len, below=head.out_features).logits
        hidden = run_few_tokens(Headless(model, head), device, seq_len=seq_len, below=head.out_features).logits
    finally:
        model.train(was_training)
    is_same = hidden.shape == (*logits.shape[:-1], head.in_features)
    if is_same:
        again = head(hidden.to(head.weight.dtype))
        is_same = again.shape == logits.shape and bool((again - logits).abs().amax() <= 1e-5 * logits.abs().amax())
    if not is_same:
        problem = "the model's logits are not those of its output layer: it scales, caps or changes them afterwards"
        raise UserError(KEY, problem, "set it to 0")
