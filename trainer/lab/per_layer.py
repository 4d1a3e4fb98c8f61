"""Gradient norm, update over weight and noise scale of each layer and of each parameter group.

In a loop of one's own, with `GradientNoiseScale` (or without it: there is then no noise scale):

    layers = PerLayer(model, optimizer, gns)      # after both of them
    ...
    gns.begin_window(m, by_parameter=True)        # in the steps that are measured
    layers.before_update()                        # after the last backward, before clipping
    optimizer.step()
    metrics = layers.step()

The sums of a window are kept for each parameter until they have been added up over ranks. Layers
and groups are sums of those: the squares of the layers' norms add up to that of the whole gradient,
and their estimates of tr(Sigma) and |G|^2 to the whole's.
It could go if the whole gradient's numbers were enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.distributed.shards import is_dtensor, layout_of, own_part, own_range
from trainer.errors import UserError
from trainer.metrics.noise_scale import estimate
from trainer.metrics.noise_scale.hooks import GradientNoiseScale, norms_of, square_sum
from trainer.training.extension import Extension
from trainer.training.step.optimizer import group_number, optimizer_parts

if TYPE_CHECKING:
    from trainer.config.schema import OptimizerTable
    from trainer.training.run import Run

NUMBERS = ("grad_norm", "update_ratio", "b_simple")
# Ranks that have measured, the noise scale's sums; then four columns of one number per parameter.
HEAD = 1 + estimate.NUM_SUMS
# What DDP, torch.compile and checkpoint wrappers put into the names of the parameters below them.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
MOST_PER_TENSOR = 16_384
MOST_IN_ALL = 2**20  # so that neither memory nor time grows with the model
FEWEST_PER_TENSOR = 64


class PerLayer:
    """The numbers of a measured step by layer and by parameter group. Raises UserError: there is
    nothing to train, or parameters are sharded otherwise than by rows."""

    def __init__(
        self,
        model: nn.Module,  # as it is given to `GradientNoiseScale`
        optimizer: torch.optim.Optimizer,  # steps between `before_update` and `after_update`
        gns: GradientNoiseScale | None = None,  # None: no noise scale by layer
        *,
        group_names: Sequence[str] | None = None,  # of the optimizer; None: their numbers
        ema: float = 0.95,  # weight of the past in the averages of the noise scale
        process_group: dist.ProcessGroup | None = None,  # that averages gradients, without DDP
    ) -> None:
        self._gns, self._group = gns, process_group
        if self._group is None and gns is not None:
            self._group = gns.group
        inner: nn.Module = model
        if isinstance(model, DistributedDataParallel):
            inner, self._group = model.module, self._group or model.process_group
        named = {name: each for name, each in inner.named_parameters() if each.requires_grad}
        if not named:
            raise UserError("metrics.per_layer", "the model has no trainable parameter", "set it to false")
        self._parameters = list(named.values())
        self.num_sums = HEAD + 4 * len(self._parameters)  # length of what `after_update` returns
        self._world_size = 1
        if self._group is not None:
            self._world_size = dist.get_world_size(self._group)
        self._copies = self._world_size  # ranks that hold the same part of gradient and weights
        layout = layout_of(self._parameters[:1])
        if layout is not None:
            self._copies = layout.replicas
        limit = sample_limit(len(self._parameters))
        self._sample = WeightSample(self._parameters, limit=limit)
        self._members: dict[str, list[int]] = {}
        for number, name in enumerate(named):
            self._members.setdefault(f"layer/{layer_of(name)}", []).append(number)
        numbers = {parameter: number for number, parameter in enumerate(self._parameters)}
        groups = optimizer.param_groups
        for name, settings in zip(group_names or map(str, range(len(groups))), groups, strict=True):
            members = [numbers[each] for each in settings["params"] if each in numbers]
            if members:
                self._members[f"param_group/{name.replace('/', '_')}"] = members
        self._noise = {key: estimate.PairAverage(ema) for key in self._members if gns is not None}
        self._squares: list[Tensor] = []  # of each parameter's gradient, while a step is under way
        self._values: dict[str, float] = {}
        # Every key that `drain_metrics` can return; the values are the same on all ranks.
        keys = (f"{key}/{number}" for key in self._members for number in NUMBERS)
        self.metric_keys: Sequence[str] = tuple(keys)

    def before_update(self, squares: Mapping[nn.Parameter, Tensor] | None = None) -> None:
        """Measure the gradient and copy a sample of the weights. `squares`: square norm of each
        `.grad` (of a sharded one this rank's share), for a loop that has computed them."""
        if squares is None:
            with_grad = [(p, p.grad) for p in self._parameters if p.grad is not None]
            squares = {p: square_sum(norms_of([own_part(grad)])) for p, grad in with_grad}
        zero = torch.zeros((), dtype=torch.float64, device=self._parameters[0].device)
        self._squares = [squares.get(each, zero).to(zero.device) for each in self._parameters]
        self._sample.take()

    def after_update(self, *, has_noise: bool = True) -> Tensor:
        """[num_sums] float64 on the device: this rank's sums, to be SUM-reduced over ranks for
        `finish`. `has_noise`: False: the noise scale's hooks did not measure this window."""
        big = torch.stack(self._squares)
        moved, weights = self._sample.compare()
        head, small = big.new_zeros(estimate.NUM_SUMS), torch.zeros_like(big)
        if has_noise and self._gns is not None and self._gns.parameter_squares is not None:
            head, small = self._gns.local_sums(), self._gns.parameter_squares
        self._squares = []
        shares = torch.cat([big, moved, weights]) / self._copies
        return torch.cat([torch.ones_like(big[:1]), head, small, shares])

    def finish(self, reduced: Sequence[float], *, grad_factor: float | None = None, is_taken: bool = True) -> None:
        """Compute the step's numbers from the reduced sums. `grad_factor`: c, where the gradient is
        c times that of the mean loss; None: as in `estimate`, or 1 without the noise scale. A step
        that is not taken has neither gradient norm nor update, and is no window."""
        self._values = {}
        if is_taken:
            # Micro-gradients, gradient, change, weights.
            length = len(self._parameters)
            columns = [reduced[at : at + length] for at in range(HEAD, self.num_sums, length)]
            self._add(reduced[1:HEAD], columns, grad_factor)
        for key, average in self._noise.items():
            ratio = average.ratio()
            if ratio is not None and ratio.value is not None:
                self._values[f"{key}/b_simple"] = ratio.value

    def _add(self, sums: Sequence[float], columns: Sequence[Sequence[float]], grad_factor: float | None) -> None:
        has_noise = sums[estimate.RANKS] == self._world_size  # every rank's hooks measured the window
        factor = grad_factor or 1.0
        if has_noise and not grad_factor:
            factor = sums[estimate.KAPPA] / sums[estimate.RANKS]
        own = list(sums)
        for key, members in self._members.items():
            of_members = ([column[number] for number in members] for column in columns)
            small, big, moved, weights = map(math.fsum, of_members)
            self._values[f"{key}/grad_norm"] = math.sqrt(big) / factor
            if weights > 0.0:
                self._values[f"{key}/update_ratio"] = math.sqrt(moved / weights)
            if has_noise:
                # Without the middle, which is measured for the whole gradient alone.
                own[estimate.SMALL_SQUARE], own[estimate.MIDDLE_OWN_KAPPA] = small, 0.0
                window = estimate.estimate(own, big, grad_factor=factor)
                if isinstance(window, estimate.Window):
                    self._noise[key].update(window.tr_sigma, window.grad_sq)

    def step(self, *, grad_factor: float | None = None) -> dict[str, float]:
        """All-reduce, and return the metrics; for loops without a reduction of their own. Every
        rank must call it, after the optimizer's step."""
        sums = self.after_update()
        if self._world_size > 1:
            dist.all_reduce(sums, group=self._group)
        reduced = sums.tolist()
        self.finish(reduced, grad_factor=grad_factor, is_taken=all(map(math.isfinite, reduced)))
        return self.drain_metrics()

    def drain_metrics(self) -> dict[str, float]:
        """The last measured step's values by catalog key; what is unknown is left out."""
        values, self._values = self._values, {}
        return values

    def state_dict(self) -> dict[str, Any]:
        """The averages of the noise scale by layer and group, as plain floats."""
        return {key: average.state_dict() for key, average in self._noise.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state exactly; layers that it does not have start anew."""
        for key in self._noise.keys() & state.keys():
            self._noise[key].load_state_dict(state[key])


def layer_of(name: str) -> str:
    """The layer of a parameter: its name up to the first number, `blocks.0` of
    `blocks.0.mixer.weight`; without a number the module that owns it, `embedding` of
    `embedding.weight`; of a parameter of the model itself its own name."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    number = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
    kept = parts[:-1] or parts
    if number is not None:
        kept = parts[: number + 1]
    return ".".join(kept).replace("/", "_")  # which separates the segments of a metric key


def own_entries(tensor: Tensor) -> tuple[int, int]:
    """The entries [first, stop) of the whole tensor, counted row by row, that this rank holds.
    Raises ValueError: it is sharded along another dimension."""
    if is_dtensor(tensor) and not tensor.placements[-1].is_shard(0):
        raise ValueError(f"sharded as {tensor.placements[-1]}")
    start, stop = own_range(tensor)
    row = tensor.numel() // max(tensor.shape[0], 1) if tensor.ndim else 1
    return start * row, stop * row


def sample_limit(num_tensors: int) -> int:
    """Entries of a tensor that are looked at: all, up to this number."""
    return min(MOST_PER_TENSOR, max(MOST_IN_ALL // max(num_tensors, 1), FEWEST_PER_TENSOR))


class WeightSample:
    """Compares the weights before and after an optimizer step. Raises UserError: a parameter is
    sharded along another dimension than its rows.

    Where entries are independent and normal, the relative standard error of a tensor's norm is
    `1 / sqrt(2 n)` for a sample of n entries: 0.6 % at 16,384. With kurtosis k it is
    `sqrt((k - 1) / (4 n))`, which is more for an embedding of which a step moves a few rows.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, limit: int) -> None:
        self._parameters = parameters
        self._places: list[Tensor | None] = []  # [n] indices into this rank's part; None: all of it
        shared: dict[tuple[int, int, int], Tensor] = {}  # tensors of one size share their sample
        for parameter in parameters:
            numel = parameter.numel()  # of the whole tensor
            if numel <= limit:
                self._places.append(None)
                continue
            try:
                first, stop = own_entries(parameter)
            except ValueError as error:
                problem = f"not possible with parameters {error}"
                raise UserError("metrics.per_layer", problem, "shard them by rows, or set it to false") from None
            key = (numel, first, stop)
            if key not in shared:
                generator = torch.Generator().manual_seed(numel)
                drawn = torch.randint(numel, (limit,), generator=generator).sort().values
                own = drawn[(drawn >= first) & (drawn < stop)] - first
                shared[key] = own.to(own_part(parameter).device)
            self._places.append(shared[key])
        sizes = [len(own) for own in self._samples()]
        kind = torch.float32
        if any(each.dtype == torch.float64 for each in parameters):
            kind = torch.float64
        # Allocated once: entries that come and go between gradients would leave holes in the heap
        # as large as those.
        device = parameters[0].device
        self._before, self._now = torch.zeros(2, sum(sizes), dtype=kind, device=device)
        self._before_parts, self._now_parts = (list(torch.split(e, sizes)) for e in (self._before, self._now))
        scales = [max(parameter.numel() / limit, 1.0) for parameter in parameters]
        # [P] entries per entry looked at
        self._scales = torch.tensor(scales, dtype=torch.float64).to(device)

    @torch.no_grad()
    def take(self) -> None:
        """Copy the sample; call before the optimizer's step."""
        self._read(self._before_parts)

    @torch.no_grad()
    def compare(self) -> tuple[Tensor, Tensor]:
        """The squared norms of each parameter's change and of its weights before it, both [P]
        float64 on the device; of a shard this rank's share. Call after the optimizer's step."""
        self._read(self._now_parts)
        self._now.sub_(self._before)
        return self._squares(self._now_parts), self._squares(self._before_parts)

    def _read(self, parts: list[Tensor]) -> None:
        for part, own in zip(parts, self._samples(), strict=True):
            part.copy_(own)

    def _samples(self) -> Iterator[Tensor]:
        """The entries of each parameter that are looked at, [n]."""
        for parameter, places in zip(self._parameters, self._places, strict=True):
            own = own_part(parameter.detach())
            if places is None:
                yield own.reshape(-1)
            else:  # `take` needs no copy of a transposed tensor, as flattening it would
                yield torch.take(own, places)

    def _squares(self, parts: list[Tensor]) -> Tensor:
        return torch.stack(torch._foreach_norm(parts, 2, torch.float64)).square() * self._scales


class LayerNumbers(PerLayer, Extension):
    """`metrics.per_layer`: the numbers of every logged step by layer."""

    keeps = "by_parameter"

    def __init__(self, run: Run) -> None:
        Extension.__init__(self, run)
        super().__init__(
            run.model,
            run.state.optimizer,
            run.gns,
            group_names=names_of_groups(run.state.optimizer, run.model, run.config.optimizer),
            process_group=dist.group.WORLD if run.info.world_size > 1 else None,
        )

    def gradient_ready(self, squares: Mapping[nn.Parameter, Tensor]) -> None:
        self.before_update(squares)

    def updated(self) -> Tensor:
        return self.after_update(has_noise=self.run.measures_noise)

    def summed(self, sums: Sequence[float], *, grad_sq: float, grad_factor: float, is_taken: bool) -> None:
        self.finish(sums, grad_factor=grad_factor, is_taken=is_taken)


def names_of_groups(optimizer: torch.optim.Optimizer, model: nn.Module, table: OptimizerTable) -> list[str]:
    """A name for each of the optimizer's parameter groups: its number; of muon the part that trains
    it; the pattern that its parameters match, or `rest`; and `matrices` or `vectors`.
    `0.rest.matrices`, `2.blocks.*.vectors`."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def label(part: str, parameter: nn.Parameter) -> str:
        number = group_number(names[id(parameter)], table)
        # -1: the parameter matches none
        pattern = [*(group.match for group in table.group), "rest"][number]
        kind = "vectors" if parameter.ndim < 2 else "matrices"
        return ".".join(filter(None, (part, pattern, kind)))

    found: list[str] = []
    for part, own in optimizer_parts(optimizer).items():
        for group in own.param_groups:
            # A target of the user's own may have put together what was apart.
            labels = {label(part, each): None for each in group["params"] if id(each) in names}
            found.append(".".join([str(len(found)), *labels]))
    return found
