"""What a logged step reports beside its loss: components, accuracy, loss by token type, by source and by modality.

All are sums and counts on the device, over this rank's micro-batches; on other steps nothing is collected.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from trainer.arrays import IGNORED, Ints
from trainer.data.batch import MicroBatch
from trainer.distributed.shards import own_part
from trainer.files import read_lines
from trainer.metrics.aggregate import Recorder, Reported, SumCount
from trainer.metrics.best_effort import Diagnostics, SkipBatch
from trainer.objective.loss import ObjectiveOutput, TokenTypeMismatch, token_type_sums
from trainer.on_device import to_device
from trainer.training.extension import Extension
from trainer.training.run_dir import REQUESTS

if TYPE_CHECKING:
    from trainer.training.run import Run


class StepDetails:
    """Collects the sums of a logged step or of an evaluation.

    Args:
        components: names of the loss's components.
        token_types: names of the token types; empty: no losses by token type.
        model_metrics: names of the metrics of the model's output.
        sources, modalities: labels whose losses are reported; other labels, which a data set of one's own may make up, are
            left out.
        bytes_of: bytes of text that each token id stands for, integers [V], on the device; None: no bits per byte.
        diagnostics: guards losses by token type and by label: a failure there costs that diagnostic alone.
    """

    def __init__(
        self,
        components: Iterable[str],
        *,
        token_types: Sequence[str] = (),
        model_metrics: Sequence[str] = (),
        sources: Collection[str] = (),
        modalities: Collection[str] = (),
        bytes_of: Tensor | None = None,
        diagnostics: Diagnostics | None = None,
    ) -> None:
        diagnostics = diagnostics or Diagnostics()
        self._token_types, self._bytes_of = token_types, bytes_of
        self._labels = {"source": ("dataset_labels", sources), "modality": ("dataset_segments", modalities)}
        self._token_type_guard = diagnostics.best_effort("token_type")
        self._label_guard = diagnostics.best_effort("per_source")
        self._sums: dict[str, SumCount] = {}
        self._weight = 1.0
        self._has_model_metrics = bool(model_metrics)
        self._model_metrics = Recorder(leave_out=diagnostics.best_effort("model").leave_out)
        self.metric_keys: tuple[str, ...] = (
            "loss",
            "accuracy",
            *(("bits_per_byte",) if bytes_of is not None else ()),
            *model_metrics,
            *(f"objective/{name}" for name in components),
            *(f"token_type/{name}/{what}" for name in token_types for what in ("loss", "accuracy")),
            *(f"{kind}/{name}/loss" for kind, (_, names) in self._labels.items() for name in names),
        )

    def add(self, micro: MicroBatch, result: ObjectiveOutput, weight: float = 1.0) -> None:
        """Take in one micro-batch, or rows that stand for `weight` times as many."""
        self._weight = weight
        if result.parts:  # an evaluation need not have those of the model
            self._put("loss", result.loss_sum.detach(), result.num_tokens)
        for name, (total, count) in result.parts.items():
            self._put(f"objective/{name}", total, count)
        loss, is_correct = result.token_loss, result.is_correct
        if is_correct is not None:
            self._put("accuracy", is_correct.sum(), result.num_tokens)
        if self._bytes_of is not None and loss is not None:
            num_bytes = self._bytes_of[micro.targets.clamp(min=0)].masked_fill(micro.targets == IGNORED, 0)
            nats = loss.masked_fill(num_bytes == 0, 0.0).sum().double()  # marks are no text
            self._put("bits_per_byte", nats / math.log(2), num_bytes.sum())
        if self._has_model_metrics:
            self._model_metrics.add(result.metrics or {})
        if self._token_types and "token_types" in micro.extras and loss is not None and is_correct is not None:
            self._token_type_guard.run(self._add_token_types, micro, loss, is_correct)
        for kind, (extra, names) in self._labels.items():
            if names and loss is not None and (labels := micro.extras.get(extra)):
                self._label_guard.run(self._add_labels, kind, names, labels, micro, loss)

    def drain_metrics(self) -> dict[str, Reported]:
        """The sums since the last drain, by catalog key."""
        drained, self._sums = self._sums, {}
        return {**drained, **self._model_metrics.drain_metrics()}

    def _put(self, key: str, total: Tensor, count: Tensor) -> None:
        if self._weight != 1.0:
            total, count = total.double() * self._weight, count.double() * self._weight
        before = self._sums.get(key)
        if before is not None:
            total, count = before.total + total, before.weight + count
        self._sums[key] = SumCount(total.double(), count.double())

    def _add_token_types(self, micro: MicroBatch, loss: Tensor, is_correct: Tensor) -> None:
        types = micro.extras["token_types"]
        try:
            # Masked by the targets: a rank whose data are exhausted keeps the types of its last batch, and a data set of
            # one's own may type every position.
            mask = micro.targets != IGNORED
            sums = token_type_sums(loss, is_correct, types, len(self._token_types), mask=mask)
        except TokenTypeMismatch as error:
            raise SkipBatch(str(error)) from None
        for index, name in enumerate(self._token_types):
            self._put(f"token_type/{name}/loss", sums.loss[index], sums.num_tokens[index])
            self._put(f"token_type/{name}/accuracy", sums.num_correct[index], sums.num_tokens[index])

    def _add_labels(
        self, kind: str, names: Collection[str], labels: Sequence[str], micro: MicroBatch, loss: Tensor
    ) -> None:
        if (segments := micro.extras.get("segment_ids")) is not None:
            self._add_segments(kind, names, labels, segments, micro, loss)
            return
        if len(labels) != len(micro.targets):
            raise SkipBatch(f"{len(labels)} labels for {len(micro.targets)} rows")
        for name in sorted(set(labels).intersection(names)):
            rows = torch.tensor([label == name for label in labels], device=loss.device)
            count = (micro.targets[rows] != IGNORED).sum()
            self._put(f"{kind}/{name}/loss", loss[rows].sum(), count)

    def _add_segments(
        self, kind: str, names: Collection[str], labels: Sequence[str], segments: Ints, micro: MicroBatch, loss: Tensor
    ) -> None:
        """Of rows that hold several documents: `labels` are those of their segments."""
        columns = torch.stack([loss.double(), (micro.targets != IGNORED).double()], dim=-1).flatten(0, 1)
        places = to_device(segments.clip(0).ravel(), loss.device)
        sums = columns.new_zeros(max(len(labels), 1), 2).index_add_(0, places, columns)
        for name in sorted(set(labels).intersection(names)):
            is_of_name = torch.tensor([float(label == name) for label in labels], dtype=sums.dtype, device=sums.device)
            total, count = is_of_name @ sums
            self._put(f"{kind}/{name}/loss", total, count)


class LoggedDetails(Extension):
    """The details of logged steps."""

    def __init__(self, run: Run, details: StepDetails) -> None:
        super().__init__(run)
        self._details = details
        self.metric_keys = details.metric_keys

    def micro_done(self, micro: MicroBatch, result: ObjectiveOutput) -> None:
        """Take in one micro-batch."""
        self._details.add(micro, result)

    def drain_metrics(self) -> Mapping[str, Reported]:
        """The step's sums."""
        return self._details.drain_metrics()


