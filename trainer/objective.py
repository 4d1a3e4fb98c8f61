"""The training objective: components of the loss, their sum, and results by type of token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from trainer.arrays import IGNORED, is_known
from trainer.errors import UserError
from trainer.import_path import users_code
from trainer.metrics.best_effort import BestEffort, SkipBatch
from trainer.options import CoordOptions, ObjectiveOptions
from trainer.wording import few, metrics_problem

COMPONENTS = ("token_ce", "z_loss", "coord")
"""Names of all built-in components; "own" is that of a custom loss."""


class ObjectiveError(RuntimeError):
    """An enabled component of the loss cannot be computed.

    `meta`: the micro-batch's `instability_meta_json`, which locates its data, or None.
    """

    def __init__(self, component: str, problem: str, meta: object) -> None:
        batch = "unknown" if meta is None else meta
        super().__init__(f"objective component {component}: {problem}; batch: {batch}")


class Term(NamedTuple):
    """A component's contribution to one micro-batch."""

    sum: Tensor
    """Summand of the loss sum, the component's weight included: [], float32 or wider."""
    num_tokens: Tensor
    """Number of tokens (of a loss by rows, of rows) that it applies to: [], int64."""


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
    # In 16 bits the normalizer of a large vocabulary would lose the small terms.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_normalizer = torch.logsumexp(logits, dim=-1)
    mask = targets != IGNORED
    index = targets.masked_fill(~mask, 0).unsqueeze(-1)
    token_loss = (log_normalizer - logits.gather(-1, index).squeeze(-1)).masked_fill(~mask, 0.0)
    return Prepared(logits, log_normalizer, targets, mask, token_loss)


def z_loss(prepared: Prepared, coefficient: float) -> Term:
    """`coefficient * logsumexp(logits)^2`, summed over the unmasked targets.

    It keeps the softmax normalizer near 1 (Chowdhery et al. 2022, arXiv 2204.02311, section 5).
    """
    squares = prepared.log_normalizer.square().masked_fill(~prepared.mask, 0.0)
    return Term(coefficient * squares.sum(), prepared.mask.sum())


def coord(prepared: Prepared, settings: CoordOptions, meta: object) -> Term:
    """Distributional supervision of the targets that are bins, summed and weighted.

    With p the softmax over the bins alone, k the true bin, n the number of bins, each such target
    costs

        -sum_j q_j log p_j + sum_j p_j |j - k| / n,
        q_j proportional to exp(-(j - k)^2 / (2 sigma^2)).

    The first term is the cross entropy against soft targets around the true bin, the second the
    1-Wasserstein distance from p to the point mass at k: all mass must move to k. Raises
    ObjectiveError: bins exceed the vocabulary.
    """
    vocab_size = prepared.logits.shape[-1]
    stop = settings.first_token + settings.num_bins
    if stop > vocab_size:
        problem = f"bins end at token {stop - 1}, but the vocabulary at {vocab_size - 1}"
        raise ObjectiveError("coord", problem, meta)
    true_bin = prepared.targets - settings.first_token  # [B, T]
    applies = prepared.mask & (true_bin >= 0) & (true_bin < settings.num_bins)
    log_p = prepared.logits[..., settings.first_token : stop].log_softmax(-1)  # [B, T, n]
    bins = torch.arange(settings.num_bins, device=log_p.device, dtype=log_p.dtype)
    # Other targets are treated as bin 0 and masked below: no shape depends on their number.
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
    """Sum of all parts: [], with a gradient. The window's loss is the sum of these over
    micro-batches and ranks, divided by the sum of `num_tokens`."""
    num_tokens: Tensor
    """Number of unmasked targets: [], int64."""
    parts: dict[str, Term]
    """Component name -> (sum, count), detached; sums add up to `loss_sum`, but for those by rows."""
    token_loss: Tensor | None
    """Unweighted cross entropy (or own loss): [B, T], detached, 0 where masked; or None."""
    is_correct: Tensor | None
    """Whether the most likely token is the target, bool [B, T]; None if the output is no scores."""
    metrics: Mapping[str, Any] | None = None
    """Those of the model's output."""


