"""The micro-batch that a step trains on: a data set's dict, taken apart once."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

import numpy as np
import torch
from torch import Tensor, nn

from trainer.arrays import IGNORED
from trainer.errors import UserError

CARRY_KEYS = ("group_ids", "cell_index", "is_last")
OPTIONAL_CARRY_KEYS = ("end_ids", "end_cell_index", "depth")
MASKED_SHARE = "stream_mixing/masked_share"
FILL = "data/fill"
BATCH_EXTRAS: Final[Mapping[str, str]] = {
    "dataset_labels": "source of each row, a list; with segment_ids of each segment, a tuple",
    "dataset_segments": "modality of each row, a list; with segment_ids of each segment, a tuple",
    "segment_ids": "segment of each target, integers [B, T], -1 where there is none",
    "pack_num_samples": "documents in each row, integers [B]",
    "token_types": "type of each target token, small integers [B, T], -1 where masked",
    "instability_meta_json": "JSON that locates the batch, or an object that makes it",
}
"""The keys of a data set's dict that the model never gets. A new one is registered here."""


@dataclass(frozen=True)
class Carry:
    """Which group each row continues: int64 [B], int64 [B], bool [B]; group -1 carries nothing.

    `end_ids` and `end_cell_index`, int64 [B]: the group that continues after the row, and its cell
    there, where that may be another one. `depth`, int64 [B]: tokens of the row's group before it;
    None: those of whole cells.
    """

    group_ids: np.ndarray
    cell_index: np.ndarray
    is_last: np.ndarray
    end_ids: np.ndarray | None = None
    end_cell_index: np.ndarray | None = None
    depth: np.ndarray | None = None

    def rows(self, part: slice) -> Self:
        given = {key: value for key, value in vars(self).items() if value is not None}
        return replace(self, **{key: value[part] for key, value in given.items()})

    def tokens_before(self, row_tokens: int) -> np.ndarray:
        """Tokens of each row's group before it, int64 [B], of rows of that many tokens."""
        return self.cell_index * row_tokens if self.depth is None else self.depth

    @classmethod
    def of_no_group(cls, num_rows: int) -> Self:
        nothing = np.zeros(num_rows, np.int64)
        return cls(nothing - 1, nothing, nothing != 0)


@dataclass(frozen=True)
class MicroBatch:
    inputs: dict[str, Any]  # for `model(**inputs)`, without the state
    targets: Tensor  # int64 [B, T]; -100 where there is nothing to predict
    carry: Carry | None  # None: the rows have no groups, the model starts from zero
    extras: dict[str, Any]  # those of `BATCH_EXTRAS`, for monitoring alone
    located: object = "{}"  # identifies the batch: JSON, as it is or once it is asked for
    # The data set's state after this batch, however far a loader has read ahead: resuming from it
    # gives the next batch.
    state: Any = None
    # Reported by the data set with it; None is a value that it should have reported and could not.
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    shard: int = 0  # which of the rank's data shards it is of, from 0
    # What the rows are of: documents, or the groups of a data set that does not say.
    documents: Collection[Hashable] = ()
    is_filler: bool = False  # a masked copy: the data set had nothing left

    @property
    def meta(self) -> str:
        """JSON that identifies the batch."""
        return str(self.located)

    def rows(self, part: slice) -> MicroBatch:
        """These rows. Values without an entry for each row stay as they are."""
        num_rows = len(self.targets)

        def cut(values: Mapping[str, Any]) -> dict[str, Any]:
            by_row = {k: v for k, v in values.items() if isinstance(v, Tensor | np.ndarray | list)}
            return {**values, **{key: v[part] for key, v in by_row.items() if len(v) == num_rows}}

        inputs, extras = cut(self.inputs), cut(self.extras)
        carry = self.carry and self.carry.rows(part)
        return replace(self, inputs=inputs, targets=self.targets[part], carry=carry, extras=extras)

    def masked(self) -> MicroBatch:
        """The first row with nothing to predict and no group; all rows if rows are full."""
        # Batches of full rows have one shape.
        first = self if "segment_ids" in self.extras else self.rows(slice(1))
        carry = first.carry and Carry.of_no_group(len(first.targets))
        targets, metrics = torch.full_like(first.targets, IGNORED), {MASKED_SHARE: 1.0, FILL: 0.0}
        return replace(first, targets=targets, carry=carry, metrics=metrics, documents=(), is_filler=True)

    def to(self, device: torch.device) -> MicroBatch:

        def moved(values: Mapping[str, Any]) -> dict[str, Any]:
            tensors = {key: v.to(device) for key, v in values.items() if isinstance(v, Tensor)}
            return {**values, **tensors}

        targets = self.targets.to(device)
        return replace(self, inputs=moved(self.inputs), targets=targets, extras=moved(self.extras))


def accepted_inputs(model: nn.Module) -> frozenset[str] | None:
    """Names that `model.forward` takes in addition to the state; None if it takes any."""
    parameters = inspect.signature(model.forward).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return None
    return frozenset(parameters) - {"state"}


def check_inputs(inputs: Collection[str], accepted: Collection[str]) -> None:
    """Refuse keys of a batch that are neither an extra nor an input of the model."""
    unknown = sorted(set(inputs) - set(accepted))
    if unknown:
        taken, extras = ", ".join(sorted(accepted)), ", ".join(sorted(BATCH_EXTRAS))
        problem = f"neither an input of the model ({taken}) nor a registered batch extra ({extras})"
        fix = "accept it in the model, register it in trainer/data/batch.py, or do not collate it"
        raise UserError(f"batch key {', '.join(unknown)}", problem, fix)


def take_apart(batch: Mapping[str, Any], accepted: frozenset[str] | None) -> MicroBatch:
    """A data set's dict as a micro-batch. `accepted`: inputs that the model takes; None: any.

    Raises UserError if `targets` is absent, only some of the carry keys are there, or a key is
    neither a registered extra nor an input of the model.
    """
    inputs = {key: value for key, value in batch.items() if key not in BATCH_EXTRAS}
    extras = {key: value for key, value in batch.items() if key in BATCH_EXTRAS}
    problem, missing = "", sorted(set(CARRY_KEYS) - inputs.keys())
    if "targets" not in inputs:
        problem, fix = f"no targets; it has {', '.join(sorted(inputs))}", "add targets [B, T]"
    elif 0 < len(missing) < len(CARRY_KEYS):
        problem = f"not all of {', '.join(CARRY_KEYS)}: it has no {', '.join(missing)}"
        fix = "give all or none"
    if problem:
        raise UserError("data", f"a micro-batch has {problem}", fix)
    targets, carry = inputs.pop("targets"), None
    if not missing:
        optional = {key: np.asarray(inputs.pop(key)) for key in OPTIONAL_CARRY_KEYS if key in inputs}
        carry = Carry(*map(np.asarray, map(inputs.pop, CARRY_KEYS)), **optional)
    if accepted is not None and not inputs.keys() <= accepted:
        check_inputs(inputs, accepted)
    located = extras.get("instability_meta_json", "{}")
    documents = getattr(located, "documents", None)
    if documents is None and carry is not None:
        documents = {*carry.group_ids.tolist()} - {-1}
    return MicroBatch(inputs, targets, carry, extras, located, documents=documents or ())
