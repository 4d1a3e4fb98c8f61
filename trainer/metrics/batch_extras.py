"""Batch extras: the entries that a collator may add to a batch beside the model's inputs.

The step removes the extras before `model(**inputs)` and passes them to monitoring. New extras are registered here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping
from typing import Any, Final

from trainer.errors import UserError

BATCH_EXTRAS: Final[Mapping[str, str]] = {
    "dataset_labels": "source of each row, a list of names",
    "dataset_segments": "modality of each row, a list of names",
    "pack_num_samples": "documents in each row, integers [B]",
    "token_types": "type of each target token, small integers [B, T], -1 where masked",
    "tokens_before": "inputs of the row's earlier cells in its group, the last n of them, right-aligned, integers [B, n]",
    "resets_before": "resets of the row's earlier cells, booleans [B, n]",
    "instability_meta_json": "JSON text that locates the batch: stream, slice position, group ids",
}


def pop_extras(batch: MutableMapping[str, Any]) -> dict[str, Any]:
    """Remove the registered extras from the batch (in place) and return them."""
    return {name: batch.pop(name) for name in BATCH_EXTRAS if name in batch}


def check_inputs(inputs: Collection[str], accepted: Collection[str]) -> None:
    """Check that the model accepts every input left in a batch after `pop_extras`.

    Raises:
        UserError: an input is neither a registered extra nor accepted by the model.
    """
    unknown = sorted(set(inputs) - set(accepted))
    if unknown:
        raise UserError(
            f"batch key {', '.join(unknown)}",
            f"neither an input of the model ({', '.join(sorted(accepted))}) "
            f"nor a registered batch extra ({', '.join(sorted(BATCH_EXTRAS))})",
            "accept it in the model, register it in trainer/metrics/batch_extras.py, or do not collate it",
        )
