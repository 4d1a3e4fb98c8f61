"""Writes digests.jsonl: digests of a step's batch, states, gradient and new weights.

`train replay` and `train bisect` compare them. A digest is a `bit_sum`: exact, and changed by any
one bit. Those of batches and states are sums over data shards, whichever ranks run them. It could
go if runs were compared by loss and gradient norm alone.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from trainer.distributed.shards import own_part
from trainer.metrics.sinks import LineFile
from trainer.on_device import to_device
from trainer.training.extension import Extension
from trainer.training.run_dir import DIGESTS
from trainer.training.step.core_extensions import bit_sum

if TYPE_CHECKING:
    from trainer.data.batch import Carry, MicroBatch
    from trainer.training.run import Run

KINDS: Final = ("batch", "states", "gradient", "weights")
BITS: Final = 22  # of a piece: digests are summed over ranks in two, each exactly in float64


class Digests(Extension):
    """`metrics.digests = "write"`."""

    num_sums = 2 * len(KINDS)

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._parameters = [each for each in run.model.parameters() if each.requires_grad]
        self._step = 0
        self._found: dict[str, Tensor] = {}
        self._states: dict[int, Tensor] = {}
        self._file: LineFile | None = None

    def window_read(self, step: int, window: Sequence[MicroBatch]) -> None:
        by_shard = defaultdict[int, list[Tensor]](list)
        for micro in window:
            tensors = by_shard[micro.shard]
            inputs = (value for _, value in sorted(micro.inputs.items()))
            tensors += [value for value in inputs if isinstance(value, Tensor)]
            tensors.append(micro.targets)
            if micro.carry is not None:
                tensors.append(to_device(micro.carry.group_ids, micro.targets.device))
        self._step, self._states, self._found = step, {}, {}
        if by_shard:
            self._found["batch"] = torch.stack(list(map(bit_sum, by_shard.values()))).sum()

    def state_found(self, micro: MicroBatch, carry: Carry, state: Tensor) -> None:
        before = self._states.get(micro.shard)
        self._states[micro.shard] = bit_sum([state] if before is None else [before, state])

    def gradient_ready(self, squares: Mapping[nn.Parameter, Tensor]) -> None:
        """Add the gradient by its square norms, which are at hand."""
        self._found["gradient"] = bit_sum(squares.values())

    def updated(self) -> Tensor:
        """The pieces of this rank's digests: the low ones of all kinds, then the high ones."""
        # Of sharded weights, each rank's own part.
        weights = self._found["weights"] = bit_sum(map(own_part, self._parameters))
        if self._states:
            self._found["states"] = torch.stack(list(self._states.values())).sum()
        nothing = torch.zeros_like(weights)
        digests = torch.stack([self._found.get(kind, nothing) for kind in KINDS])
        pieces = [digests >> shift & (2**BITS - 1) for shift in (0, BITS)]
        return torch.cat(pieces).double()

    def summed(self, sums: Sequence[float], *, grad_sq: float, grad_factor: float, is_taken: bool) -> None:
        if not self.run.info.is_main:
            return
        values: dict[str, int | str] = {"global_step": self._step}
        for kind, low, high in zip(KINDS, sums, sums[len(KINDS) :], strict=False):
            total = (int(high) << BITS) + int(low)
            # As many bits as of one rank, whose shards' digests are summed before.
            values[kind] = f"{total % 4**BITS:x}"
        # Not opened before, where a failure on this rank alone would leave the others waiting.
        self._file = self._file or LineFile(self.run.run_dir.path / DIGESTS)
        self._file.append(json.dumps(values))

    def closed(self) -> None:
        if self._file is not None:
            self._file.close()
