"""What a run makes of a model (`trainer.training.Models`): recomputed blocks, a loss in chunks.

The backward runs blocks again (`train.activation_checkpointing`). Of a loss in chunks, logits of
all tokens never exist (`objective.chunk_tokens`): the step passes what enters the output layer
through a `Headless` model, and `ChunkedObjective` applies that layer itself. Both wrap a model
without its knowledge. They can go when models recompute by themselves, and logits are cheap.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from trainer.config.schema import RunConfig
from trainer.errors import UserError
from trainer.import_path import users_code
from trainer.lab import nested_state
from trainer.lab.auxiliary import make_auxiliary as make_auxiliary
from trainer.lab.contract_check import check_before_run as check_before_run
from trainer.lab.contract_check import run_few_tokens
from trainer.lab.cuda_graph import make_graphs as make_graphs
from trainer.lab.depth import Depth as Depth
from trainer.lab.numbers import first_batch
from trainer.lab.optimizers import build_optimizer as build_optimizer
from trainer.lab.sharding import CHUNK_KEY, output_layer
from trainer.lab.sharding import Sharded as Sharded
from trainer.lab.weights import load_weights as load_weights
from trainer.metrics.logger import get_logger
from trainer.model.protocol import evaluating
from trainer.objective import Loss, Objective, ObjectiveError, ObjectiveOutput, Term
from trainer.training.plan import Plan

logger = get_logger(__name__)


def carry_flat(model: nn.Module, *, config: RunConfig | None, vocab_size: int) -> nn.Module:
    """As `nested_state.carry_flat`, tried on the data of the run of a config."""
    if config is None:
        return nested_state.carry_flat(model)
    micro = first_batch(model, config, vocab_size)
    return nested_state.carry_flat(model, seq_len=config.data.seq_len, micro=micro)


def recompute_blocks(model: nn.Module) -> None:
    """Have the backward run each of `model.blocks` again, instead of keeping its activations.

    A block must be a function of its inputs: one that writes into them, or into itself, would get
    another gradient when it is called again (the contract's checks would show it).
    """
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.ModuleList) or not len(blocks):
        problem = f'is "block", but {type(model).__name__} has no nn.ModuleList named blocks'
        fix = 'choose "off", or name it so in a model of your own'
        raise UserError("train.activation_checkpointing", problem, fix)
    for block in dict.fromkeys(blocks):  # one may be there several times
        block.kept_forward = block.forward  # type: ignore[assignment]
        block.forward = MethodType(_recomputed, block)


def _recomputed(block: Any, *args: Any, **kwargs: Any) -> Any:
    # A method, so that copies of the model have their own; torch.compile ignores partials.
    return checkpoint(block.kept_forward, *args, use_reentrant=False, **kwargs)


def in_chunks(plan: Plan, model: nn.Module, loss: Objective, device: torch.device) -> tuple[nn.Module, Loss]:
    """The model without its output layer, and the loss that computes the logits, on `device`.

    A UserError if the output layer is unknown, or is not the last thing that the model computes.
    """
    head = output_layer(model)
    refuse_more_than_a_head(model, head, device, seq_len=plan.config.data.seq_len)
    chunk = plan.config.objective.chunk_tokens
    return Headless(model, head), ChunkedObjective(loss, head, chunk_tokens=chunk)


class Headless(nn.Module):
    """A model whose output has, instead of logits, what enters its output layer `head`: [B, T, D].

    The head must be the last that a forward computes.
    """

    def __init__(self, model: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.model = model
        self._heads = [head]  # in a list: its parameters are the model's already

    def forward(self, **inputs: Any) -> Any:
        """Run the model; `output.logits` is [B, T, D], in whatever type the model gives it."""
        (head,) = self._heads
        head.forward = lambda hidden: hidden  # type: ignore[method-assign, assignment]
        try:
            return self.model(**inputs)
        finally:
            del head.forward


@torch.no_grad()
def refuse_more_than_a_head(model: nn.Module, head: nn.Linear, device: torch.device, *, seq_len: int) -> None:
    """Refuse a model whose logits, for a few tokens, are not those of its output layer."""
    try:
        inspect.signature(model.forward).bind(tokens=None, state=None)
    except TypeError:
        text = "%s: the model takes inputs that only the data have, so it was not seen whether it does more to its "
        logger.warning(text + "logits than its output layer", CHUNK_KEY)
        return
    run = partial(run_few_tokens, device=device, seq_len=seq_len, below=head.out_features)
    with evaluating(model), users_code(CHUNK_KEY, "the model fails without its output layer", "set it to 0"):
        logits, hidden = run(model).logits, run(Headless(model, head)).logits
    is_same = hidden.shape == (*logits.shape[:-1], head.in_features)
    if is_same:
        logits, again = logits.double(), head(hidden.to(head.weight.dtype)).double()
        largest = float(again.nan_to_num(0.0, 0.0, 0.0).abs().amax())  # -inf may mask ids in the logits alone
        is_same = again.shape == logits.shape
        is_same = is_same and torch.allclose(again, logits, rtol=0.0, atol=1e-5 * largest, equal_nan=True)
    if not is_same:
        problem = "the model's logits are not those of its output layer: it scales, caps or changes them afterwards"
        raise UserError(CHUNK_KEY, problem, "set it to 0")


class ChunkedObjective:
    """An `Objective` of what enters the output layer, [B, T, D].

    Logits are computed for `chunk_tokens` tokens at a time, in the forward and again in the
    backward. All results are those of the plain objective up to the order of additions; gradients
    of the output layer `head` add up in float32 or wider.
    """

    def __init__(self, objective: Objective, head: nn.Module, *, chunk_tokens: int) -> None:
        assert chunk_tokens >= 1, chunk_tokens
        self._objective, self._head, self._chunk_tokens = objective, head, chunk_tokens

    def __call__(self, hidden: Tensor, targets: Tensor, *, meta: object = None) -> ObjectiveOutput:
        """As `Objective`, of hidden [B, T, D] and targets [B, T, ...]."""
        if hidden.shape[:-1] != targets.shape[:2]:
            shapes = f"outputs {tuple(hidden.shape)} do not fit targets {tuple(targets.shape)}"
            raise ObjectiveError("token_ce", shapes, meta)
        names, weights = zip(*self._head.named_parameters(), strict=True)
        loss_of = partial(self._loss_of, meta=meta, names=names)
        chunks: list[ObjectiveOutput] = []
        flat = hidden.flatten(0, 1), targets.flatten(0, 1)
        apply: Any = _SumOfChunks.apply
        loss_sum = apply(loss_of, self._chunk_tokens, chunks, *flat, *weights)

        def total(tensors: Sequence[Tensor]) -> Tensor:
            return torch.stack(list(tensors)).sum()

        def joined(tensors: Sequence[Tensor | None]) -> Tensor | None:
            known = [each for each in tensors if each is not None]
            return torch.cat(known, dim=1).view(targets.shape[:2]) if known else None

        parts = {}
        for name in chunks[0].parts:
            sums, counts = zip(*(chunk.parts[name] for chunk in chunks), strict=True)
            parts[name] = Term(total(sums), total(counts))
        return ObjectiveOutput(
            loss_sum=loss_sum,
            num_tokens=total([chunk.num_tokens for chunk in chunks]),
            parts=parts,
            token_loss=joined([chunk.token_loss for chunk in chunks]),
            is_correct=joined([chunk.is_correct for chunk in chunks]),
        )

    def _loss_of(
        self, hidden: Tensor, targets: Tensor, weights: list[Tensor], *, meta: object, names: tuple[str, ...]
    ) -> ObjectiveOutput:
        logits = functional_call(self._head, dict(zip(names, weights, strict=True)), (hidden,))
        return self._objective(logits[None], targets[None], meta=meta)  # one row, for a custom loss


class _SumOfChunks(torch.autograd.Function):
    """The sum of the chunks' losses; the backward computes each chunk again.

    Weights are converted once to autocast's type. Left to autograd, their gradients would be added
    up over the chunks in that type: in bf16 rare tokens would lose most of theirs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        loss_of: Callable[..., ObjectiveOutput],
        chunk_tokens: int,
        chunks: list[ObjectiveOutput],
        hidden: Tensor,
        targets: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        """Fill `chunks`, in the order of the tokens."""
        device = hidden.device.type
        is_on, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        ctx.autocast = partial(torch.autocast, device, dtype, enabled=is_on)
        ctx.dtype = dtype if is_on else None
        ctx.loss_of, ctx.chunk_tokens = loss_of, chunk_tokens
        ctx.save_for_backward(hidden, targets, *weights)
        used = _leaves_of(weights, ctx.dtype)
        parts = zip(*(torch.split(each, chunk_tokens) for each in (hidden, targets)), strict=True)
        chunks += [loss_of(*part, used) for part in parts]
        return torch.stack([chunk.loss_sum for chunk in chunks]).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of hidden and weights, from the last chunk to the first, as autograd would."""
        hidden, targets, *weights = ctx.saved_tensors
        leaves = _leaves_of(weights, ctx.dtype)
        needs = ctx.needs_input_grad[5:]
        trained = [leaf.requires_grad_() for leaf, is_needed in zip(leaves, needs, strict=True) if is_needed]
        sums: list[Tensor] = []
        grad_hidden = torch.empty_like(hidden)
        pieces = zip(*(torch.split(each, ctx.chunk_tokens) for each in (hidden, targets, grad_hidden)), strict=True)
        for hidden_piece, target_piece, grad_piece in reversed(list(pieces)):
            entering = hidden_piece.detach().requires_grad_()
            with torch.enable_grad(), ctx.autocast():
                loss_sum = ctx.loss_of(entering, target_piece, leaves).loss_sum
            wanted = [entering, *trained]
            grad_entering, *found = torch.autograd.grad(loss_sum, wanted, grad, materialize_grads=True)
            grad_piece.copy_(grad_entering)
            if sums:
                sums = [total.add_(each) for total, each in zip(sums, found, strict=True)]
            else:
                # Copies: of parameters that enter as a sum, autograd gives one gradient for all.
                sums = [each.to(torch.promote_types(each.dtype, torch.float32), copy=True) for each in found]
            del found  # before the next chunk's gradients exist
        of_trained = iter(sums)
        grad_weights = (next(of_trained) if is_needed else None for is_needed in needs)
        return None, None, None, grad_hidden, None, *grad_weights


def _leaves_of(weights: Sequence[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
    """Leaves with the numbers of the weights, in the type of an autocast that is on (None: off)."""
    leaves = []
    for each in weights:
        leaf = each.detach()
        if dtype is not None and leaf.dtype != torch.float64:  # which autocast leaves alone
            leaf = leaf.to(dtype)
        leaves.append(leaf)
    return leaves
