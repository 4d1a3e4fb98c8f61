"""The loss computed a few tokens at a time, so that logits of all tokens never exist together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trainer.objective.loss import Objective, ObjectiveError, ObjectiveOutput, Term


class ChunkedObjective:
    """An `Objective` of what enters the output layer, [B, T, D].

    Logits are computed for `chunk_tokens` tokens at a time, in the forward and again in the backward: one more product with
    the output layer's weight, for memory that does not grow with the number of tokens times the vocabulary. All results are
    those of the plain objective up to the order of additions.

    Args:
        objective: of logits.
        head: the output layer: [n, D] -> [n, V].
        chunk_tokens: tokens whose logits exist together, at least 1.
    """

    def __init__(self, objective: Objective, head: Callable[[Tensor], Tensor], *, chunk_tokens: int) -> None:
        assert chunk_tokens >= 1, chunk_tokens
        self._objective = objective
        self._head = head
        self._chunk_tokens = chunk_tokens

    def __call__(self, hidden: Tensor, targets: Tensor, *, meta: str | None = None) -> ObjectiveOutput:
        """As `Objective`, of hidden [B, T, D] and targets int64 [B, T].

        Raises:
            ObjectiveError: an enabled component cannot be computed.
        """
        if hidden.shape[:-1] != targets.shape:
            shapes = f"outputs {tuple(hidden.shape)} do not fit targets {tuple(targets.shape)}"
            raise ObjectiveError("token_ce", shapes, meta)
        # `split`: its backward joins the parts once, where that of a slice would make a whole tensor for each.
        parts: Any = torch.split(hidden.flatten(0, -2), self._chunk_tokens)
        chunks: list[ObjectiveOutput] = [
            checkpoint(self._of_chunk, *pair, meta, use_reentrant=False, preserve_rng_state=False)
            for pair in zip(parts, torch.split(targets.flatten(), self._chunk_tokens), strict=True)
        ]
        terms = {
            name: Term(*(torch.stack([chunk.parts[name][i] for chunk in chunks]).sum() for i in range(2)))
            for name in chunks[0].parts
        }
        return ObjectiveOutput(
            loss_sum=torch.stack([chunk.loss_sum for chunk in chunks]).sum(),
            num_tokens=torch.stack([chunk.num_tokens for chunk in chunks]).sum(),
            parts=terms,
            token_loss=torch.cat([chunk.token_loss for chunk in chunks]).view(targets.shape),
            is_correct=torch.cat([chunk.is_correct for chunk in chunks]).view(targets.shape),
        )

    def _of_chunk(self, hidden: Tensor, targets: Tensor, meta: str | None) -> ObjectiveOutput:
        return self._objective(self._head(hidden), targets, meta=meta)
