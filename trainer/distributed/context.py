"""Ranks that share each row: a part of its positions runs on each, and layers pass their states from part to part.

A recurrence that is linear in its state maps the state before a part to `transition * state + end`, where `end` is the state
after the part if it begins from zero. Each rank computes the two of its own part, all of them get those of the others in one
all-gather, and each composes them: what its part begins with, and the state after the row, in the same bits on all ranks. The
gradient of a part's first state returns in another all-gather, half as large.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.arrays import MIN_PART
from trainer.distributed.env import RankInfo
from trainer.errors import UserError

if TYPE_CHECKING:
    from trainer.data.batch import MicroBatch


@dataclass(frozen=True, eq=False)
class Context:
    """The ranks that share each row, in the order of its parts. A model takes it as `context_group`."""

    group: dist.ProcessGroup
    rank: int
    """This one, among them."""
    size: int
    sums_gradients: bool
    """Whether the gradient of each micro-batch is summed over them, as the noise scale needs it."""

    def cut(self, micro: MicroBatch) -> MicroBatch:
        """This rank's part of the rows, for a model that takes a `context_group`; parts differ by at most one position."""
        length = micro.targets.shape[1]
        if length < MIN_PART * self.size:
            problem = f"a row of {length} tokens is too short for {self.size} parts"
            raise UserError("distributed.context", problem, "build rows of data.seq_len x train.tbptt_cells tokens")
        part = slice(length * self.rank // self.size, length * (self.rank + 1) // self.size)
        return micro.columns(part, context_group=self)

    def scan(self, transition: Tensor, end: Tensor, state: Tensor, *, is_matrix: bool = False) -> tuple[Tensor, Tensor]:
        """The state before this rank's part, and that after the row, without gradient. Every rank of the group must call it.

        Args:
            transition: what this rank's part multiplies its first state by, elementwise, [B, ...].
            end: the state after this rank's part if that begins from zero, [B, ...].
            state: before the row, the same on all ranks of the group, [B, ...]; no gradient flows into it.
            is_matrix: states are [..., K, V], and `transition` [..., K, K] multiplies them from the left.
        """
        found: tuple[Tensor, Tensor] = _Scan.apply(transition, end, state.to(end.dtype), self, is_matrix)  # type: ignore[no-untyped-call]
        return found

    def sum_gradients(self, model: nn.Module) -> None:
        """Have each gradient of a backward summed over the group, if it is to be, before any other hook sees it."""
        for parameter in model.parameters() if self.sums_gradients else ():
            if parameter.requires_grad:
                parameter.register_hook(self._sum)  # type: ignore[no-untyped-call]

    def _sum(self, gradient: Tensor) -> Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def gather(self, own: Tensor) -> list[Tensor]:
        """A tensor of each rank of the group."""
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own, group=self.group)
        return found


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, transition: Tensor, end: Tensor, state: Tensor, group: Context, is_matrix: bool
    ) -> tuple[Tensor, Tensor]:
        times = torch.matmul if is_matrix else torch.mul
        sizes = [transition.numel(), end.numel()]
        gathered = group.gather(torch.cat([transition.reshape(-1), end.reshape(-1)]))
        parts = [torch.split(each, sizes) for each in gathered]
        transitions = [of_part.view(transition.shape) for of_part, _ in parts]
        states = [state]
        with torch.autocast(state.device.type, enabled=False):
            for each, (_, of_part) in zip(transitions, parts, strict=True):
                states.append(times(each, states[-1]) + of_part.view(end.shape))
        ctx.context, ctx.is_matrix = group, is_matrix
        ctx.save_for_backward(states[group.rank], *(each.clone() for each in transitions[group.rank + 1 :]))
        ctx.mark_non_differentiable(states[-1])
        return states[group.rank].clone(), states[-1]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        first, *later = ctx.saved_tensors
        gradients: Sequence[Tensor] = ctx.context.gather(gradient.contiguous())
        total = torch.zeros_like(first)  # of the state after this rank's part
        for transition, of_part in zip(reversed(later), reversed(gradients), strict=False):
            total = of_part + (transition.mT @ total if ctx.is_matrix else transition * total)
        return total @ first.mT if ctx.is_matrix else total * first, total, None, None, None


def make_context_group(info: RankInfo, *, timeout_sec: float, sums_gradients: bool) -> Context | None:
    """The group of this rank; None: it shares its rows with no other. Every rank must call it."""
    if info.context == 1:
        return None
    group, _ = dist.new_subgroups(info.context, timeout=timedelta(seconds=timeout_sec))  # type: ignore[no-untyped-call]
    return Context(group, info.rank % info.context, info.context, sums_gradients)
