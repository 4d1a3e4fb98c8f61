"""A micro-batch taken apart: what the model gets, what the loss needs, what the ledger needs, and the extras."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from trainer.arrays import IGNORED
from trainer.data.own_batches import CARRY_KEYS
from trainer.errors import UserError
from trainer.ledger.slab import to_device
from trainer.metrics.batch_extras import check_inputs, pop_extras


@dataclass(frozen=True)
class Carry:
    """Which group each row continues: int64 [B], int64 [B], bool [B]; group -1 carries nothing."""

    group_ids: np.ndarray
    cell_index: np.ndarray
    is_last: np.ndarray

    @classmethod
    def of_no_group(cls, num_rows: int) -> Self:
        """Rows that carry nothing."""
        return cls(np.full(num_rows, -1), np.zeros(num_rows, np.int64), np.zeros(num_rows, np.bool_))


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch, ready to be trained on."""

    inputs: dict[str, Any]
    """For `model(**inputs)`, without the state."""
    targets: Tensor
    """int64 [B, T]; -100 where there is nothing to predict."""
    carry: Carry | None
    """None: the rows have no groups, the model starts from zero."""
    extras: dict[str, Any]
    """Registered batch extras, for monitoring alone."""
    meta: str = "{}"
    """What identifies the batch, as JSON."""


def accepted_inputs(model: nn.Module) -> frozenset[str] | None:
    """Names that `model.forward` takes beside the state; None if it takes any."""
    parameters = inspect.signature(model.forward).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return None
    return frozenset(parameters) - {"state"}


def split(batch: Mapping[str, Any], accepted: frozenset[str] | None, *, burns_in: bool = False) -> MicroBatch:
    """Take a data set's dict apart.

    Args:
        accepted: inputs that the model takes; None: any.
        burns_in: the model is a `Cellwise` with burn-in: pass it the tokens before each row, and which rows continue.

    Raises:
        UserError: `targets` is absent, only some of the carry keys are there, or a key is neither a registered extra nor
            an input of the model.
    """
    rest = dict(batch)
    extras = pop_extras(rest)
    if "targets" not in rest:
        raise UserError("data", f"a micro-batch has no targets; it has {', '.join(sorted(rest))}", "add targets [B, T]")
    targets = rest.pop("targets")
    given = [key for key in CARRY_KEYS if key in rest]
    if given and len(given) < len(CARRY_KEYS):
        raise UserError(
            "data", f"a micro-batch has {', '.join(given)} but not all of {', '.join(CARRY_KEYS)}", "give all or none"
        )
    carry = Carry(**{key: rest.pop(key) for key in CARRY_KEYS}) if given else None
    if accepted is not None:
        check_inputs(rest, accepted)
    if burns_in:
        rest.update(_history(extras, carry, targets.device))
    return MicroBatch(rest, targets, carry, extras, meta=str(extras.get("instability_meta_json", "{}")))


def _history(extras: Mapping[str, Any], carry: Carry | None, device: torch.device) -> dict[str, Any]:
    """The inputs of burn-in, as far as the batch has them."""
    found = {name: extras[name] for name in ("tokens_before", "resets_before") if name in extras}
    if carry is not None:
        found["continues"] = to_device((carry.cell_index > 0) & (carry.group_ids >= 0), device)
    return found


def halves(micro: MicroBatch) -> list[MicroBatch]:
    """The first and the second half of the rows; a single row, and that row with nothing to predict and no group.

    Always two: ranks that exchange states, or synchronize in a forward, must do it equally often.
    """
    num_rows = len(micro.targets)
    if num_rows < 2:
        carry = micro.carry and Carry.of_no_group(num_rows)
        return [micro, replace(micro, targets=torch.full_like(micro.targets, IGNORED), carry=carry)]

    def part(values: Mapping[str, Any], rows: slice) -> dict[str, Any]:
        return {key: value[rows] if _is_by_row(value, num_rows) else value for key, value in values.items()}

    found = []
    for rows in (slice(num_rows // 2), slice(num_rows // 2, None)):
        carry = micro.carry and Carry(*(getattr(micro.carry, key)[rows] for key in CARRY_KEYS))
        inputs, extras = part(micro.inputs, rows), part(micro.extras, rows)
        found.append(MicroBatch(inputs, micro.targets[rows], carry, extras, micro.meta))
    return found


def _is_by_row(value: Any, num_rows: int) -> bool:
    return isinstance(value, Tensor | np.ndarray | list) and len(value) == num_rows


def masked_copy(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The first row of `batch` with nothing to predict and no group: what a rank trains on when its data have ended."""
    copied: dict[str, Any] = {}
    for key, value in batch.items():
        copied[key] = value[:1] if isinstance(value, Tensor | np.ndarray | list) else value
    copied["targets"] = torch.full_like(copied["targets"], IGNORED)
    if "group_ids" in copied:
        copied["group_ids"] = np.full(1, -1, dtype=np.int64)
    return copied
