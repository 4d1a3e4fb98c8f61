"""Measures the gradient noise scale in an ordinary training loop, by hooks on the parameters.

Works in any loop, on one process, under DDP, FSDP2 or HSDP. With m micro-batches of b examples per
step:

    gns = GradientNoiseScale(ddp_model)
    ...
    gns.begin_window(m)
    for k in range(m):                        # no_sync() around all but the last, as usual
        gns.begin_micro(last=k == m - 1, groups=documents_of(batch[k]))
        (loss_of(batch[k]) / m).backward()
        gns.end_micro(1 / m, b)
    metrics = gns.step()                      # before clipping and optimizer.step()

A hook on the leaf sees each micro-gradient before it is added to `.grad` and before DDP reduces it.
A hook after the accumulation of the last micro-batch sees the rank's own sum: it runs inside the
accumulation node, and DDP reduces after that node.

FSDP2 replaces every parameter by a DTensor of shards, whose hooks never run: autograd accumulates
into the unsharded parameter, a single object over the model's life, which `FSDPModule.unshard()`
registers in the module. Its hooks see the rank's own full micro-gradient.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.distributed.strategy import layout_and_group, layout_of, own_part, unsharded_parameters
from trainer.errors import UserError
from trainer.metrics import noise_scale
from trainer.metrics.catalog_rows import GNS_ROWS
from trainer.metrics.noise_scale import Absent, NoiseScaleAverage, Window

log = logging.getLogger(__name__)
SYNCS = attrgetter("require_backward_grad_sync")  # of DDP, not under `no_sync`
BOUNDED = [f"gns/{name}{bound}" for name in ("b_now", "b_simple") for bound in ("", "_low", "_high")]
_CHUNK = 1024  # elements summed in fp32; 256 takes twice as long, 4,096 loses a digit in bf16
# Where one kernel takes many tensors: one per tensor would cost a small model a tenth of a step.
MULTI_TENSOR = {"cuda"}
# Of gradients that wait to be measured together. On a CPU, the code then stays in its cache.
HELD_BYTES = {"cuda": 2**26, "cpu": 2**20}


def norms_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Numbers, [n] each, whose squares (`square_sum`) add up to those of all elements.

    On one CUDA device the norm of each tensor, in fp64; otherwise norms of rows of 1,024 elements,
    in fp32, and the remainder: almost a single kernel, where the sum itself takes five.
    """
    dense, devices = [], set[torch.device]()  # a model may be spread over several
    for tensor in tensors:
        if tensor.requires_grad:
            tensor = tensor.detach()
        if tensor.is_sparse:
            tensor = tensor.coalesce().values()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        dense.append(tensor)
        devices.add(tensor.device)
    if len(devices) == 1 and devices.pop().type in MULTI_TENSOR:
        flat = [each.reshape(-1) for each in dense]
        return [torch.stack(torch._foreach_norm(flat, 2, dtype=torch.float64))]
    norms = []
    for each in dense:
        rows, rest = divmod(each.numel(), _CHUNK)
        if rest or not rows:
            elements = each.reshape(-1)
            each, left = elements[: rows * _CHUNK], elements[rows * _CHUNK :]
            norms.append(left.to(torch.float64, copy=True))  # a view would keep the tensor
        if rows:
            accumulate = torch.float64 if each.dtype == torch.float64 else torch.float32
            norms.append(torch.linalg.vector_norm(each.reshape(rows, _CHUNK), dim=1, dtype=accumulate))
    return norms


def square_sum(norms: Sequence[Tensor]) -> Tensor:
    """[] float64 on the first tensor's device: the sum of the squares of all numbers, in fp64.

    With `norms_of`, relative error below 1e-6 (in fp32: of elements of 1e-18 to 1e17); at 39
    million about 1e-9 (1e-6 if all are equal), where one fp32 norm on a CPU has 5e-3.
    """
    device = norms[0].device
    by_type: dict[torch.dtype, list[Tensor]] = {}  # to join several types takes much longer on CUDA
    for each in norms:
        if each.device != device:
            each = each.to(device)
        by_type.setdefault(each.dtype, []).append(each)
    wide = torch.cat(list(map(Tensor.double, map(torch.cat, by_type.values()))))
    return torch.dot(wide, wide)


