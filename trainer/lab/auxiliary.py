"""Losses of the model's output in addition to that of the tokens, and its metrics.

A loss "by tokens" is a number per target token, [B, T], or one for all tokens of a micro-batch, [];
the objective takes its mean over the step's target tokens. A loss "by rows" is a number per row,
[B]; the objective takes its mean over the rows with a target. Both are sums over micro-batches and
ranks, so that any split of a step equals one big batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.arrays import weights_of
from trainer.errors import UserError
from trainer.metrics.catalog import is_built_in
from trainer.model.protocol import extras_of
from trainer.objective import COMPONENTS, Auxiliary, ObjectiveOutput, Term, refuse_output, undeclared
from trainer.wording import few

if TYPE_CHECKING:
    from trainer.config.schema import ObjectiveTable

By = Literal["tokens", "rows"]


@dataclass(frozen=True)
class AuxiliaryLoss:
    """One loss, and what it is averaged over."""

    by: By = "tokens"
    weight: float = 1.0


def declared_losses(model: Any) -> dict[str, By]:
    """The losses that a model declares: `loss_keys`, a mapping of names to "tokens" or "rows"."""
    keys = getattr(model, "loss_keys", {})
    is_fit = isinstance(keys, Mapping) and all(isinstance(name, str) and name.isidentifier() for name in keys)
    if not is_fit or not all(by in ("tokens", "rows") for by in keys.values()):
        fix = 'make it a dict of plain names, such as {"balance": "tokens"}; the other value is "rows"'
        raise UserError("model.target", f"{type(model).__name__}.loss_keys is {keys!r}", fix)
    return dict(keys)


def loss_problem(losses: Any, declared: Mapping[str, By], shape: Sequence[int], *, needs_all: bool) -> str:
    """A mistake in the losses of a model's output; empty if there is none. `shape`: [B, T] of the
    targets; `needs_all`: as in training; an evaluation does without those that are left out."""
    if not isinstance(losses, Mapping):
        return f"losses as a {type(losses).__name__}, no mapping of names to losses"
    if unknown := losses.keys() - declared.keys():
        return undeclared(unknown)
    if (missing := sorted(declared.keys() - losses.keys())) and needs_all:
        return f"no loss {few(missing)} in train(), which its loss_keys name"
    problems = (shape_problem(name, value, declared[name], shape) for name, value in losses.items())
    return next(filter(None, problems), "")


def shape_problem(name: str, value: Any, by: By, shape: Sequence[int]) -> str:
    """A mistake in one loss; empty if there is none."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return f"the loss {name} as a {getattr(value, 'dtype', type(value).__name__)}, not as a tensor of floats"
    rows, length = shape
    fitting = {"tokens": [[rows, length], []], "rows": [[rows]]}[by]
    if list(value.shape) in fitting:
        return ""
    wanted = " or ".join(map(str, fitting))
    return f"the loss {name} by {by} with the shape {list(value.shape)}, not {wanted}"


class AuxiliaryLosses(Auxiliary):
    """Adds the losses, by name, and metrics of an output to the objective of its logits."""

    def __init__(self, losses: Mapping[str, AuxiliaryLoss] | None = None, metric_keys: Sequence[str] = ()) -> None:
        super().__init__()
        self.losses, self.metric_keys = losses or {}, tuple(metric_keys)
        self._declared: dict[str, By] = {name: each.by for name, each in self.losses.items()}
        self.by_rows = [f"objective/{name}" for name, by in self._declared.items() if by == "rows"]

    def begin_window(self, window: Sequence[Any], *, world_size: int) -> None:
        """Find the factor of losses by rows: the step divides by tokens. All ranks must call it."""
        weights = [weights_of(micro.targets) for micro in window]
        counts = torch.stack([torch.stack([each.sum(), each.any(dim=1).sum()]) for each in weights]).sum(0)
        if world_size > 1:
            dist.all_reduce(counts)
        self._tokens_per_row = counts[0] / counts[1].clamp(min=1).double()

    def __call__(self, result: ObjectiveOutput, output: Any, micro: Any) -> ObjectiveOutput:
        """See `Auxiliary`. Without gradient, losses by rows are only among the parts."""
        trains, weights = torch.is_grad_enabled(), weights_of(micro.targets)  # [B, T]
        found, metrics = extras_of(output)
        refuse_output(loss_problem(found, self._declared, weights.shape, needs_all=trains))
        total, parts = result.loss_sum, dict(result.parts)
        for name, each in self.losses.items():
            if name not in found:
                continue
            applies = weights
            if each.by == "rows":
                applies = weights.any(dim=1)
            value = found[name].to(torch.promote_types(found[name].dtype, torch.float32)).expand(applies.shape)
            # With the weight 0 its value does not count, not even infinity.
            is_left_out = (applies == 0) | (each.weight == 0)
            term = each.weight * (value.masked_fill(is_left_out, 0.0) * applies).sum()
            if each.by == "tokens":
                total = total + term
            elif trains:
                total = total + term * self._tokens_per_row.to(term)
            parts[name] = Term(term.detach(), applies.sum())
        self._leave_out_others(metrics)
        kept = {name: metrics[name] for name in self.metric_keys if name in metrics}
        return replace(result, loss_sum=total, parts=parts, metrics=kept)


def make_auxiliary(table: ObjectiveTable, model: Any) -> AuxiliaryLosses:
    """The losses and metrics of a model's output, with the weights of `[objective.losses]`. Raises
    UserError: a loss that is named does not exist, or a name is taken."""
    declared, weights = declared_losses(model), table.losses
    if taken := sorted(declared.keys() & {*COMPONENTS, *table.components}):
        problem = f"loss_keys name {taken[0]}, which is a loss of the trainer"
        raise UserError("model.target", problem, "choose another name")
    if unknown := sorted(weights.keys() - declared.keys()):
        problem = f"the model has no such loss; its loss_keys are {few(sorted(declared)) or 'empty'}"
        fix = "name one of them, or set loss_keys on the model (docs/models.md#losses-and-metrics)"
        raise UserError(f"objective.losses.{unknown[0]}", problem, fix)
    found = {name: AuxiliaryLoss(by, weights.get(name, 1.0)) for name, by in declared.items()}
    if not table.components and not any(each.weight for each in found.values()):
        fix = "set loss_keys on the model, or objective.target (docs/models.md#losses-and-metrics)"
        raise UserError("objective.token_ce", "is 0, and no other loss would be trained on", fix)
    keys = getattr(model, "metric_keys", ())
    is_fit = isinstance(keys, tuple | list) and all(isinstance(each, str) for each in keys)
    if not is_fit or any(map(is_built_in, keys)):
        problem = f"{type(model).__name__}.metric_keys is {keys!r}"
        raise UserError("model.target", problem, "make it a tuple of names that the trainer has no metric of")
    return AuxiliaryLosses(found, keys)
