"""Measures what the gradient noise scale needs inside an ordinary training loop, with hooks on the parameters.

Usable in any loop, plain, under DDP or FSDP2; m micro-batches of b examples make a step:

    gns = GradientNoiseScale(ddp_model)
    ...
    gns.begin_window(m)
    for k in range(m):                        # no_sync() around all but the last, as usual
        gns.begin_micro(last=k == m - 1)
        (loss_of(batch[k]) / m).backward()
        gns.end_micro(1 / m, b)
    metrics = gns.step()                      # before clipping and optimizer.step()

A hook on the leaf sees each micro-gradient before it is added to `.grad` and before DDP reduces it, so nothing is
stored but a few fp64 numbers. A hook after the accumulation of the last micro-batch
(`register_post_accumulate_grad_hook`) sees the rank's own sum: it runs inside the accumulation node,
DDP's after that node.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.metrics.catalog.rows_gns import ROWS
from trainer.metrics.noise_scale import estimate as noise_scale
from trainer.metrics.noise_scale.estimate import Absent, NoiseScaleAverage, Window
from trainer.metrics.noise_scale.leaves import find_leaves
from trainer.metrics.noise_scale.square_norm import square_norm

log = logging.getLogger(__name__)


class GradientNoiseScale:
    """The gradient noise scale of a model that is trained in windows of micro-batches.

    Args:
        model: a module, or one wrapped in DDP or by FSDP2's `fully_shard` (then its process group is the one that
            averages gradients, and every rank must make this object). Parameters that do not require a gradient now
            are left out.
        ema: see `NoiseScaleAverage`.
        process_group: for a loop that averages gradients over ranks itself, without DDP.
        weights_are_tokens: whether `example_weights` are token counts, so that `gns/b_simple_tokens` means something.

    Raises:
        UserError: nothing to train, or parameters that are sharded in a way `find_leaves` does not know.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        ema: float = 0.95,
        process_group: dist.ProcessGroup | None = None,
        weights_are_tokens: bool = True,
    ) -> None:
        self._leaves = find_leaves(model, process_group)
        self._parameters = self._leaves.parameters
        self._group = self._leaves.group
        self._world_size = 1 if self._group is None else dist.get_world_size(self._group)
        self._weights_are_tokens = weights_are_tokens
        self._average = NoiseScaleAverage(ema)
        self._fired_in = [-1] * len(self._parameters)  # the last micro-batch in which each parameter's hook ran
        self._micro = -1  # counts micro-batches over the whole life
        self._window_start = 0  # value of `_micro` before the window's first
        self._middle_at: int | None = None
        self._is_active = self._is_middle = self._is_first = self._has_warned = False
        self._repeats = 0
        self._middle_fires = 0
        self._is_moved = False  # `.grad` no longer is what this rank has accumulated
        self._window_fires: set[int] = set()
        self._device = self._parameters[0].device
        self._micro_square = self._middle_square = self._zero()
        self._sums = torch.zeros(noise_scale.NUM_SUMS, dtype=torch.float64, device=self._device)
        self._handles: list[Any] = []
        for index, parameter in enumerate(self._leaves.hooked):
            leaf: Any = parameter  # torch leaves both methods without types
            self._handles.append(leaf.register_hook(_leaf_hook(weakref.ref(self), index)))
            self._handles.append(leaf.register_post_accumulate_grad_hook(_accumulation_hook(weakref.ref(self))))

    def begin_window(self, num_micros: int | None = None) -> None:
        """Start a window, forgetting one that was not finished.

        Args:
            num_micros: micro-batches to come. On a single rank it places the middle, which `gns/consistency` needs;
                without it that key is absent there.
        """
        self._device = self._parameters[0].device
        self._sums = torch.zeros(noise_scale.NUM_SUMS, dtype=torch.float64, device=self._device)
        self._sums[noise_scale.RANKS] = 1.0
        self._middle_square = self._zero()
        self._middle_at = (num_micros + 1) // 2 if num_micros is not None and self._world_size == 1 else None
        self._window_start = self._micro
        self._middle_fires = 0
        self._is_moved = False
        self._window_fires.clear()

    def begin_micro(self, last: bool) -> None:
        """Call before a micro-batch's backward; `last` for the window's last, the one in which DDP reduces."""
        self._micro += 1
        in_window = self._micro - self._window_start
        self._is_middle = last if self._world_size > 1 else in_window == self._middle_at
        self._is_first = in_window == 1
        self._micro_square = self._zero()
        self._repeats = 0
        self._is_active = True

    def end_micro(self, kappa: float | Tensor, example_weights: Tensor | int) -> None:
        """Call after the backward of a micro-batch.

        Args:
            kappa: factor on the micro-batch's mean loss in the backward: 1/m, 1/m times the loss scale, or the
                constant times this micro-batch's tokens where a sum of token losses is differentiated. Before DDP's
                average. Zero for a micro-batch that has nothing to train on, which then carries no weight.
            example_weights: [B] weight of each example in the mean (its tokens; zero for a masked row), or the number
                of examples where all weigh the same.
        """
        assert self._is_active, "end_micro without begin_micro"
        self._is_active = False
        factor = torch.as_tensor(kappa, dtype=torch.float64, device=self._device)
        if isinstance(example_weights, int):
            noise = torch.full_like(factor, 1.0 / example_weights)
            tokens = torch.zeros_like(factor)
        else:
            weights = example_weights.detach().to(self._device, torch.float64)
            total = weights.sum()
            noise = weights.square().sum() / total.square()
            tokens = total if self._weights_are_tokens else torch.zeros_like(total)
        has_weight = factor > 0.0
        safe = torch.where(has_weight, factor, 1.0)
        small = torch.where(has_weight, self._micro_square / safe, 0.0)
        noise = torch.where(has_weight, noise, 0.0)
        fault = (~has_weight & (self._micro_square > 0.0)).double() + self._local_faults()
        zero = torch.zeros_like(factor)
        update = [factor, small, factor * noise, factor.square() * noise, zero, zero, zero, tokens, zero, fault]
        self._sums += torch.stack(update)
        if self._is_middle:
            self._close_middle()

    def _local_faults(self) -> float:
        """Faults of this micro-batch that the host knows of."""
        if self._repeats == 0:
            return 0.0
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "gns: %d gradient hooks ran more than once in one backward (reentrant checkpointing of a module "
                "that is used twice?); the norm cannot be measured and such steps are skipped; "
                "use_reentrant=False mends it",
                self._repeats,
            )
        return 1.0

    def _close_middle(self) -> None:
        """Enter the middle group's square norm, unless `.grad` was not the sum over the group for every parameter.

        A parameter with an older gradient may not have been used just now; FSDP2 keeps the sum elsewhere if it reduces
        in another type than it accumulates in; and a loop without `no_sync` reduces after every micro-batch. A group of
        one micro-batch has that one's norm, and is not measured twice.
        """
        square = self._micro_square if self._is_first else self._middle_square
        if not self._is_first and (self._is_moved or self._middle_fires < len(self._window_fires)):
            return
        kappa = self._sums[noise_scale.KAPPA]
        has_weight = kappa > 0.0
        safe = torch.where(has_weight, kappa, 1.0)
        self._sums[noise_scale.MIDDLE_KAPPA] = kappa
        self._sums[noise_scale.MIDDLE_SQUARE] = torch.where(has_weight, square / safe, 0.0)
        self._sums[noise_scale.MIDDLE_NOISE] = self._sums[noise_scale.BIG_NOISE] / safe

    def local_sums(self) -> Tensor:
        """[NUM_SUMS] float64 on the device: this rank's sums of the window, to be SUM-reduced over ranks."""
        assert not self._is_active, "local_sums between begin_micro and end_micro"
        sums = self._sums.clone()
        if not self._window_fires:
            sums[noise_scale.FAULTS] += 1.0
        return sums

    def grad_sq(self) -> Tensor:
        """[] float64: square norm of the `.grad` of all parameters, by the kernel that measures micro-batches.

        Where FSDP2 shards them this is the rank's share, to be SUM-reduced over ranks.
        """
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        return _sum((square_norm(g.to_local() if isinstance(g, DTensor) else g) for g in gradients), self._zero())

    def finish(
        self, reduced_sums: Sequence[float], grad_sq: float, *, grad_factor: float | None = None
    ) -> Window | Absent:
        """Take the reduced sums and the big gradient's square norm into the averages; see `noise_scale.estimate`."""
        window = noise_scale.estimate(reduced_sums, grad_sq, grad_factor=grad_factor)
        self._average.update(window)
        return window

    def step(self, *, grad_factor: float | None = None) -> dict[str, float]:
        """All-reduce, estimate, and return the metrics: for loops that do not pack the sums into a reduction of theirs.

        Every rank must call it, after the last backward (and `unscale_`) and before clipping and `zero_grad`.
        """
        packed = torch.cat([self.local_sums(), self.grad_sq().reshape(1)])
        if self._world_size > 1:
            dist.all_reduce(packed if self._leaves.is_sharded else packed[: noise_scale.NUM_SUMS], group=self._group)
        *reduced, square = packed.tolist()
        self.finish(reduced, square, grad_factor=grad_factor)
        return self.metrics()

    def metrics(self) -> dict[str, float]:
        """See `NoiseScaleAverage.metrics`."""
        return self._average.metrics()

    @property
    def metric_keys(self) -> tuple[str, ...]:
        """Every key that `drain_metrics` can return; the values are the same on all ranks."""
        return tuple(spec.name for spec in ROWS)

    def drain_metrics(self) -> dict[str, float]:
        """See `NoiseScaleAverage.drain_metrics`."""
        return self._average.drain_metrics()

    @property
    def reason(self) -> str | None:
        """See `NoiseScaleAverage.reason`."""
        return self._average.reason

    def state_dict(self) -> dict[str, dict[str, float]]:
        """The averages, as plain floats; taken between windows."""
        return self._average.state_dict()

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Continue exactly where `state_dict` was taken."""
        self._average.load_state_dict(state)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _measure(self, index: int, grad: Tensor) -> None:
        if not self._is_active:
            return
        if self._fired_in[index] == self._micro:
            self._repeats += 1
        self._fired_in[index] = self._micro
        if self._is_middle:
            self._is_moved |= self._leaves.hooked[index].grad is None and index in self._window_fires
        elif self._world_size > 1:
            self._is_moved |= self._leaves.reduces_now()
        self._window_fires.add(index)
        self._micro_square += square_norm(grad).to(self._device)

    def _accumulated(self, parameter: Tensor) -> None:
        if self._is_active and self._is_middle and not self._is_first and parameter.grad is not None:
            self._middle_fires += 1
            self._middle_square += square_norm(parameter.grad).to(self._device)

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self._device)


# torch keeps hooks where the garbage collector does not look. Had they a hold on their owner, and through it on the process
# group, one that nobody closed would keep the group and its threads alive to the end of the process, where they can abort it.
def _leaf_hook(owner: weakref.ref[GradientNoiseScale], index: int) -> Callable[[Tensor], None]:
    """A hook that returns nothing: what a hook returns replaces the gradient."""

    def measure(grad: Tensor) -> None:
        gns = owner()
        if gns is not None:
            gns._measure(index, grad)

    return measure


def _accumulation_hook(owner: weakref.ref[GradientNoiseScale]) -> Callable[[Tensor], None]:
    def accumulated(parameter: Tensor) -> None:
        gns = owner()
        if gns is not None:
            gns._accumulated(parameter)

    return accumulated


def _sum(terms: Iterable[Tensor], start: Tensor) -> Tensor:
    for term in terms:
        start = start + term.to(start.device)
    return start
