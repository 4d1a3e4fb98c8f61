"""How far an optimizer step moves the weights, without a copy of the model.

Of a tensor with more entries than a limit, a fixed pseudo-random sample of its entries stands for all of them. The sample is
drawn from the whole tensor, so it is the same however the tensor is sharded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainer.errors import UserError
from trainer.shards import is_dtensor, own_part, own_range

MOST_PER_TENSOR = 16_384
MOST_IN_ALL = 2**20  # so that neither memory nor time grows with the model
FEWEST_PER_TENSOR = 64


def sample_limit(num_tensors: int) -> int:
    """Entries of a tensor that are looked at: all, up to this number."""
    return min(MOST_PER_TENSOR, max(MOST_IN_ALL // max(num_tensors, 1), FEWEST_PER_TENSOR))


class WeightSample:
    """Compares the weights before and after an optimizer step.

    Where entries are independent and normal, the relative standard error of a tensor's norm is `1 / sqrt(2 n)` for a sample of
    n entries: 0.6 % at 16,384. With kurtosis k it is `sqrt((k - 1) / (4 n))`, which is more for an embedding of which a step
    moves a few rows.

    Args:
        parameters: whole, or sharded by rows.
        limit: see `sample_limit`.

    Raises:
        UserError: a parameter is sharded along another dimension than its rows.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, limit: int) -> None:
        self._parameters = parameters
        self._device = parameters[0].device
        self._places: list[Tensor | None] = []  # [n] indices into this rank's part; None: all of it
        shared: dict[tuple[int, int, int], Tensor] = {}  # tensors of one size share their sample
        for parameter in parameters:
            numel = parameter.numel()  # of the whole tensor
            if numel <= limit:
                self._places.append(None)
                continue
            first, stop = _own_entries(parameter)
            key = (numel, first, stop)
            if key not in shared:
                drawn = torch.randint(numel, (limit,), generator=torch.Generator().manual_seed(numel)).sort().values
                own = drawn[(drawn >= first) & (drawn < stop)] - first
                shared[key] = own.to(own_part(parameter).device)
            self._places.append(shared[key])
        own_sizes = [own_part(parameter.detach()).numel() for parameter in parameters]
        self._sizes = [
            size if places is None else len(places) for size, places in zip(own_sizes, self._places, strict=True)
        ]
        scales = [max(parameter.numel() / limit, 1.0) for parameter in parameters]
        self._scales = torch.tensor(scales, dtype=torch.float64).to(self._device)  # [P] entries per entry looked at
        self._before: Tensor | None = None

    @torch.no_grad()
    def take(self) -> None:
        """Copy the sample; call before the optimizer's step."""
        self._before = self._read()

    @torch.no_grad()
    def compare(self) -> tuple[Tensor, Tensor]:
        """The squared norms of each parameter's change and of its weights before it, both [P] float64 on the device.

        Of a shard both are this rank's share. Call after the optimizer's step.
        """
        assert self._before is not None, "compare without take"
        before, self._before = self._before, None
        weights = self._squares(before)
        return self._squares(self._read().sub_(before)), weights

    def _read(self) -> Tensor:
        entries = []
        for parameter, places in zip(self._parameters, self._places, strict=True):
            own = own_part(parameter.detach())
            # `take` counts as a flat view would, without the copy that flattening a transposed tensor makes.
            read = own.reshape(-1) if places is None else torch.take(own, places)
            entries.append((read if read.dtype == torch.float64 else read.float()).to(self._device))
        return torch.cat(entries)

    def _squares(self, entries: Tensor) -> Tensor:
        norms = torch._foreach_norm(list(torch.split(entries, self._sizes)), 2, torch.float64)
        return torch.stack(norms).square() * self._scales


def _own_entries(parameter: nn.Parameter) -> tuple[int, int]:
    """The entries [first, stop) of the whole tensor, counted row by row, that this rank holds."""
    if not is_dtensor(parameter):
        return 0, parameter.numel()
    placement = parameter.placements[-1]
    if not placement.is_shard(0):
        problem = f"not possible with parameters sharded as {placement}"
        raise UserError("metrics.per_layer", problem, "shard them by rows, or set it to false")
    start, stop = own_range(parameter)
    row = parameter.numel() // parameter.shape[0]
    return start * row, stop * row
