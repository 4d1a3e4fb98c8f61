"""Composes the loss from its enabled components."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trainer.errors import UserError
from trainer.objective.components import (
    CoordSettings,
    ObjectiveError,
    Term,
    coord,
    prepare,
    token_ce,
    z_loss,
)


@dataclass(frozen=True, kw_only=True)
class ObjectiveOutput:
    """The loss of one micro-batch and its parts, as tensors on the logits' device."""

    loss_sum: Tensor
    """Sum of all parts: a scalar with a gradient. The window's loss is the sum of these over micro-batches and ranks,
    divided by the sum of `num_tokens`."""

    num_tokens: Tensor
    """Number of unmasked targets: a scalar, int64."""

    parts: dict[str, Term]
    """Component name -> (sum, count), detached; the sums add up to `loss_sum`."""

    token_loss: Tensor
    """Cross entropy of each target, [B, T], detached, 0 where masked."""

    is_correct: Tensor
    """Whether the most likely token is the target, bool [B, T], False where masked."""

    @property
    def num_correct(self) -> Tensor:
        """Number of correct predictions: a scalar, int64."""
        return self.is_correct.sum()


class Loss(Protocol):
    """What computes the loss of a model's output [B, T, ...] against targets int64 [B, T]; see `Objective`."""

    def __call__(self, output: Tensor, targets: Tensor, /, *, meta: str | None = None) -> ObjectiveOutput: ...


class Objective:
    """The loss: cross entropy plus the enabled components.

    Args:
        z_loss: coefficient of the z-loss; 0 disables it.
        coord: settings for the supervision of ordered-bin tokens; None disables it.

    Raises:
        UserError: the coefficient is negative or not finite.
    """

    def __init__(self, *, z_loss: float = 0.0, coord: CoordSettings | None = None) -> None:
        if not 0 <= z_loss < float("inf"):
            raise UserError("objective.z_loss", f"must be >= 0 and finite, got {z_loss}")
        self._z_loss = z_loss
        self._coord = coord

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the enabled components."""
        return ("token_ce",) + ("z_loss",) * (self._z_loss > 0) + ("coord",) * (self._coord is not None)

    def __call__(self, logits: Tensor, targets: Tensor, *, meta: str | None = None) -> ObjectiveOutput:
        """Compute the loss of logits [B, T, V] against targets int64 [B, T] (`IGNORED` where masked).

        `meta` is the batch's `instability_meta_json`, for the message if a component fails. A non-finite loss is
        returned like any other; the optimizer step handles it.

        Raises:
            ObjectiveError: an enabled component cannot be computed.
        """
        if logits.shape[:-1] != targets.shape:
            shapes = f"logits {tuple(logits.shape)} do not fit targets {tuple(targets.shape)}"
            raise ObjectiveError("token_ce", shapes, meta)
        prepared = prepare(logits, targets)
        terms = {"token_ce": token_ce(prepared)}
        if self._z_loss > 0:
            terms["z_loss"] = z_loss(prepared, self._z_loss)
        if self._coord is not None:
            terms["coord"] = coord(prepared, self._coord, meta)
        return ObjectiveOutput(
            loss_sum=torch.stack([term.sum for term in terms.values()]).sum(),
            num_tokens=terms["token_ce"].num_tokens,
            parts={name: Term(term.sum.detach(), term.num_tokens) for name, term in terms.items()},
            token_loss=prepared.token_loss.detach(),
            is_correct=prepared.logits.detach().argmax(-1) == targets,
        )