class Loss(Protocol):
    """Computes the loss of an output [B, T, ...] against targets [B, T, ...]; see `Objective`."""

    def __call__(self, output: Tensor, targets: Tensor, /, *, meta: object = None) -> ObjectiveOutput: ...


class Objective:
    """The loss: cross entropy plus the enabled components, those whose weight is not 0.

    `own` replaces all of them: output [B, T, ...] and targets -> losses of the targets' shape, or
    their sum over the known targets and the number of these, both []. Then, and without any
    component, only outputs as wide as `vocab_size` are scores, which have an accuracy.
    """

    def __init__(
        self,
        options: ObjectiveOptions = ObjectiveOptions(),  # noqa: B008 - immutable
        *,
        own: Callable[[Tensor, Tensor], Any] | None = None,
        vocab_size: int = 0,
    ) -> None:
        self._options, self._own, self._vocab_size = options, own, vocab_size

    def __call__(self, logits: Tensor, targets: Tensor, *, meta: object = None) -> ObjectiveOutput:
        """The loss of logits [B, T, V] against targets int64 [B, T] (`IGNORED` where masked), or of a
        custom loss floats [B, T, ...] (NaN: unknown; a value counts as a token).

        `meta` is the batch's `instability_meta_json`, for the message if a component fails. A
        non-finite loss is returned like any other; the optimizer step handles it. Raises
        ObjectiveError: a component cannot be computed; UserError: a custom loss fails, or is needed.
        """
        terms: dict[str, Term] = {}
        options = self._options
        token_loss, is_correct = None, None
        has_scores = logits.shape == (*targets.shape, self._vocab_size)
        num_tokens = (targets != IGNORED).sum()
        if targets.is_floating_point():
            num_tokens, has_scores = is_known(targets).sum(), False
        if self._own is not None:
            terms["own"], token_loss = self._custom(self._own, logits, targets, num_tokens)
        elif options.token_ce or options.z_loss or options.coord is not None:
            if targets.is_floating_point():
                fix = "name a loss of numbers (docs/mixing.md#data-of-your-own), or give ids as integers"
                raise UserError("objective.target", "is not set, and the targets are floats", fix)
            if logits.shape[:-1] != targets.shape:
                shapes = f"logits {tuple(logits.shape)} do not fit targets {tuple(targets.shape)}"
                raise ObjectiveError("token_ce", shapes, meta)
            prepared, has_scores = prepare(logits, targets), True
            logits = prepared.logits
            if options.token_ce > 0:
                token_loss = prepared.token_loss
                terms["token_ce"] = Term(options.token_ce * token_loss.sum(), num_tokens)
            if options.z_loss > 0:
                terms["z_loss"] = z_loss(prepared, options.z_loss)
            if options.coord is not None:
                terms["coord"] = coord(prepared, options.coord, meta)
        if has_scores:
            is_correct = logits.detach().argmax(-1) == targets
        sums, parts = [], {}
        for name, term in terms.items():
            sums.append(term.sum)
            parts[name] = Term(term.sum.detach(), term.num_tokens)
        return ObjectiveOutput(
            loss_sum=torch.stack(sums or [torch.zeros((), device=targets.device)]).sum(),
            num_tokens=num_tokens,
            parts=parts,
            token_loss=token_loss if token_loss is None else token_loss.detach(),
            is_correct=is_correct,
        )

    def _custom(
        self, own: Callable[[Tensor, Tensor], Any], output: Tensor, targets: Tensor, num_tokens: Tensor
    ) -> tuple[Term, Tensor | None]:
        """The custom loss, and that of each token if it is known."""
        with users_code("objective.target"):
            loss, count, shape = own(output, targets), num_tokens, targets.shape
            is_sum = isinstance(loss, tuple) and len(loss) == 2
            if is_sum:
                (loss, count), shape = loss, torch.Size()
            is_loss = isinstance(loss, Tensor) and loss.is_floating_point() and loss.shape == shape
            is_number = hasattr(count, "__float__") and getattr(count, "shape", ()) == ()
            if not (is_loss and is_number):
                found = [loss, count][: 1 + is_sum]
                shown = [f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__ for x in found]
                wanted = f"losses {list(targets.shape)} as floats, or their sum and number"
                raise TypeError(f"returned {' and '.join(shown)}, not {wanted}")
            if torch.is_grad_enabled() and not loss.requires_grad:
                raise ValueError("what it returned has no gradient: nothing would be trained")
            loss = loss.to(torch.promote_types(loss.dtype, torch.float32))
            if not is_sum:
                loss = loss.masked_fill(~is_known(targets), 0.0)
            # A sum over other tokens would give a plausible, wrong mean. NaN needs no wait.
            total = loss.sum().masked_fill(num_tokens != torch.as_tensor(count), math.nan)
        return Term(total, num_tokens), None if is_sum else loss.reshape(*shape[:2], -1).sum(-1)


