"""The training objective: the components of the loss, their sum, and loss and accuracy by type of the target token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from trainer.arrays import IGNORED
from trainer.errors import UserError

COMPONENTS = ("token_ce", "z_loss", "coord")
"""Names of all components."""


class ObjectiveError(RuntimeError):
    """An enabled component of the loss cannot be computed.

    Args:
        component: name of the component.
        problem: the reason.
        meta: the micro-batch's `instability_meta_json`, which locates its data; None if it has none.
    """

    def __init__(self, component: str, problem: str, meta: object) -> None:
        self.component = component
        self.problem = problem
        self.meta = meta
        batch = "unknown" if meta is None else meta
        super().__init__(f"objective component {component}: {problem}; batch: {batch}")


class Term(NamedTuple):
    """A component's contribution to one micro-batch."""

    sum: Tensor
    """Summand of the loss sum: a scalar, float32 or wider, the component's weight included."""

    num_tokens: Tensor
    """Number of tokens (of a loss by rows, of rows) that it applies to: a scalar, int64."""


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
        _require("coord.first_token", self.first_token, self.first_token >= 0, ">= 0")
        _require("coord.num_bins", self.num_bins, self.num_bins >= 2, ">= 2")
        _require("coord.sigma", self.sigma, 0 < self.sigma < math.inf, "positive and finite")
        _require("coord.weight", self.weight, 0 <= self.weight < math.inf, ">= 0 and finite")


def _require(key: str, value: float, is_right: bool, rule: str) -> None:
    if not is_right:
        raise UserError(f"objective.{key}", f"must be {rule}, got {value}")


def coord(prepared: Prepared, settings: CoordSettings, meta: object) -> Term:
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

    metrics: Mapping[str, Any] | None = None
    """Those of the model's output."""

    @property
    def num_correct(self) -> Tensor:
        """Number of correct predictions: a scalar, int64."""
        return self.is_correct.sum()


class Loss(Protocol):
    """What computes the loss of a model's output [B, T, ...] against targets int64 [B, T]; see `Objective`."""

    def __call__(self, output: Tensor, targets: Tensor, /, *, meta: object = None) -> ObjectiveOutput: ...


class Objective:
    """The loss: cross entropy plus the enabled components.

    Args:
        z_loss: coefficient of the z-loss; 0 disables it.
        coord: settings for the supervision of ordered-bin tokens; None disables it.

    Raises:
        UserError: the coefficient is negative or not finite.
    """

    def __init__(self, *, z_loss: float = 0.0, coord: CoordSettings | None = None) -> None:
        _require("z_loss", z_loss, 0 <= z_loss < math.inf, ">= 0 and finite")
        self._z_loss = z_loss
        self._coord = coord

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the enabled components."""
        return ("token_ce",) + ("z_loss",) * (self._z_loss > 0) + ("coord",) * (self._coord is not None)

    def __call__(self, logits: Tensor, targets: Tensor, *, meta: object = None) -> ObjectiveOutput:
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
        terms = {"token_ce": Term(prepared.token_loss.sum(), prepared.mask.sum())}
        if self._z_loss > 0:
            terms["z_loss"] = z_loss(prepared, self._z_loss)
        if self._coord is not None:
            terms["coord"] = coord(prepared, self._coord, meta)
        sums, _ = zip(*terms.values(), strict=True)
        for name, term in terms.items():
            terms[name] = Term(term.sum.detach(), term.num_tokens)
        return ObjectiveOutput(
            loss_sum=torch.stack(sums).sum(),
            num_tokens=terms["token_ce"].num_tokens,
            parts=terms,
            token_loss=prepared.token_loss.detach(),
            is_correct=prepared.logits.detach().argmax(-1) == targets,
        )


class TokenTypeMismatch(ValueError):
    """The token types do not match the batch; the caller skips the diagnostic for this batch."""


class TokenTypeSums(NamedTuple):
    """Sums over one micro-batch by token type, on the device; each [num_types]."""

    loss: Tensor
    num_correct: Tensor
    num_tokens: Tensor


def token_type_sums(
    token_loss: Tensor, is_correct: Tensor, token_types: Tensor, num_types: int, *, mask: Tensor | None = None
) -> TokenTypeSums:
    """Sum loss, correct predictions and targets by the type of the target.

    Args:
        token_loss: loss of each target, [B, T].
        is_correct: bool [B, T].
        token_types: type of each target, integers [B, T]; values outside 0..num_types-1 (such as -1) are not counted.
        num_types: number of types.
        mask: bool [B, T], False where the target is masked: such a position has no loss and must not count, whatever its
            type. None: the types say it, as -1.

    Raises:
        TokenTypeMismatch: the shapes differ.
    """
    if not token_loss.shape == is_correct.shape == token_types.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (token_loss, is_correct, token_types))
        raise TokenTypeMismatch(f"losses, predictions and token types must have the same shape, got {shapes}")
    types = torch.arange(num_types, device=token_types.device)
    # A masked sum, not a scatter: its order of additions is fixed on every device.
    belongs = token_types.reshape(-1, 1) == types  # [B * T, num_types]
    if mask is not None:
        belongs &= mask.reshape(-1, 1)
    loss = token_loss.detach().reshape(-1, 1).masked_fill(~belongs, 0.0).sum(0)
    return TokenTypeSums(loss, (belongs & is_correct.reshape(-1, 1)).sum(0), belongs.sum(0))
