"""The core's own extensions: details of logged steps, model metrics, comparison of replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from trainer.data.batch import MicroBatch
from trainer.distributed.shards import own_part
from trainer.metrics.aggregate import Reported
from trainer.objective.loss import ObjectiveOutput
from trainer.training.extension import Extension
from trainer.training.step.details import StepDetails

if TYPE_CHECKING:
    from trainer.training.run import Run

COMPARED_BITS: Final = 22  # of a digest: their squares add up exactly in float64, over 512 ranks
FACTOR: Final = 0x9E3779B97F4A7C15 - 2**64  # odd, so that multiplying loses no bit


class LoggedDetails(Extension):
    """The details of logged steps."""

    def __init__(self, run: Run, details: StepDetails) -> None:
        super().__init__(run)
        self._details = details
        self.metric_keys = details.metric_keys

    def micro_done(self, micro: MicroBatch, result: ObjectiveOutput) -> None:
        """Add one micro-batch."""
        self._details.add(micro, result)

    def drain_metrics(self) -> Mapping[str, Reported]:
        """The step's sums."""
        return self._details.drain_metrics()


class ModelMetrics(Extension):
    """The metrics of the model's output, at every step: counters add up between two logged ones."""

    every_step = True

    def __init__(self, run: Run, metric_keys: Sequence[str]) -> None:
        super().__init__(run)
        self.metric_keys = metric_keys

    def micro_done(self, micro: MicroBatch, result: ObjectiveOutput) -> None:
        """Add one micro-batch."""
        self.run.recorder.add(result.metrics or {})


def bit_sum(tensors: Iterable[Tensor]) -> Tensor:
    """[] int64 on the tensors' device: a digest that any single bit changes."""
    total: Any = 0
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        whole = flat.numel() // 8 * 8
        if flat.storage_offset() % 8:  # a view of wider numbers would not be aligned
            flat = flat.clone()
        # Sums of 64-bit integers overflow, and lose no bit by it.
        total = total * FACTOR + flat[:whole].view(torch.int64).sum() + flat[whole:].sum()
    mixed: Tensor = torch.as_tensor(total, dtype=torch.int64)
    for shift in (33, 29, 32):  # every bit changes the low ones: a bijection, as in splitmix64
        mixed = (mixed ^ (mixed >> shift & (1 << 64 - shift) - 1)) * FACTOR
    return mixed


class Replicas(Extension):
    """Ends a run whose ranks hold different weights, by the digests d of the W ranks."""

    num_sums = 2  # W sum(d^2) = sum(d)^2 only if all digests are equal

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._parameters = [each for each in run.model.parameters() if each.requires_grad]
        self._step, self._agreed, self._differs = 0, run.position.step, False

    def _digest(self) -> Tensor:
        return bit_sum(map(own_part, self._parameters))

    def window_read(self, step: int, window: Sequence[MicroBatch]) -> None:
        """Note the step."""
        self._step = step

    def updated(self) -> Tensor:
        """This rank's digest and its square."""
        digest = (self._digest() & (1 << COMPARED_BITS) - 1).double()
        return torch.stack([digest, digest.square()])

    def summed(self, sums: Sequence[float], *, grad_sq: float, grad_factor: float, is_taken: bool) -> None:
        """Compare the ranks."""
        self._differs = sums[1] * self.run.info.world_size != sums[0] ** 2
        self.run.extensions.asks |= self._differs
        if not self._differs:
            self._agreed = self._step

    def to_exchange(self) -> int | None:
        """This rank's digest, if the ranks differ."""
        return int(self._digest()) if self._differs else None

    def exchanged(self, by_rank: Sequence[Any]) -> None:
        """End the run if the ranks differ, and name those that are not as most are."""
        if not self._differs or len(by_rank) < 2:  # alone: the run has failed otherwise
            return
        usual, _ = Counter(by_rank).most_common(1)[0]
        odd = ", ".join(str(rank) for rank, digest in enumerate(by_rank) if digest != usual)
        event = {"event": "replicas_differ", "global_step": self._step, "ranks": odd}
        self.run.event({**event, "digests": list(by_rank)})
        self.run.extensions.failure = (
            f"step {self._step}: the weights of rank {odd} are not those of most ranks; "
            f"they agreed after step {self._agreed}: memory, a device, or code that changes weights is at fault; "
            "resume from a checkpoint until then"
        )