class TokenTypeSums(NamedTuple):
    """Sums over one micro-batch by token type, on the device; each [num_types]."""

    loss: Tensor
    num_correct: Tensor
    num_tokens: Tensor


def token_type_sums(
    token_loss: Tensor, is_correct: Tensor, token_types: Tensor, num_types: int, *, mask: Tensor
) -> TokenTypeSums:
    """Sum loss, correct predictions and targets, [B, T] each, by the type of the target.

    Types outside 0..num_types-1 do not count, nor do masked targets, whatever their type. `mask`:
    bool [B, T], False where a target is masked. Raises SkipBatch: the shapes differ.
    """
    if not token_loss.shape == is_correct.shape == token_types.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (token_loss, is_correct, token_types))
        problem = "losses, predictions and token types must have the same shape"
        raise SkipBatch(f"{problem}, got {shapes}")
    types = torch.arange(num_types, device=token_types.device)
    # A masked sum, not a scatter: its order of additions is fixed on every device.
    belongs = (token_types.reshape(-1, 1) == types) & mask.reshape(-1, 1)  # [B * T, num_types]
    loss = token_loss.detach().reshape(-1, 1).masked_fill(~belongs, 0.0).sum(0)
    return TokenTypeSums(loss, (belongs & is_correct.reshape(-1, 1)).sum(0), belongs.sum(0))


class Auxiliary:
    """Refuses losses of an output and leaves out its metrics, since the model declares none."""

    losses: Mapping[str, Any] = {}  # by name; those that the model declares
    by_rows: Sequence[str] = ()  # metrics of the losses that are means over rows
    metric_keys: tuple[str, ...] = ()  # others of the output are left out with one warning

    def __init__(self) -> None:
        self._guard = BestEffort("model")

    def begin_window(self, window: Sequence[Any], *, world_size: int) -> None:
        """If there are losses by rows, every rank must call it with its micro-batches of a step."""

    def __call__(self, result: ObjectiveOutput, output: Any, micro: Any) -> ObjectiveOutput:
        """The loss of a micro-batch (`trainer.data.loader.MicroBatch`) with all its parts. Raises
        UserError: the output has other losses than the model declares."""
        losses, metrics = getattr(output, "losses", None), getattr(output, "metrics", None)
        # What nobody trains on must not look as if somebody did.
        if losses is not None and losses != {}:
            refuse_output(undeclared(losses))
        if metrics is not None:
            self._leave_out_others(metrics)
        return result

    def _leave_out_others(self, metrics: Any) -> None:
        refuse_output(metrics_problem(metrics))
        for name in metrics.keys() - set(self.metric_keys):
            self._guard.leave_out(name, "the model's metric_keys do not list it")


def undeclared(losses: Any) -> str:
    """The mistake of an output with further losses of these names, after "it returns"."""
    if not isinstance(losses, Mapping | Set):
        return f"losses as a {type(losses).__name__}, no mapping of names to losses"
    names = sorted(map(str, losses))
    return f'the loss {few(names)}, which is not in its loss_keys: {{"{names[0]}": "tokens"}}, or "rows"'


def refuse_output(problem: str) -> None:
    if problem:
        raise UserError("model.target", f"it returns {problem}", "see docs/models.md#losses-and-metrics")
