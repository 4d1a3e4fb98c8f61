"""What a logged step reports beside its loss: components, accuracy, loss by token type, by source and by modality.

All are sums and counts on the device, over this rank's micro-batches; on other steps nothing is collected.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from trainer.arrays import IGNORED, Ints
from trainer.data.batch import MicroBatch
from trainer.metrics.aggregate import Recorder, Reported, SumCount
from trainer.metrics.best_effort import Diagnostics, SkipBatch
from trainer.objective.loss import ObjectiveOutput, TokenTypeMismatch, token_type_sums
from trainer.on_device import to_device


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
