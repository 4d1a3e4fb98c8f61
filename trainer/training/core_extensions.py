"""The core's own extensions: details of logged steps, model metrics, comparison of replicas."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from trainer.arrays import IGNORED, Ints, weights_of
from trainer.data.loader import MicroBatch
from trainer.distributed.strategy import own_part
from trainer.metrics.aggregate import Recorder, Reported, SumCount
from trainer.metrics.best_effort import Diagnostics, SkipBatch
from trainer.objective import ObjectiveOutput, token_type_sums
from trainer.on_device import to_device
from trainer.training.extension import Extension, RunView, Step

LABELS = {"source": "dataset_labels", "modality": "dataset_segments"}
"""What losses are split by, and the name under which a batch holds its labels."""


class StepDetails(Extension):
    """Collects the sums of a logged step or of an evaluation.

    Args:
        components: names of the loss's components.
        token_types: names of the token types; empty: no losses by token type.
        model_metrics: names of the metrics of the model's output.
        sources, modalities: labels whose losses are reported; others are left out.
        bytes_of: bytes of text of each token id, [V], on the device; None: no bits per byte.
        diagnostics: guards losses by token type and by label, so that a failure costs only those.
        has_loss: False: the loss itself comes from the step's own reduction.
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
        has_loss: bool = True,
    ) -> None:
        diagnostics = diagnostics or Diagnostics()
        self._token_types, self._bytes_of = token_types, bytes_of
        self._names = {"source": sources, "modality": modalities}
        self._token_type_guard = diagnostics.best_effort("token_type")
        self._label_guard = diagnostics.best_effort("per_source")
        self._sums: dict[str, SumCount] = {}
        self._has_model_metrics = bool(model_metrics)
        self._model_metrics = Recorder(leave_out=diagnostics.best_effort("model").leave_out)
        self._has_loss = has_loss
        keys = ["accuracy"] + ["loss"] * has_loss + ["bits_per_byte"] * (bytes_of is not None)
        keys += [*model_metrics, *(f"objective/{name}" for name in components)]
        keys += [f"token_type/{name}/{what}" for name in token_types for what in ("loss", "accuracy")]
        keys += [f"{kind}/{name}/loss" for kind, names in self._names.items() for name in names]
        self.metric_keys = tuple(keys)

    def micro_done(self, micro: MicroBatch, result: ObjectiveOutput) -> None:
        """Add one micro-batch."""
        if self._has_loss and result.parts:  # an evaluation need not have those of the model
            self._put("loss", result.loss_sum.detach(), result.num_tokens)
        for name, (total, count) in result.parts.items():
            self._put(f"objective/{name}", total, count)
        if self._has_model_metrics:
            self._model_metrics.add(result.metrics or {})
        loss, is_correct = result.token_loss, result.is_correct
        if is_correct is not None:
            self._put("accuracy", is_correct.sum(), result.num_tokens)
        if loss is None:
            return
        if self._bytes_of is not None:
            num_bytes = self._bytes_of[micro.targets.clamp(min=0)]
            num_bytes = num_bytes.masked_fill(micro.targets == IGNORED, 0)
            nats = loss.masked_fill(num_bytes == 0, 0.0).sum().double()  # marks are no text
            self._put("bits_per_byte", nats / math.log(2), num_bytes.sum())
        if self._token_types and "token_types" in micro.extras and is_correct is not None:
            self._token_type_guard.run(self._add_token_types, micro, loss, is_correct)
        for kind, names in self._names.items():
            if names and LABELS[kind] in micro.extras:
                self._label_guard.run(self._add_labels, kind, micro, loss)

    def drain_metrics(self) -> dict[str, Reported]:
        """The sums since the last drain, by catalog key."""
        drained, self._sums = self._sums, {}
        return {**drained, **self._model_metrics.drain_metrics()}

    def _put(self, key: str, total: Tensor, count: Tensor) -> None:
        before = self._sums.get(key)
        if before is not None:  # added on the device, without waiting
            total, count = before.total + total, before.weight + count
        self._sums[key] = SumCount(total.double(), count.double())

    def _add_token_types(self, micro: MicroBatch, loss: Tensor, is_correct: Tensor) -> None:
        types = micro.extras["token_types"]
        # Masked by the targets: a rank without data keeps the types of its last batch, and a custom
        # data set may type every position.
        mask = micro.targets != IGNORED
        sums = token_type_sums(loss, is_correct, types, len(self._token_types), mask=mask)
        for index, name in enumerate(self._token_types):
            self._put(f"token_type/{name}/loss", sums.loss[index], sums.num_tokens[index])
            self._put(f"token_type/{name}/accuracy", sums.num_correct[index], sums.num_tokens[index])

    def _add_labels(self, kind: str, micro: MicroBatch, loss: Tensor) -> None:
        """Add the losses by label: of each row, or of each segment where rows hold several."""
        labels, segments = micro.extras[LABELS[kind]], micro.extras.get("segment_ids")
        names = sorted(set(labels).intersection(self._names[kind]))
        if segments is not None:
            self._add_segments(kind, names, labels, segments, micro, loss)
            return
        if len(labels) != len(micro.targets):
            raise SkipBatch(f"{len(labels)} labels for {len(micro.targets)} rows")
        for name in names:
            rows = torch.tensor([label == name for label in labels], device=loss.device)
            num_tokens = weights_of(micro.targets[rows]).sum()
            self._put(f"{kind}/{name}/loss", loss[rows].sum(), num_tokens)

    def _add_segments(
        self, kind: str, names: Sequence[str], labels: Sequence[str], segments: Ints, micro: MicroBatch, loss: Tensor
    ) -> None:
        weights = weights_of(micro.targets)
        columns = torch.stack([loss.double(), weights.double()], dim=-1).flatten(0, 1)  # [B T, 2]
        places = to_device(torch.as_tensor(segments).ravel().long() + 1, loss.device)  # 0: none
        sums = columns.new_zeros(len(labels) + 1, 2).index_add_(0, places, columns)[1:]
        for name in names:
            others = to_device([[label != name] for label in labels], sums.device)
            total, count = sums.masked_fill(others, 0.0).sum(dim=0)  # not times 0: a loss may be infinite
            self._put(f"{kind}/{name}/loss", total, count)


