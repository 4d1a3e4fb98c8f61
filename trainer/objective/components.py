"""The components of the loss: pure functions of the logits and targets of one micro-batch.

Each returns its sum over the tokens that it applies to and their number, so that a mean over micro-batches and ranks is
the mean over all tokens. All compute in float32 or wider and keep their results on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.arrays import IGNORED
from trainer.errors import UserError


class ObjectiveError(RuntimeError):
    """An enabled component of the loss cannot be computed.

    Args:
        component: name of the component.
        problem: the reason.
        meta: the micro-batch's `instability_meta_json`, which locates its data; None if it has none.
    """

    def __init__(self, component: str, problem: str, meta: str | None) -> None:
        self.component = component
        self.problem = problem
        self.meta = meta
        super().__init__(
            f"objective component {component}: {problem}; batch: {meta if meta is not None else 'unknown'}"
        )


class Term(NamedTuple):
    """A component's contribution to one micro-batch."""

    sum: Tensor
    """Summand of the loss sum: a scalar, float32 or wider, the component's weight included."""

    num_tokens: Tensor
    """Number of tokens that it applies to: a scalar, int64."""


class Prepared(NamedTuple):
    """Tensors that the components share, computed once."""

    logits: Tensor
    """[B, T, V], float32 or wider."""

    log_normalizer: Tensor
    """logsumexp of the logits, [B, T]."""

    targets: Tensor
    """[B, T], int64; `IGNORED` where masked."""

    mask: Tensor
    """[B, T], False where masked."""

    token_loss: Tensor
    """Cross entropy -log p(target) in nats, [B, T], 0 where masked."""


def prepare(logits: Tensor, targets: Tensor) -> Prepared:
    """Upcast the logits [B, T, V] and compute the cross entropy of the targets [B, T]."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_normalizer = torch.logsumexp(logits, dim=-1)
    mask = targets != IGNORED
    index = targets.masked_fill(~mask, 0).unsqueeze(-1)
    token_loss = (log_normalizer - logits.gather(-1, index).squeeze(-1)).masked_fill(~mask, 0.0)
    return Prepared(logits, log_normalizer, targets, mask, token_loss)


def token_ce(prepared: Prepared) -> Term:
    """The cross entropy, summed over the unmasked targets."""
    return Term(prepared.token_loss.sum(), prepared.mask.sum())


def z_loss(prepared: Prepared, coefficient: float) -> Term:
    """`coefficient * logsumexp(logits)^2`, summed over the unmasked targets.

    It keeps the softmax normalizer near 1 (Chowdhery et al. 2022, "PaLM", arXiv 2204.02311, section 5).
    """
    squares = prepared.log_normalizer.square().masked_fill(~prepared.mask, 0.0)
    return Term(coefficient * squares.sum(), prepared.mask.sum())


@dataclass(frozen=True, kw_only=True)
class CoordSettings:
    """The tokens that are ordered bins, and their supervision.

    Bin k is token id `first_token + k`, for k in 0..num_bins-1.

    Raises:
        UserError: a value is out of range.
    """

    first_token: int
    num_bins: int
    sigma: float
    """Standard deviation of the soft targets, in bins."""

    weight: float = 1.0
    """Weight of the component in the loss."""

    def __post_init__(self) -> None:
        if self.first_token < 0:
            raise UserError("objective.coord.first_token", f"must be >= 0, got {self.first_token}")
        if self.num_bins < 2:
            raise UserError("objective.coord.num_bins", f"must be >= 2, got {self.num_bins}")
        if not 0 < self.sigma < float("inf"):
            raise UserError("objective.coord.sigma", f"must be positive and finite, got {self.sigma}")
        if not 0 <= self.weight < float("inf"):
            raise UserError("objective.coord.weight", f"must be >= 0 and finite, got {self.weight}")


def coord(prepared: Prepared, settings: CoordSettings, meta: str | None) -> Term:
    """Distributional supervision of the targets that are bins, summed and weighted.

    With p the softmax over the bins alone, k the true bin and n the number of bins, each such target costs

        -sum_j q_j log p_j + sum_j p_j |j - k| / n,    q_j proportional to exp(-(j - k)^2 / (2 sigma^2)).

    The first term is the cross entropy against soft targets around the true bin. The second is the 1-Wasserstein
    distance from p to the point mass at k, in units of the whole range: all mass must move to k, so the distance is the
    expected |j - k|.

    Raises:
        ObjectiveError: bins exceed the vocabulary.
    """
    vocab_size = prepared.logits.shape[-1]
    stop = settings.first_token + settings.num_bins
    if stop > vocab_size:
        raise ObjectiveError("coord", f"bins end at token {stop - 1}, but the vocabulary at {vocab_size - 1}", meta)
    true_bin = prepared.targets - settings.first_token  # [B, T]
    applies = prepared.mask & (true_bin >= 0) & (true_bin < settings.num_bins)
    log_p = prepared.logits[..., settings.first_token : stop].log_softmax(-1)  # [B, T, n]
    bins = torch.arange(settings.num_bins, device=log_p.device, dtype=log_p.dtype)
    # Other targets are treated as bin 0 and masked below, so that no shape depends on how many there are.
    offset = bins - true_bin.masked_fill(~applies, 0).unsqueeze(-1)  # [B, T, n]
    q = torch.softmax(-0.5 * (offset / settings.sigma).square(), dim=-1)
    soft_cross_entropy = -(q * log_p).sum(-1)
    distance = (log_p.exp() * offset.abs()).sum(-1) / settings.num_bins
    per_token = (soft_cross_entropy + distance).masked_fill(~applies, 0.0)
    return Term(settings.weight * per_token.sum(), applies.sum())