class GradientNoiseScale(NoiseScaleAverage):
    """The average noise scale of a model trained in windows of micro-batches, measured by hooks.

    `model`: a module, also wrapped in DDP, or by FSDP2's `fully_shard`, HSDP included (its process
    group is then the one that averages gradients, and every rank must construct this object).
    Parameters that do not require a gradient at construction are left out. `process_group`: for a
    loop that averages gradients over ranks itself, without DDP. `weights_are_tokens`: whether
    `example_weights` are token counts; see `gns/b_simple_tokens`. Errors are those of
    `find_leaves`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        ema: float = 0.95,
        process_group: dist.ProcessGroup | None = None,
        weights_are_tokens: bool = True,
    ) -> None:
        super().__init__(ema)
        # Every key that `drain_metrics` can return; the values are the same on all ranks.
        self.metric_keys = tuple(spec.name for spec in GNS_ROWS)
        self._leaves = find_leaves(model, process_group)
        self._parameters = self._leaves.parameters
        self.group = self._leaves.group  # ranks that average gradients; None on a single process
        self._world_size = 1 if self.group is None else dist.get_world_size(self.group)
        self._weights_are_tokens = weights_are_tokens
        self._window_fires: set[int] = set()  # of parameters, up to the last micro-batch
        self._is_active = self._has_warned = False
        self._failure: Exception | None = None  # of a hook
        # Made once: the CUDA graphs of `repeat` add to these very tensors.
        self._sums = torch.zeros(noise_scale.NUM_SUMS, dtype=torch.float64, device=self._parameters[0].device)
        self.begin_window()
        self._handles: list[Any] = []
        # torch stores hooks where the garbage collector does not look. A strong reference to the
        # owner, and through it to the process group, would keep an unclosed group and its threads
        # alive until exit, where they can abort the process.
        owner = weakref.ref(self)
        for index, parameter in enumerate(self._leaves.hooked):
            leaf: Any = parameter  # torch does not type these two methods
            self._handles.append(leaf.register_hook(partial(self._hook, owner, type(self)._measure, index)))
            if self._world_size > 1:  # a single process still has the sum after the backward
                accumulated = partial(self._hook, owner, type(self)._accumulated)
                self._handles.append(leaf.register_post_accumulate_grad_hook(accumulated))

    def begin_window(self, num_micros: int | None = None, *, spread: int = 1, by_rank: bool = False) -> None:
        """Start a window of `num_micros` micro-batches; an unfinished one is discarded.

        A single rank needs their number for `gns/consistency`. `spread`: windows after which the
        rows that follow the window's in their documents come. `by_rank`: a rank's micro-batches
        continue each other's documents, so that only ranks are compared.
        """
        self._sums.zero_()
        self._failure = None
        self._sums[noise_scale.RANKS].fill_(1.0)  # `= 1.0` would copy it from the host, and wait
        self._middle_at: int | None = None
        if num_micros is not None and self._world_size == 1:
            self._middle_at = (num_micros + 1) // 2
        self.stretches.spread, self._by_rank = spread, by_rank
        self._groups: set[Hashable] = set()  # of the rows so far
        self._repeated, self._rows_before, self._num_micros = 0, 0.0, 0  # so far
        self._is_over = False
        self._is_moved = False  # `.grad` is no longer what this rank has accumulated
        self._window_fires.clear()

    def begin_micro(self, last: bool, *, groups: Collection[Hashable] = (), rows_before: float = 0.0) -> None:
        """Call before a micro-batch's backward. `last`: it is the window's last, in which DDP
        reduces.

        `groups`: what its rows are of, documents for example. Micro-batches must be independent: a
        window with two of one document on this rank does not enter the averages. `rows_before`:
        rows of its document before a row, on average.
        """
        assert not self._is_over, "begin_micro without begin_window"  # sums would be of two windows
        if isinstance(next(iter(groups), None), Tensor):  # which equals no other one
            groups = torch.stack([*map(torch.as_tensor, groups)]).flatten().tolist()
        self._repeated += not self._groups.isdisjoint(groups)
        self._groups.update(groups)
        self._rows_before += rows_before
        self._num_micros += 1
        # On several ranks, the middle group is all of this rank's micro-batches.
        self._is_middle = last if self._world_size > 1 else self._num_micros == self._middle_at
        self._is_first = self._num_micros == 1
        self._micro_norms: list[Tensor] = []
        # Not measured yet: gradients, or parameters that have them.
        self._held: list[tuple[int, Tensor]] = []
        self._held_bytes = 0
        # A reduction within the backward replaces a parameter's gradient as soon as it is there.
        syncs = any(map(SYNCS, self._leaves.ddp))
        reduces = syncs or self._leaves.is_sharded or (last and self._world_size > 1)
        self._may_hold = 0 if reduces else HELD_BYTES.get(self._sums.device.type, 0)
        self._sum_norms: list[Tensor] = []  # of the running sum
        self._sum_fires = 0
        self._fired: list[int] = []  # in this micro-batch, in order
        self._is_active = True

    def end_micro(self, kappa: float | Tensor, example_weights: Tensor | int) -> None:
        """Call after the backward of a micro-batch, before anything changes `.grad`.

        `kappa`: factor on the micro-batch's mean loss in the backward, before DDP's average: 1/m,
        1/m times the loss scale, or the constant times this micro-batch's tokens where a sum of
        token losses is differentiated; zero for a micro-batch with no target token.
        `example_weights`: [B] weight of each example in the mean (its tokens; zero for a masked
        row), or the number of examples if all weigh the same.
        """
        if self._failure is not None:
            raise self._failure
        assert self._is_active, "end_micro without begin_micro"
        self._is_active = False
        self._measure_held()
        self._window_fires.update(self._fired)
        if self._world_size == 1 and self._is_middle and not self._is_first:
            leaves = [self._leaves.hooked[index] for index in self._fired]
            sums = [leaf.grad for leaf in leaves if leaf.grad is not None]
            self._sum_fires += len(sums)
            self._sum_norms += norms_of(sums)
        nothing = self._sums.new_zeros(1)
        micro_square = square = square_sum([nothing, *self._micro_norms])
        if self._is_middle and not self._is_first:
            square = square_sum([nothing, *self._sum_norms])
        factor = torch.as_tensor(kappa, dtype=torch.float64, device=self._sums.device)
        zero = tokens = torch.zeros_like(factor)
        if isinstance(example_weights, int):
            noise = torch.full_like(factor, 1.0 / max(example_weights, 1))
        else:
            weights = example_weights.detach().to(self._sums)
            total = weights.sum()
            noise = weights.square().sum() / total.square()
            if self._weights_are_tokens:
                tokens = total
        has_weight = factor > 0.0
        noise = torch.where(has_weight, noise, 0.0)
        fault = (~has_weight & (micro_square > 0.0)).double()
        repeats = len(self._fired) - len(set(self._fired))
        if repeats > 0:
            fault = fault + 1.0
            if not self._has_warned:
                self._has_warned = True
                text = "gns: %d gradient hooks ran more than once in one backward (reentrant checkpointing?)"
                log.warning(text + ", and such steps are skipped; pass use_reentrant=False", repeats)
        squared = factor.square()
        update = [factor, squared, micro_square, factor * noise, squared * noise]
        self._sums += torch.stack([*update, zero, zero, zero, zero, tokens, zero, fault, zero, zero])
        # The middle needs `.grad` to be the sum over its group for every parameter. It is not if a
        # parameter with an older gradient was not used in this micro-batch, if FSDP2 keeps the sum
        # elsewhere (it reduces in another type than it accumulates in), or if the loop reduces
        # after every micro-batch. A group of one micro-batch has that one's norm.
        is_whole = self._is_first or (not self._is_moved and self._sum_fires >= len(self._window_fires))
        if self._is_middle and is_whole:
            own, middle = noise_scale.KAPPA_SQUARE, noise_scale.MIDDLE_OWN_KAPPA
            self._sums[middle : middle + 2] = self._sums[own : own + 2]
            self._sums[noise_scale.MIDDLE_KAPPA] = self._sums[noise_scale.KAPPA].square()
            self._sums[noise_scale.MIDDLE_SQUARE] = square

    @property
    def kind(self) -> tuple[bool, ...]:
        """The conditions that decide the device's work for the micro-batch that has begun."""
        return self._is_first, self._is_middle

    def trace(self) -> frozenset[int]:
        """The host's part of the micro-batch in which a CUDA graph was captured, for `repeat`."""
        return frozenset(self._fired)

    def repeat(self, trace: frozenset[int]) -> None:
        """Replaces backward and `end_micro` if the device replayed the micro-batch of `trace`."""
        self._is_active = False
        self._window_fires |= trace

    def again(self) -> None:
        """Begin the micro-batch again, whose backward failed."""
        self._num_micros -= 1
        self.begin_micro(self._is_middle)

    def local_sums(self) -> Tensor:
        """[NUM_SUMS] float64 on the device: this rank's sums, to be SUM-reduced over ranks."""
        assert not self._is_active, "local_sums between begin_micro and end_micro"
        self._is_over = True
        self.big_noise *= self._world_size * self._num_micros > 1  # one alone has no B
        sums = self._sums.clone()
        # Without a hook that ran, the sums of the window are unknown, not zero.
        if not self._window_fires:
            sums[noise_scale.FAULTS] += 1.0
        repeated = self._repeated
        if self._by_rank:  # each rank's sum stands for its micro-batches
            repeated = int(self._world_size == 1 or self._leaves.is_sharded)  # nobody has that sum
            own, middle = noise_scale.KAPPA_SQUARE, noise_scale.MIDDLE_KAPPA
            if not repeated:
                sums[noise_scale.FAULTS] += sums[middle] != sums[noise_scale.KAPPA].square()
            sums[own : own + 2] = sums[middle : middle + 2]
            sums[noise_scale.MIDDLE_OWN_KAPPA : middle + 2] = 0.0
        # Filled on the device: a tensor made from host numbers would be copied, and waited for.
        sums[noise_scale.REPEATED].fill_(repeated)
        sums[noise_scale.ROWS_BEFORE].fill_(self._rows_before / max(self._num_micros, 1))
        return sums

    def grad_sq(self) -> Tensor:
        """[] float64: square norm of the `.grad` of all parameters, by the micro-batches' kernel.

        It includes noise, unlike the estimate `gns/grad_sq`. With FSDP2 it is the rank's share, to
        be SUM-reduced over the ranks of the group.
        """
        own = [own_part(each.grad) for each in self._parameters if each.grad is not None]
        return square_sum([self._sums.new_zeros(1), *norms_of(own)]) / self._leaves.copies

    def finish(
        self, reduced_sums: Sequence[float], grad_sq: float, *, grad_factor: float | None = None
    ) -> Window | Absent:
        """Add the window to the averages, from the reduced sums and norm; see `estimate`."""
        window = noise_scale.estimate(reduced_sums, grad_sq, grad_factor=grad_factor)
        self.update(window)
        return window

    def step(self, *, grad_factor: float | None = None) -> dict[str, float | None]:
        """All-reduce, estimate, and return the metrics, for loops without a reduction of their own.

        A noise scale, or a bound, that is not known is None: that of an earlier step would not fit.
        Every rank must call it, after the last backward (and `unscale_`), before clipping.
        """
        packed = torch.cat([self.local_sums(), self.grad_sq().reshape(1)])
        if self._world_size > 1:
            # The norm of a gradient that DDP has averaged is whole on every rank.
            shared = packed if self._leaves.is_sharded else packed[: noise_scale.NUM_SUMS]
            dist.all_reduce(shared, group=self.group)
        *reduced, square = packed.tolist()
        self.finish(reduced, square, grad_factor=grad_factor)
        return {**dict.fromkeys(BOUNDED), **self.drain_metrics()}

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @staticmethod
    def _hook(owner: weakref.ref[GradientNoiseScale], measure: Callable[..., None], *args: Any) -> None:
        # A return value would replace the gradient, and an exception end the backward in its midst.
        gns = owner()
        if gns is None or not gns._is_active:
            return
        try:
            measure(gns, *args)
        except Exception as error:  # noqa: BLE001 - raised by end_micro
            gns._is_active, gns._failure = False, error

    def _measure(self, index: int, grad: Tensor) -> None:
        leaf = self._leaves.hooked[index]
        if self._is_middle and leaf.grad is None and index in self._window_fires:
            self._is_moved = True
        if not self._is_middle and self._world_size > 1 and any(map(SYNCS, self._leaves.ddp)):
            self._is_moved = True  # not under `no_sync`: it reduces after this backward
        self._fired.append(index)
        if self._may_hold > 0 and leaf.grad is None:
            # It is measured as the parameter's own: a reference here would have it copied.
            self._held.append((index, leaf))
        else:
            self._held.append((index, grad))
            self._held_bytes += grad.numel() * grad.element_size()  # sparse ones have no `nbytes`
        if self._held_bytes > self._may_hold:
            self._measure_held()

    def _measure_held(self) -> None:
        held, self._held, self._held_bytes = self._held, [], 0
        gradients = []
        for index, each in held:
            gradient = each.grad if each is self._leaves.hooked[index] else each
            if gradient is None:
                raise RuntimeError("a gradient was taken away before its micro-batch ended")
            gradients.append(gradient)
        self._micro_norms += norms_of(gradients)

    def _accumulated(self, parameter: Tensor) -> None:
        """The hook after accumulation, which measures the running sum."""
        if not self._is_middle or self._is_first or parameter.grad is None:
            return
        self._sum_fires += 1
        self._sum_norms += norms_of([parameter.grad])