class ModelMetrics(Extension):
    """The metrics of the model's output, of every step: counters add up between two logged ones."""

    every_step = True

    def __init__(self, run: Run, metric_keys: Sequence[str]) -> None:
        super().__init__(run)
        self.metric_keys = metric_keys

    def micro_done(self, micro: MicroBatch, result: ObjectiveOutput) -> None:
        """Take in one micro-batch."""
        self.run.recorder.add(result.metrics or {})


COMPARED_BITS: Final = 22  # of a digest: their squares add up exactly in float64, over 512 ranks
FACTOR: Final = 0x9E3779B97F4A7C15 - 2**64  # odd, so that multiplying loses no bit


def bit_sum(tensors: Iterable[Tensor]) -> Tensor:
    """[] int64 on the tensors' device: a sum of all their bits, read as 64-bit integers with overflow, which depends on their
    order and is changed by any one bit."""
    total: Any = 0
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        whole = flat.numel() // 8 * 8
        if flat.storage_offset() % 8:  # a view of wider numbers would not be aligned
            flat = flat.clone()
        total = total * FACTOR + flat[:whole].view(torch.int64).sum() + flat[whole:].sum()
    mixed: Tensor = torch.as_tensor(total, dtype=torch.int64)
    for shift in (33, 29, 32):  # every bit changes the low ones: a bijection, as in splitmix64
        mixed = (mixed ^ (mixed >> shift & (1 << 64 - shift) - 1)) * FACTOR
    return mixed


class Replicas(Extension):
    """Ends a run whose ranks hold different weights: W sum(d^2) = sum(d)^2 only if the digests d of all W ranks are equal."""

    num_sums = 2

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
        if not self._differs or len(by_rank) < 2:
            return
        usual, _ = Counter(by_rank).most_common(1)[0]
        odd = ", ".join(str(rank) for rank, digest in enumerate(by_rank) if digest != usual)
        self.run.event({"event": "replicas_differ", "global_step": self._step, "ranks": odd, "digests": list(by_rank)})
        self.run.failure = (
            f"step {self._step}: the weights of rank {odd} are not those of most ranks; they agreed after step {self._agreed}: "
            "memory, a device, or code that changes weights is at fault; resume from a checkpoint until then"
        )


def mix_events(events: Path) -> list[bytes]:
    """The lines of a run's events that tell of a change of weights by `train mix`, or of a refusal."""
    return [line for line in read_lines(events) if b'"mix"' in line] if events.is_file() else []


class MixWeights(Extension):
    """Takes over the weights that `train mix` sets, and reports them with `metrics.per_source`.

    The part that answers requests is loaded on rank 0 by the first one.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._dataset = run.state.dataset
        self._requests: Any = None
        self._look(skip=True)  # nobody waits any more for an answer to what an earlier process was asked
        if run.config.metrics.per_source:
            self.metric_keys = [f"blend/weight/{source.name}" for source in self._dataset.sources]

    def _look(self, *, skip: bool = False) -> None:
        if self._requests is None and self.run.info.is_main and os.path.lexists(self.run.run_dir.path / REQUESTS):
            make = self.run.plan.part("mix requests")
            self._requests = make and make(self.run, skip=skip)

    def drain_metrics(self) -> Mapping[str, Reported]:
        """Answer requests (rank 0). Returns the weights, as shares."""
        read = max(state["batch_index"] for state in self.run.position.data_states)
        # At the end of its data rank 0 cannot say where the others are.
        if not all(micro.is_filler for micro in self.run.last_read):
            self._look()
            if self._requests is not None:
                self._requests.answer(read)
        shares = self._dataset.shares_at(self.run.position.step, read - 1)
        return dict(zip(self.metric_keys, shares, strict=False))

    def to_exchange(self) -> Mapping[int, Mapping[str, float]]:
        """All changes so far; rank 0's count."""
        return self._dataset.changes

    def exchanged(self, by_rank: Sequence[Any]) -> None:
        """Change the weights on this rank."""
        for shard in self.run.state.shards if by_rank[0] else ():
            shard.dataset.changes = by_rank[0]

    def state_dict(self) -> dict[str, Any]:
        """All changes so far, those to come included."""
        return {str(batch): weights for batch, weights in self._dataset.changes.items()}
