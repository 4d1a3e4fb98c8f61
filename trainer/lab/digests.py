"""Digests of a logged step: of its batch, the states it began with, its gradient and the weights it led to.

A digest is the sum of the bits of tensors, read as 64-bit integers, with overflow: exact, and changed by any one bit. Those of
batches and states are sums over data shards, whichever ranks run them. Over ranks a digest is summed in two pieces, exactly,
and with the square of the first: W sum(d^2) = sum(d)^2 only if all W are equal. So ranks whose replicas of the weights differ
are found in the sums of a logged step, and only then tell each other which.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from trainer.distributed.shards import layout_of, own_part
from trainer.metrics.sinks import LineFile
from trainer.on_device import to_device
from trainer.training.extension import Extension
from trainer.training.run_dir import DIGESTS

if TYPE_CHECKING:
    from trainer.data.batch import Carry, MicroBatch
    from trainer.training.run import Run

KINDS: Final = ("batch", "states", "gradient", "weights")
BITS: Final = 22  # of a piece: squares of them add up exactly in float64, over 512 ranks
FACTOR: Final = 0x9E3779B97F4A7C15 - 2**64  # odd, so that multiplying loses no bit


def bit_sum(tensors: Iterable[Tensor]) -> Tensor:
    """[] int64 on the tensors' device: a sum of all bits of the tensors, which depends on their order, well mixed."""
    total: Any = 0
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        whole = flat.numel() // 8 * 8
        if flat.storage_offset() % 8:  # a view of wider numbers would not be aligned
            flat = flat.clone()
        total = (total * FACTOR if isinstance(total, Tensor) else 0) + flat[:whole].view(torch.int64).sum()
        total = total + flat[whole:].sum()
    mixed: Tensor = torch.as_tensor(total, dtype=torch.int64)
    for shift in (33, 29, 32):  # every bit changes the low ones: a bijection, as in splitmix64
        mixed = (mixed ^ (mixed >> shift & (1 << 64 - shift) - 1)) * FACTOR
    return mixed


class Digests(Extension):
    """Writes digests.jsonl, and ends a run whose ranks hold different weights."""

    num_sums = 2 * len(KINDS) + 1

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._parameters = [p for p in run.model.parameters() if p.requires_grad]
        self._are_replicas = run.info.world_size > 1 and layout_of(self._parameters) is None
        self._step, self._agreed, self._differs = 0, run.position.step, False
        self._found: dict[str, Tensor] = {}
        self._states: dict[int, Tensor] = {}
        self._file: LineFile | None = None

    def _own_weights(self) -> Tensor:
        return bit_sum(map(own_part, self._parameters))

    def window_read(self, step: int, window: Sequence[MicroBatch]) -> None:
        """Begin a step with its batches."""
        by_shard = defaultdict[int, list[Tensor]](list)
        for micro in window:
            tensors = by_shard[micro.shard]
            tensors += [value for _, value in sorted(micro.inputs.items()) if isinstance(value, Tensor)]
            tensors += [micro.targets]
            tensors += [] if micro.carry is None else [to_device(micro.carry.group_ids, micro.targets.device)]
        self._step, self._states, self._found = step, {}, {}
        if by_shard:
            self._found["batch"] = torch.stack(list(map(bit_sum, by_shard.values()))).sum()

    def state_found(self, micro: MicroBatch, carry: Carry, state: Tensor) -> None:
        """Take in the states of a micro-batch."""
        before = self._states.get(micro.shard)
        self._states[micro.shard] = bit_sum([state] if before is None else [before, state])

    def gradient_ready(self, squares: Mapping[nn.Parameter, Tensor]) -> None:
        """Take in the gradient by its square norms, which are at hand."""
        self._found["gradient"] = bit_sum(squares.values())

    def updated(self) -> Tensor:
        """The pieces of this rank's digests, and the square that compares replicas."""
        self._found["weights"] = self._own_weights()
        if self._states:
            self._found["states"] = torch.stack(list(self._states.values())).sum()
        device = self._found["weights"].device
        nothing = torch.zeros((), dtype=torch.int64, device=device)
        digests = torch.stack([self._found.get(kind, nothing) for kind in KINDS])
        pieces = torch.stack([digests >> shift & (2**BITS - 1) for shift in (0, BITS)]).double()  # [2, kinds]
        return torch.cat([pieces.reshape(-1), pieces[0, -1:].square()])

    def summed(self, sums: Sequence[float], *, grad_sq: float, grad_factor: float, is_taken: bool) -> None:
        """Write the step's digests, and compare the replicas."""
        low, high, square = sums[: len(KINDS)], sums[len(KINDS) : -1], sums[-1]
        self._differs = self._are_replicas and square * self.run.info.world_size != low[-1] ** 2
        self.run.extensions.asks |= self._differs
        self._agreed = self._agreed if self._differs else self._step
        if self.run.info.is_main and self.run.config.metrics.digests == "write":
            sums = [(int(h) << BITS) + int(w) for w, h in zip(low, high, strict=True)]
            # As many bits as of one rank, whose shards' digests are summed before.
            values = {kind: f"{each % 4**BITS:x}" for kind, each in zip(KINDS, sums, strict=True)}
            # Not before, where a failure on this rank alone would leave the others waiting for its sums.
            self._file = self._file or LineFile(self.run.run_dir.path / DIGESTS)
            self._file.append(json.dumps({"global_step": self._step, **values}))

    def closed(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def to_exchange(self) -> int | None:
        """This rank's weights, if it has seen that they differ."""
        return int(self._own_weights()) if self._differs else None

    def exchanged(self, by_rank: Sequence[Any]) -> None:
        """End the run if the ranks' weights differ, with the ranks that are not as most are."""
        if not self._differs or len(by_rank) < 2:
            return
        usual, _ = Counter(by_rank).most_common(1)[0]
        odd = ", ".join(str(rank) for rank, digest in enumerate(by_rank) if digest != usual)
        self.run.event({"event": "replicas_differ", "global_step": self._step, "ranks": odd, "digests": list(by_rank)})
        self.run.failure = (
            f"step {self._step}: the weights of rank {odd} are not those of most ranks; they agreed after step {self._agreed}: "
            "memory, a device, or code that changes weights is at fault; resume from a checkpoint until then"
        )