class ModelMetrics(Extension):
    """The metrics of the model's output, at every step: counters add up between two logged ones."""

    every_step = True

    def __init__(self, run: RunView) -> None:
        super().__init__(run)
        self.metric_keys = run.auxiliary.metric_keys

    def micro_done(self, micro: MicroBatch, result: ObjectiveOutput) -> None:
        """Add one micro-batch."""
        self.run.recorder.add(result.metrics or {})


COMPARED_BITS: Final = 52  # of a digest, which a float64 holds exactly
FACTOR: Final = 0x9E3779B97F4A7C15 - 2**64  # odd, so that multiplying loses no bit


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
    """Ends a run whose ranks hold different weights, by a digest of each rank's."""

    def __init__(self, run: RunView) -> None:
        super().__init__(run)
        self.num_sums = run.info.world_size
        self._parameters = [*run.model.parameters()]
        self._agreed = run.first_step

    def updated(self) -> Tensor:
        """[W] this rank's digest at its place, 0 at the others', so that the sum holds all."""
        digest = bit_sum(map(own_part, self._parameters)) & (1 << COMPARED_BITS) - 1
        digests = torch.zeros(self.num_sums, dtype=torch.float64, device=digest.device)
        digests[self.run.info.rank] = digest
        return digests

    def settled(self, step: Step, sums: Sequence[float] | None) -> None:
        """End the run if the ranks differ, and name those that are not as most are."""
        if sums is None:
            return
        if len(set(sums)) == 1:
            self._agreed = step.number
            return
        usual, _ = Counter(sums).most_common(1)[0]
        odd = ", ".join(str(rank) for rank, digest in enumerate(sums) if digest != usual)
        event = {"event": "replicas_differ", "global_step": step.number, "ranks": odd}
        self.run.event({**event, "digests": list(map(int, sums))})
        self.run.failure = (
            f"step {step.number}: the weights of rank {odd} are not those of rank {sums.index(usual)}; "
            f"they agreed after step {self._agreed}; resume from a checkpoint until then: "
            "memory, a device, or code that changes weights is at fault"
        )
