"""The loss computed a few tokens at a time, so that logits of all tokens never exist together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from trainer.objective.loss import Objective, ObjectiveError, ObjectiveOutput, Term


class ChunkedObjective:
    """An `Objective` of what enters the output layer, [B, T, D].

    Logits are computed for `chunk_tokens` tokens at a time, in the forward and again in the backward: one more product with
    the output layer's weight, for memory that does not grow with the number of tokens times the vocabulary. All results are
    those of the plain objective up to the order of additions; gradients of the output layer are added up in float32.

    Args:
        objective: of logits.
        head: the output layer: [n, D] -> [n, V].
        chunk_tokens: tokens whose logits exist together, at least 1.
    """

    def __init__(self, objective: Objective, head: nn.Module, *, chunk_tokens: int) -> None:
        assert chunk_tokens >= 1, chunk_tokens
        self._objective = objective
        self._head = head
        self._chunk_tokens = chunk_tokens

    def __call__(self, hidden: Tensor, targets: Tensor, *, meta: object = None) -> ObjectiveOutput:
        """As `Objective`, of hidden [B, T, D] and targets int64 [B, T].

        Raises:
            ObjectiveError: an enabled component cannot be computed.
        """
        if hidden.shape[:-1] != targets.shape:
            shapes = f"outputs {tuple(hidden.shape)} do not fit targets {tuple(targets.shape)}"
            raise ObjectiveError("token_ce", shapes, meta)
        names, weights = zip(*self._head.named_parameters(), strict=True)
        of_chunk, chunks = partial(self._of_chunk, meta=meta, names=names), list[ObjectiveOutput]()
        flat = hidden.flatten(0, -2), targets.flatten()
        loss_sum = _SumOfChunks.apply(of_chunk, self._chunk_tokens, chunks, *flat, *weights)  # type: ignore[no-untyped-call]
        terms = {
            name: Term(*(torch.stack([chunk.parts[name][i] for chunk in chunks]).sum() for i in range(2)))
            for name in chunks[0].parts
        }

        def whole(kind: str) -> Any:
            found = [getattr(chunk, kind) for chunk in chunks]
            return None if found[0] is None else torch.cat(found, dim=1).view(targets.shape)

        return ObjectiveOutput(
            loss_sum=loss_sum,
            num_tokens=torch.stack([chunk.num_tokens for chunk in chunks]).sum(),
            parts=terms,
            token_loss=whole("token_loss"),
            is_correct=whole("is_correct"),
        )

    def _of_chunk(
        self, hidden: Tensor, targets: Tensor, weights: list[Tensor], *, meta: object, names: tuple[str, ...]
    ) -> ObjectiveOutput:
        logits = functional_call(self._head, dict(zip(names, weights, strict=True)), (hidden,))
        return self._objective(logits[None], targets[None], meta=meta)  # one row, for a loss of the user's own


class _SumOfChunks(torch.autograd.Function):
    """The sum of the chunks' losses; the backward computes each chunk again.

    Weights are converted once to the type in which autocast uses them. Left to autograd, their gradients would be added up over
    the chunks in that type: with bf16 and many chunks, rare tokens' rows would lose most of theirs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        of_chunk: Callable[..., ObjectiveOutput],
        chunk_tokens: int,
        chunks: list[ObjectiveOutput],
        hidden: Tensor,
        targets: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        """Fills `chunks`, in the order of the tokens."""
        device = hidden.device.type
        is_on, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        ctx.autocast = partial(torch.autocast, device, dtype, enabled=is_on)
        ctx.dtype = dtype if is_on else None
        ctx.of_chunk, ctx.chunk_tokens = of_chunk, chunk_tokens
        ctx.save_for_backward(hidden, targets, *weights)
        used = _as_used(weights, ctx.dtype)
        parts = zip(*(torch.split(each, chunk_tokens) for each in (hidden, targets)), strict=True)
        chunks += [of_chunk(*part, used) for part in parts]
        return torch.stack([chunk.loss_sum for chunk in chunks]).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of hidden and weights, from the last chunk to the first, as autograd would."""
        hidden, targets, *weights = ctx.saved_tensors
        leaves = _as_used(weights, ctx.dtype)
        needs = ctx.needs_input_grad[5:]
        trained = [leaf.requires_grad_() for leaf, is_needed in zip(leaves, needs, strict=True) if is_needed]
        sums: list[Tensor] = []
        of_hidden = torch.empty_like(hidden)
        parts = zip(*(torch.split(each, ctx.chunk_tokens) for each in (hidden, targets, of_hidden)), strict=True)
        for part, of_part, out in reversed(list(parts)):
            entering = part.detach().requires_grad_()
            with torch.enable_grad(), ctx.autocast():
                loss_sum = ctx.of_chunk(entering, of_part, leaves).loss_sum
            of_entering, *found = torch.autograd.grad(loss_sum, [entering, *trained], grad, materialize_grads=True)
            out.copy_(of_entering)
            if sums:
                sums = [total.add_(each) for total, each in zip(sums, found, strict=True)]
            else:
                sums = [each.to(torch.promote_types(each.dtype, torch.float32)) for each in found]
            del found  # before the next chunk's are there
        own = iter(sums)
        return (None, None, None, of_hidden, None, *(next(own) if is_needed else None for is_needed in needs))


def _as_used(weights: tuple[Tensor, ...] | list[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
    """Leaves with the numbers of the weights, in the type `dtype` of an autocast that is on, which leaves float64 alone."""
    return [
        each.detach() if dtype is None or each.dtype == torch.float64 else each.detach().to(dtype) for each in weights
    ]