@dataclass(frozen=True)
class Leaves:
    """The trained parameters of a model."""

    hooked: Sequence[nn.Parameter]  # where autograd accumulates
    parameters: Sequence[nn.Parameter]  # the optimizer's; their `.grad` form the big gradient
    group: dist.ProcessGroup | None  # the ranks that average gradients; None on a single process
    is_sharded: bool  # whether `.grad` holds only this rank's shards
    copies: int = 1  # if so, how many ranks of the group hold the same shards
    ddp: Sequence[DistributedDataParallel] = ()  # the model, or all its modules that are DDP's


def find_leaves(model: nn.Module, process_group: dist.ProcessGroup | None) -> Leaves:
    """The leaves of `model`. With FSDP2 it all-gathers every parameter: all ranks must call it.

    Raises UserError: nothing to train; DTensors without FSDP2 (tensor parallelism); a mesh of
    replicas that is not all ranks, or several ranks and a parameter outside DDP, without a
    `process_group`; sharded next to unsharded parameters (`ignored_params`: not averaged).
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise UserError("gns.enabled", "the model has no trainable parameter", "set it to false")
    if layout_of(parameters) is None:
        # It may stand within another module, as after `torch.compile`, or wrap the parts of one.
        wrapped = [each for each in model.modules() if isinstance(each, DistributedDataParallel)]
        if process_group is None and wrapped and {*parameters} <= {p for each in wrapped for p in each.parameters()}:
            process_group = wrapped[0].process_group
        elif process_group is None and dist.is_initialized() and dist.get_world_size() > 1:
            problem = "not possible with several ranks and a parameter that DDP does not wrap"
            fix = "give the wrapped model, or the process_group that averages gradients"
            raise UserError("gns.enabled", problem, fix)
        return Leaves(parameters, parameters, process_group, is_sharded=False, ddp=wrapped)
    try:
        layout, own_group = layout_and_group(parameters)
        group = process_group or own_group
        if group is None:
            part = "a mesh of replicas and shards that is a part of the ranks"
            raise ValueError(f"{part}, unless process_group names them")
        hooked = unsharded_parameters(model)
    except ValueError as error:
        fix = "use DDP or fully_shard alone, or set it to false"
        raise UserError("gns.enabled", f"not possible with {error}", fix) from None
    return Leaves(hooked, parameters, group, is_sharded=True, copies=layout.replicas)
