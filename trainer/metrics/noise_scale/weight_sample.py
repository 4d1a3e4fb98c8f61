"""How far an optimizer step moves the weights, without a copy of the model.

Of a tensor with more entries than a limit, a fixed pseudo-random sample of its entries stands for all of them. The sample is
drawn from the whole tensor, so it is the same however the tensor is sharded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainer.distributed.shards import is_dtensor, own_part, own_range
from trainer.errors import UserError

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
        sizes = [
            own_part(parameter.detach()).numel() if places is None else len(places)
            for parameter, places in zip(parameters, self._places, strict=True)
        ]
        # Allocated once: entries that come and go between gradients would leave holes in the heap as large as those.
        kind = torch.float64 if any(parameter.dtype == torch.float64 for parameter in parameters) else torch.float32
        self._before, self._now = torch.zeros(2, sum(sizes), dtype=kind, device=self._device)
        self._before_parts, self._now_parts = (list(torch.split(e, sizes)) for e in (self._before, self._now))
        self._is_taken = False
        scales = [max(parameter.numel() / limit, 1.0) for parameter in parameters]
        self._scales = torch.tensor(scales, dtype=torch.float64).to(self._device)  # [P] entries per entry looked at

    @torch.no_grad()
    def take(self) -> None:
        """Copy the sample; call before the optimizer's step."""
        self._read(self._before_parts)
        self._is_taken = True

    @torch.no_grad()
    def compare(self) -> tuple[Tensor, Tensor]:
        """The squared norms of each parameter's change and of its weights before it, both [P] float64 on the device.

        Of a shard both are this rank's share. Call after the optimizer's step.
        """
        assert self._is_taken, "compare without take"
        self._is_taken = False
        self._read(self._now_parts)
        self._now.sub_(self._before)
        return self._squares(self._now_parts), self._squares(self._before_parts)

    def _read(self, parts: list[Tensor]) -> None:
        for part, parameter, places in zip(parts, self._parameters, self._places, strict=True):
            own = own_part(parameter.detach())
            # `take` counts as a flat view would, without the copy that flattening a transposed tensor makes.
            part.copy_(own.reshape(-1) if places is None else torch.take(own, places))

    def _squares(self, parts: list[Tensor]) -> Tensor:
        return torch.stack(torch._foreach_norm(parts, 2, torch.float64)).square() * self._scales


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
