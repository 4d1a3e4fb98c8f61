"""What a logged step reports beside its loss: components, accuracy, loss by token type, by source and by modality.

All are sums and counts on the device, over this rank's micro-batches; on other steps nothing is collected.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from trainer.metrics.aggregate import SumCount
from trainer.metrics.best_effort import BestEffort, SkipBatch
from trainer.objective.compose import ObjectiveOutput
from trainer.objective.token_types import TokenTypeMismatch, token_type_sums
from trainer.training.step.microbatch import IGNORED, MicroBatch


class StepDetails:
    """Collects one step's sums.

    Args:
        is_enabled: False on steps that do not log: `add` does nothing.
        token_types: names of the token types; empty if they are not wanted or not known.
        token_type_guard: a failure there costs this diagnostic alone.
        per_source: also losses by source and modality.
        per_source_guard: as `token_type_guard`, for these.
        planned: keys that the reduction over ranks has a place for; a label that a data set of one's own makes up is left
            out. None: all of them are.
    """

    def __init__(
        self,
        is_enabled: bool,
        *,
        token_types: Sequence[str],
        token_type_guard: BestEffort,
        per_source: bool,
        per_source_guard: BestEffort | None = None,
        planned: Collection[str] | None = None,
    ) -> None:
        self._is_enabled = is_enabled
        self._token_types = token_types
        self._token_type_guard = token_type_guard
        self._per_source = per_source
        self._per_source_guard = per_source_guard or BestEffort("per_source")
        self._planned = planned
        self._sums: dict[str, SumCount] = {}

    def add(self, micro: MicroBatch, result: ObjectiveOutput) -> None:
        """Take in one micro-batch."""
        if not self._is_enabled:
            return
        self._put("loss", result.loss_sum.detach(), result.num_tokens)
        for name, (total, count) in result.parts.items():
            self._put(f"objective/{name}", total, count)
        self._put("accuracy", result.num_correct, result.num_tokens)
        if self._token_types and "token_types" in micro.extras:
            self._token_type_guard.run(self._add_token_types, micro, result)
        if self._per_source:
            self._per_source_guard.run(self._add_sources, micro, result)

    def values(self) -> dict[str, SumCount]:
        """The sums of the step, by catalog key."""
        return self._sums

    def _put(self, key: str, total: Tensor, count: Tensor) -> None:
        before = self._sums.get(key)
        if before is not None:
            total, count = before.total + total, before.weight + count
        self._sums[key] = SumCount(total.double(), count.double())

    def _add_token_types(self, micro: MicroBatch, result: ObjectiveOutput) -> None:
        types = micro.extras["token_types"]
        try:
            sums = token_type_sums(result.token_loss, result.is_correct, types, len(self._token_types))
        except TokenTypeMismatch as error:
            raise SkipBatch(str(error)) from None
        for index, name in enumerate(self._token_types):
            self._put(f"token_type/{name}/loss", sums.loss[index], sums.num_tokens[index])
            self._put(f"token_type/{name}/accuracy", sums.num_correct[index], sums.num_tokens[index])

    def _add_sources(self, micro: MicroBatch, result: ObjectiveOutput) -> None:
        self._add_labels("source", micro.extras.get("dataset_labels", ()), micro, result)
        self._add_labels("modality", micro.extras.get("dataset_segments", ()), micro, result)

    def _add_labels(self, kind: str, labels: Sequence[str], micro: MicroBatch, result: ObjectiveOutput) -> None:
        if labels and len(labels) != len(micro.targets):
            raise SkipBatch(f"{len(labels)} labels for {len(micro.targets)} rows")
        for name in sorted(set(labels)):
            key = f"{kind}/{name}/loss"
            if self._planned is None or key in self._planned:
                rows = torch.tensor([label == name for label in labels], device=result.token_loss.device)
                count = (micro.targets[rows] != IGNORED).sum()
                self._put(key, result.token_loss[rows].sum(), count)


def detail_keys(
    components: Iterable[str], token_types: Iterable[str], sources: Iterable[str], modalities: Iterable[str]
) -> list[str]:
    """Every key that `StepDetails.values` can hold: the plan of the reduction, the same on all ranks."""
    return [
        "loss",
        "accuracy",
        *(f"objective/{name}" for name in components),
        *(f"token_type/{name}/{what}" for name in token_types for what in ("loss", "accuracy")),
        *(f"source/{name}/loss" for name in sources),
        *(f"modality/{name}/loss" for name in modalities),
    ]
