"""Gradient norm, and update over weight, of each layer on logged steps (`metrics.per_layer`).

The sums of a step are kept for each parameter until they have been added up over ranks. Layers are
sums of those: the squares of their norms add up to that of the whole gradient.
It could go if the whole gradient's norm were enough.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainer.distributed.shards import own_part, own_range
from trainer.training.extension import Extension

if TYPE_CHECKING:
    from trainer.training.run import Run

# Entries of a tensor that are looked at. Where they are independent and normal, the relative
# standard error of a tensor's norm is `1 / sqrt(2 n)` for a sample of n: 0.6 % at 16,384. With
# kurtosis k it is `sqrt((k - 1) / (4 n))`, which is more for an embedding of which a step moves a
# few rows.
MOST_PER_TENSOR, FEWEST_PER_TENSOR = 16_384, 64
MOST_IN_ALL = 2**20  # so that neither memory nor time grows with the model


class LayerNumbers(Extension):
    """The numbers of a measured step by layer; of large tensors by a sample of their weights."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        named = {name: each for name, each in run.model.named_parameters() if each.requires_grad}
        self._parameters = list(named.values())
        self._members: dict[str, list[int]] = {}  # numbers of a layer's parameters
        for number, name in enumerate(named):
            self._members.setdefault(f"layer/{layer_of(name)}", []).append(number)
        self.metric_keys = [f"{key}/{what}" for key in self._members for what in ("grad_norm", "update_ratio")]
        self.num_sums = 3 * len(named)
        limit = min(MOST_PER_TENSOR, max(MOST_IN_ALL // len(named), FEWEST_PER_TENSOR))
        self._places = [places_of(each, limit) for each in self._parameters]
        scales = [max(each.numel() / limit, 1.0) for each in self._parameters]
        # [P] entries per entry looked at
        self._scales = torch.tensor(scales, dtype=torch.float64).to(self._parameters[0].device)
        # While a step is under way: of each parameter's gradient, and entries before the update.
        self._gradients: list[Tensor] = []
        self._before: list[Tensor] = []
        self._values: dict[str, float] = {}

    def gradient_ready(self, squares: Mapping[nn.Parameter, Tensor]) -> None:
        """Note the gradients' squared norms, and copy a sample of the weights."""
        zero = torch.zeros_like(self._scales[0])
        self._gradients = [squares.get(each, zero).to(zero.device) for each in self._parameters]
        self._before = self._entries()

    def updated(self) -> Tensor:
        """This rank's share of the squared norms of gradients, changes and weights, in turn."""
        moved = torch._foreach_sub(self._entries(), self._before)
        squares = [torch.stack(self._gradients), self._squares(moved), self._squares(self._before)]
        self._gradients, self._before = [], []
        return torch.cat(squares) / self.run.strategy.copies  # ranks that hold the same part

    def summed(self, sums: Sequence[float], *, grad_sq: float, grad_factor: float, is_taken: bool) -> None:
        """Compute the step's numbers; a skipped step has none."""
        self._values, length = {}, len(self._parameters)
        if not is_taken:
            return
        columns = [sums[at : at + length] for at in range(0, self.num_sums, length)]
        for key, members in self._members.items():
            of_members = ([column[number] for number in members] for column in columns)
            gradient, moved, weights = map(math.fsum, of_members)
            self._values[f"{key}/grad_norm"] = math.sqrt(gradient) / grad_factor
            if weights > 0.0:
                self._values[f"{key}/update_ratio"] = math.sqrt(moved / weights)

    def drain_metrics(self) -> dict[str, float]:
        """The last measured step's values; they are the same on all ranks."""
        values, self._values = self._values, {}
        return values

    @torch.no_grad()
    def _entries(self) -> list[Tensor]:
        """Copies of the entries of each parameter that are looked at, [n]."""
        found = []
        for parameter, places in zip(self._parameters, self._places, strict=True):
            own = own_part(parameter)
            # Of a transposed tensor, `take` needs no copy of the whole, as flattening would.
            entries = own.reshape(-1).clone() if places is None else torch.take(own, places)
            found.append(entries.to(torch.promote_types(entries.dtype, torch.float32)))
        return found

    def _squares(self, parts: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
        return torch.stack(torch._foreach_norm(parts, 2, torch.float64)).square() * self._scales


def layer_of(name: str) -> str:
    """The layer of a parameter: its name up to the first number, `blocks.0` of
    `blocks.0.mixer.weight`; without a number the module that owns it, `embedding` of
    `embedding.weight`; of a parameter of the model itself its own name."""
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
    kept = parts[:-1] or parts
    if number is not None:
        kept = parts[: number + 1]
    return ".".join(kept).replace("/", "_")  # which separates the segments of a metric key


def places_of(parameter: nn.Parameter, limit: int) -> Tensor | None:
    """[n] the entries of this rank's part that are looked at, which depend on the whole tensor's
    size alone; None: all."""
    numel = parameter.numel()  # of the whole tensor
    if numel <= limit:
        return None
    first, stop = (each * (numel // parameter.shape[0]) for each in own_range(parameter))
    drawn = torch.randint(numel, (limit,), generator=torch.Generator().manual_seed(numel)).sort().values
    return (drawn[(drawn >= first) & (drawn < stop)] - first).to(own_part(parameter).device)
